"""The preflight module: each check on a host made of files, and every problem at once."""

from __future__ import annotations

import json
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.roles.rolekit import ROOT, module

preflight = module("sglang_preflight")
Run = Callable[[list[str]], tuple[int, str, str]]

TARGET = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 2048,
    "hidden_size": 128,
    "num_hidden_layers": 20,
}
DRAFT = {
    "architectures": ["DFlashDraftModel"],
    "vocab_size": 2048,
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_target_layers": 20,
    "dflash_config": {"target_layer_ids": [4, 11, 18]},
}
NOTHING: dict[str, Any] = {
    "unit": None,
    "python": None,
    "root": None,
    "disk_mb": None,
    "memory_mb": None,
    "shm_mb": None,
    "host": None,
    "port": None,
    "user": "root",
    "model_path": None,
    "draft_model_path": None,
    "draft_required": False,
    "offline": True,
    "weights": True,
    "wheelhouse": None,
    "requirements": [],
    "gpus": None,
}


def says(**answers: str) -> Run:
    """A ``run_command`` that answers by the program's name, and fails for any other."""

    def run(argv: list[str]) -> tuple[int, str, str]:
        name = Path(argv[0]).name.replace("-", "_")
        return (0, answers[name], "") if name in answers else (1, "", f"{argv[0]}: broken")

    return run


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def model(folder: Path, config: dict[str, Any] | None = None) -> Path:
    """A model's folder with a config and weights."""
    write(folder / "config.json", json.dumps(TARGET if config is None else config))
    write(folder / "model.safetensors", "")
    return folder


# --- systemd ---
@pytest.mark.parametrize(
    ("comm", "version", "found"),
    [
        ("systemd\n", "systemd 252 (252.39-1)\n+PAM", None),
        ("systemd\n", "systemd 247\n", None),
        ("systemd\n", "systemd 245 (245.4)\n", "systemd 245 (245.4)"),
        ("bash\n", "systemd 252\n", "PID 1 is bash"),
    ],
)
def test_systemd_boots_the_host(tmp_path: Path, comm: str, version: str, found: str | None) -> None:
    write(tmp_path / "proc/1/comm", comm)
    problems = list(preflight.check_systemd(says(systemctl=version), tmp_path))
    assert [problem.found for problem in problems] == ([found] if found else [])


# --- Python ---
def python(root: Path, path: str = "/usr/bin/python3") -> str:
    write(root / path.lstrip("/"), "")
    return path


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        ([[3, 11], True], None),
        ([[3, 13], True], None),
        ([[3, 10], True], "/usr/bin/python3 is 3.10"),
        ([[3, 14], True], "/usr/bin/python3 is 3.14"),
        ([[3, 11], False], "/usr/bin/python3 (3.11) has no venv or no ensurepip"),
    ],
)
def test_pythons(tmp_path: Path, answer: list[Any], found: str | None) -> None:
    path = python(tmp_path)
    problems, learnt = preflight.check_python(says(python3=json.dumps(answer)), path, tmp_path)
    assert [problem.found for problem in problems] == ([found] if found else [])
    assert learnt == {"path": path, "version": ".".join(map(str, answer[0]))}


def test_a_python_that_is_not_there_and_the_one_that_is(tmp_path: Path) -> None:
    python(tmp_path, "/usr/bin/python3.12")
    problems, learnt = preflight.check_python(says(), "/usr/bin/python3", tmp_path)
    assert learnt == {}
    assert str(problems[0]) == (
        "Python: found no /usr/bin/python3; expected Python 3.11 to 3.13 with venv; "
        "set sglang_python (found here: /usr/bin/python3.12)"
    )


def test_the_running_python_passes_its_own_probe() -> None:
    import subprocess
    import sys

    out = subprocess.run([sys.executable, "-I", "-c", preflight._PROBE], capture_output=True, text=True)
    assert json.loads(out.stdout) == [list(sys.version_info[:2]), True]


# --- space and memory ---
def test_space_is_that_of_the_file_system_a_folder_would_be_on(tmp_path: Path) -> None:
    later = tmp_path / "not" / "there"
    assert list(preflight.check_space(later, 1, "disk", "free some")) == []
    problem = next(preflight.check_space(later, 1 << 40, "disk", "free some"))
    assert problem.found.endswith(f"MiB free in {tmp_path}")


def test_memory_counts_what_the_own_service_uses(tmp_path: Path) -> None:
    write(tmp_path / "proc/meminfo", "MemTotal: 9999999 kB\nMemAvailable:    1048576 kB\n")
    run = says(systemctl="MemoryCurrent=1073741824\n")
    assert list(preflight.check_memory(run, 2048, "sglang", tmp_path)) == []
    assert next(preflight.check_memory(run, 2049, "sglang", tmp_path)).found == "2048 MiB available"
    assert next(preflight.check_memory(run, 1025, "", tmp_path)).found == "1024 MiB available"


@pytest.mark.parametrize("current", ["[not set]", "18446744073709551615", ""])
def test_memory_of_a_service_without_accounting_is_not_counted(tmp_path: Path, current: str) -> None:
    write(tmp_path / "proc/meminfo", "MemAvailable:    1048576 kB\n")
    run = says(systemctl=f"MemoryCurrent={current}\n")
    assert next(preflight.check_memory(run, 2048, "sglang", tmp_path)).found == "1024 MiB available"


# --- address and port ---
@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_loopback_is_accepted(host: str) -> None:
    assert list(preflight.check_bind(host)) == []


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org", ""])
def test_a_wide_bind_is_refused(host: str) -> None:
    problem = next(preflight.check_bind(host))
    assert problem.found == f"sglang_host {host}"
    assert "ssh tunnel or a reverse proxy" in problem.change


def test_the_holder_of_a_port_is_named() -> None:
    """On the real /proc: this very process listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        found = list(preflight.check_port("127.0.0.1", port, "sglang-ddtree", Path("/")))
        comm = Path("/proc/self/comm").read_text().strip()
        assert len(found) == 1
        assert found[0].found.startswith(f"process {os.getpid()} ({comm}")
        assert found[0].found.endswith(f"listens on 127.0.0.1 port {port}")
    assert list(preflight.check_port("127.0.0.1", port, "sglang-ddtree", Path("/"))) == []


HEADER = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"


def listening(
    root: Path, address: str, table: str = "tcp", state: str = "0A", group: str | None = None
) -> Path:
    """One socket in /proc/net, held by process 77."""
    write(
        root / "proc/net" / table,
        f"{HEADER}   0: {address}:7530 00000000:0000 {state} 0:0 00:0 0 0 0 4711 1 0 100 0 0 10 0\n",
    )
    if group is not None:
        fd = root / "proc/77/fd"
        fd.mkdir(parents=True)
        (fd / "3").symlink_to("socket:[4711]")
        write(root / "proc/77/comm", "python\n")
        write(root / "proc/77/cgroup", group)
    return root


LOOPBACK, ANY, OTHER = "0100007F", "00000000", "0A00000A"
ANY6, MAPPED = "0" * 32, "0000000000000000FFFF00000100007F"


@pytest.mark.parametrize(
    ("address", "table", "taken"),
    [
        (LOOPBACK, "tcp", True),
        (ANY, "tcp", True),
        (OTHER, "tcp", False),
        (ANY6, "tcp6", True),
        (MAPPED, "tcp6", True),
        ("00000000000000000000000001000000", "tcp6", False),
    ],
)
def test_only_an_address_that_overlaps_is_in_the_way(
    tmp_path: Path, address: str, table: str, taken: bool
) -> None:
    found = list(preflight.check_port("127.0.0.1", 30000, "sglang", listening(tmp_path, address, table)))
    assert bool(found) == taken
    if taken:
        assert "a process that cannot be seen" in found[0].found


def test_a_connection_is_no_listener(tmp_path: Path) -> None:
    assert not list(
        preflight.check_port("127.0.0.1", 30000, "sglang", listening(tmp_path, LOOPBACK, state="01"))
    )


@pytest.mark.parametrize(
    ("group", "who"),
    [
        ("0::/system.slice/sglang.service\n", None),
        ("1:name=systemd:/system.slice/sglang.service/worker\n", None),
        ("0::/system.slice/nginx.service\n", "process 77 (python, nginx.service)"),
        ("0::/system.slice/not-sglang.service\n", "process 77 (python, not-sglang.service)"),
        ("0::/user.slice/session-3.scope\n", "process 77 (python, session-3.scope)"),
        ("0::/\n", "process 77 (python)"),
    ],
)
def test_the_own_service_may_hold_the_port(tmp_path: Path, group: str, who: str | None) -> None:
    found = list(
        preflight.check_port("localhost", 30000, "sglang", listening(tmp_path, LOOPBACK, group=group))
    )
    assert [p.found for p in found] == ([f"{who} listens on 127.0.0.1 port 30000"] if who else [])


# --- models ---
def check_model(path: Path | str, user: str = "root", offline: bool = True, weights: bool = True) -> Any:
    return preflight.check_model("model", "sglang_model_path", str(path), user, offline, weights)


def test_a_complete_model_passes(tmp_path: Path) -> None:
    assert check_model(model(tmp_path / "m")) == ([], TARGET)


def test_what_can_be_wrong_with_a_model(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    write(tmp_path / "broken/config.json", "{")
    write(tmp_path / "list/config.json", "[]")
    write(tmp_path / "bare/config.json", "{}")
    expected = {
        "missing": f"no folder {tmp_path}/missing",
        "empty": f"no config.json in {tmp_path}/empty",
        "broken": f"{tmp_path}/broken/config.json cannot be read: ",
        "list": f"{tmp_path}/list/config.json holds no mapping",
        "bare": f"no weights in {tmp_path}/bare",
    }
    for name, found in expected.items():
        problems, config = check_model(tmp_path / name)
        assert config == {}
        assert [problem.found.startswith(found) for problem in problems] == [True], name
    assert check_model(tmp_path / "bare", weights=False) == ([], {})


def test_a_half_fetched_model_is_noticed(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    names = {f"layer{i}": f"model-{i}.safetensors" for i in range(3)}
    write(folder / "config.json", "{}")
    write(folder / "model.safetensors.index.json", json.dumps({"weight_map": names}))
    write(folder / "model-1.safetensors", "")
    problems, _ = check_model(folder)
    assert problems[0].found == (f"2 of 3 weight files missing in {folder}, the first model-0.safetensors")


@pytest.mark.parametrize(
    ("path", "offline", "passes"),
    [
        ("organisation/model", False, True),
        ("organisation/model", True, False),
        ("model", False, False),
        ("../model", False, False),
        ("", False, False),
    ],
)
def test_a_hubs_name_is_for_services_that_may_go_online(path: str, offline: bool, passes: bool) -> None:
    problems, _ = check_model(path, offline=offline)
    assert (problems == []) == passes


def test_the_services_user_must_get_at_the_model(tmp_path: Path) -> None:
    """The user is not there yet, so it has the rights of everybody."""
    folder = model(tmp_path / "m")
    for step in (tmp_path, *tmp_path.parents):
        if not step.stat().st_mode & stat.S_IXOTH:
            step.chmod(step.stat().st_mode | stat.S_IXOTH)
    for name in ("config.json", "model.safetensors"):
        (folder / name).chmod(0o644)
    folder.chmod(0o755)
    assert check_model(folder, user="no-such-user")[0] == []
    (folder / "model.safetensors").chmod(0o600)
    assert check_model(folder, user="no-such-user")[0][0].found.startswith(
        f"{folder}/model.safetensors has mode 0600"
    )
    folder.chmod(0o700)
    problem = check_model(folder, user="no-such-user")[0][0]
    assert problem.found.startswith(f"{folder} has mode 0700")
    assert problem.expected == "the model readable for the user no-such-user"


# --- target and draft ---
def test_a_pair_that_belongs_together_passes() -> None:
    assert list(preflight.check_pair(TARGET, DRAFT)) == []


def test_the_demo_pair_passes() -> None:

    configs = [
        json.loads((ROOT / "models/demo" / name / "config.json").read_text()) for name in ("target", "draft")
    ]
    assert list(preflight.check_pair(*configs)) == []


def test_sizes_of_a_nested_config_count() -> None:
    nested = {"architectures": ["KimiK25ForConditionalGeneration"], "text_config": TARGET}
    assert list(preflight.check_pair(nested, DRAFT)) == []
    assert (
        next(preflight.check_pair({"text_config": TARGET | {"vocab_size": 5}}, DRAFT)).expected
        == "the target's 5"
    )


@pytest.mark.parametrize(
    ("change", "found", "expected"),
    [
        ({"vocab_size": 4096}, "vocab_size 4096", "the target's 2048"),
        ({"hidden_size": 256}, "hidden_size 256", "the target's 128"),
        ({"num_target_layers": 36}, "num_target_layers 36", "the target's 20 layers"),
        ({"dflash_config": {"target_layer_ids": [4, 20]}}, "target_layer_ids [20]", "0 to 19"),
    ],
)
def test_a_draft_for_another_target(change: dict[str, Any], found: str, expected: str) -> None:
    problems = list(preflight.check_pair(TARGET, DRAFT | change))
    assert [(p.found, p.expected) for p in problems] == [(found, expected)]


def test_any_other_model_is_no_draft() -> None:
    problem = next(preflight.check_pair(TARGET, TARGET))
    assert problem.found == "a draft of architecture Qwen3ForCausalLM without dflash_config"


# --- the wheelhouse ---
@pytest.mark.parametrize(
    ("pin", "file", "there"),
    [
        ("aiohttp==3.14.5", "aiohttp-3.14.5-cp311-cp311-manylinux_2_17_x86_64.whl", True),
        ("aiohttp==3.14.5", "aiohttp-3.14.50-cp311-cp311-manylinux_2_17_x86_64.whl", False),
        ("aiohttp==3.14.5", "aiohttp_cors-3.14.5-py3-none-any.whl", False),
        ("torch==2.13.0", "torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl", True),
        ("PyYAML==6.0.4", "pyyaml-6.0.4-cp311-cp311-manylinux_2_17_x86_64.whl", True),
        ("typing-inspection==0.4.5", "typing_inspection-0.4.5-py3-none-any.whl", True),
        ("ipython_pygments_lexers==1.1.1", "ipython_pygments_lexers-1.1.1-py3-none-any.whl", True),
        ("interegular==0.3.3", "interegular-0.3.3.tar.gz", True),
        ("interegular==0.3", "interegular-0.3.3.tar.gz", False),
        ("aiohttp==3.14", "aiohttp-3.14.5-cp311-cp311-manylinux_2_17_x86_64.whl", False),
        ("aiohttp==3.14.5", "aiohttp-3.14.5.txt", False),
    ],
)
def test_a_pin_is_found_in_the_wheelhouse(tmp_path: Path, pin: str, file: str, there: bool) -> None:
    write(tmp_path / file, "")
    assert (list(preflight.check_wheelhouse(tmp_path, [pin])) == []) == there


def test_what_a_wheelhouse_lacks_is_named(tmp_path: Path) -> None:
    pins = [f"package{i}==1" for i in range(7)]
    problem = next(preflight.check_wheelhouse(tmp_path, pins))
    assert problem.found == (
        f"7 of 7 packages missing in {tmp_path}: "
        "package0==1, package1==1, package2==1, package3==1, package4==1, …"
    )
    assert next(preflight.check_wheelhouse(tmp_path / "no", pins)).found == f"no folder {tmp_path}/no"


# --- accelerators ---
def test_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = "NVIDIA RTX PRO 6000, 580.1, 97887 MiB"
    monkeypatch.setattr(preflight.shutil, "which", lambda name: f"/usr/bin/{name}")
    assert preflight.check_gpus(says(nvidia_smi=f"{gpu}\n{gpu}\n"), 2) == ([], [gpu, gpu])
    problems, _ = preflight.check_gpus(says(nvidia_smi=f"{gpu}\n"), 8)
    assert (problems[0].found, problems[0].expected) == (f"1: {gpu}", "at least 8 CUDA devices")
    problems, _ = preflight.check_gpus(says(), 1)
    assert problems[0].found == "nvidia-smi fails: nvidia-smi: broken"
    monkeypatch.setattr(preflight.shutil, "which", lambda name: None)
    problems, _ = preflight.check_gpus(says(), 1)
    assert problems[0].found == "no nvidia-smi"
    assert "sglang_accelerator" in problems[0].change


# --- a sweep ---
def test_a_sweeps_drop_in_is_in_the_way(tmp_path: Path) -> None:
    run = says(systemctl="ActiveState=inactive\n")
    assert list(preflight.check_sweep(run, "sglang", tmp_path)) == []
    path = write(tmp_path / "run/systemd/system/sglang.service.d/90-sweep.conf", "")
    problem = next(preflight.check_sweep(run, "sglang", tmp_path))
    assert problem.found == f"sglang.service is held by a sweep that was cut off and left {path}"
    assert "restore.yml" in problem.change


# --- all of it ---
def test_nothing_asked_is_nothing_found() -> None:
    assert preflight.inspect(NOTHING, says()) == {"problems": [], "gpus": []}


def test_all_problems_are_told_at_once(tmp_path: Path) -> None:
    asked = NOTHING | {"host": "0.0.0.0", "port": 1, "model_path": "/no/such", "draft_required": True}
    asked |= {"wheelhouse": str(tmp_path / "none"), "root": str(tmp_path), "disk_mb": 1 << 40}
    problems = preflight.inspect(asked, says())["problems"]
    assert [p.check for p in problems] == ["disk", "address", "model", "draft model", "wheelhouse"]
    text = preflight.message(problems)
    assert text.startswith("5 problems:\n1. disk: found ")
    assert "4. draft model: found sglang_draft_model_path is empty" in text
    assert preflight.message(problems[:1]) == str(problems[0])


def test_every_problem_says_what_to_change(tmp_path: Path) -> None:
    asked = NOTHING | {"host": "10.0.0.1", "model_path": "", "memory_mb": 1 << 40, "python": "/no/python"}
    for problem in preflight.inspect(asked, says())["problems"]:
        assert problem.found
        assert problem.expected
        assert problem.change
