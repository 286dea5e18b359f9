"""Which process drives a sweep, on a made-up /proc."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils import arborist_controller as controller

from tests.plugins.support import load

BOOT = "11111111-2222-3333-4444-555555555555"


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    (tmp_path / "sys/kernel/random").mkdir(parents=True)
    (tmp_path / "sys/kernel/random/boot_id").write_text(BOOT + "\n")
    in_namespace(tmp_path, 4026531836)
    # a shell that names the playbook in one word, the playbook, its worker, the module's shell and Python
    add(tmp_path, 10, 1, 1000, ["bash", "-c", "cd x && ansible-playbook sweep.yml"])
    add(tmp_path, 20, 10, 2000, ["/venv/bin/python3", "/venv/bin/ansible-playbook", "sweep.yml"])
    add(tmp_path, 30, 20, 3000, ["/venv/bin/python3", "/venv/bin/ansible-playbook", "sweep.yml"])
    add(tmp_path, 40, 30, 4000, ["/bin/sh", "-c", "python3 && sleep 0"])
    add(tmp_path, 50, 40, 5000, ["python3", "AnsiballZ_sweep_plan.py"])
    return tmp_path


def in_namespace(proc: Path, number: int) -> None:
    (proc / "self/ns").mkdir(parents=True, exist_ok=True)
    (proc / "self/ns/pid").unlink(missing_ok=True)
    (proc / "self/ns/pid").symlink_to(f"pid:[{number}]")


def add(proc: Path, pid: int, parent: int, started: int, argv: list[str]) -> None:
    folder = proc / str(pid)
    folder.mkdir(exist_ok=True)
    after = ["S", str(parent), *["0"] * 17, str(started), "0"]
    (folder / "stat").write_text(f"{pid} (we) ird {'(x)'}) {' '.join(after)}\n")
    (folder / "cmdline").write_bytes(b"".join(a.encode() + b"\0" for a in argv))


def test_the_token_names_the_playbooks_main_process(proc: Path) -> None:
    assert controller.token(50, proc) == f"{BOOT.replace('-', '')}4026531836-20-2000"
    assert controller.describe(50, proc).endswith(", process 20")


def test_a_running_controller_is_not_gone(proc: Path) -> None:
    assert controller.gone(controller.token(50, proc), proc) is False


def test_an_ended_controller_is_gone(proc: Path) -> None:
    token = controller.token(50, proc)
    for name in ("stat", "cmdline"):
        (proc / "20" / name).unlink()
    assert controller.gone(token, proc) is True


def test_a_reused_process_id_does_not_keep_a_dead_controller_alive(proc: Path) -> None:
    token = controller.token(50, proc)
    add(proc, 20, 1, 9999, ["vim"])
    assert controller.gone(token, proc) is True


def test_a_controller_in_another_container_is_never_called_gone(proc: Path) -> None:
    token = controller.token(50, proc)
    in_namespace(proc, 4026532999)
    for name in ("stat", "cmdline"):
        (proc / "20" / name).unlink()  # not to be seen from here
    assert controller.gone(token, proc) is False


def test_a_controller_of_another_machine_or_boot_is_never_called_gone(proc: Path) -> None:
    other = "99999999222233334444555555555555-20-2000"
    assert controller.gone(other, proc) is False
    assert controller.gone("unknown-abc", proc) is False
    assert controller.gone("", proc) is False


def test_without_a_playbook_above_the_token_can_not_be_found_again(proc: Path, tmp_path: Path) -> None:
    first, second = controller.token(10, proc), controller.token(10, proc)
    assert first.startswith("unknown-")
    assert first != second


def test_an_owner_that_lives_is_refused(run_module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = load("sweep_owner")
    holder = {"token": "x", "study": "s1", "started_at": "T", "controller": "a@b, process 7"}
    monkeypatch.setattr(module, "gone", lambda token: False)
    result = run_module(module, service="svc", host="h1", holder=holder)
    assert result["failed"] is True
    for part in ("svc on h1", "study s1", "a@b, process 7", "restore.yml"):
        assert part in result["msg"]
    monkeypatch.setattr(module, "gone", lambda token: token == "x")
    assert run_module(module, service="svc", host="h1", holder=holder)["token"] == "x"
