"""The modules that look at a service and restart it."""

from __future__ import annotations

import json

import pytest
from ansible.module_utils.testing import patch_module_args

from tests.roles.rolekit import module

state = module("sglang_state")
restart = module("sglang_restart")


@pytest.mark.parametrize("name", ["sglang", "sglang.service"])
def test_a_restart_tells_what_systemd_refused(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[list[str]] = []

    def run(self: object, argv: list[str]) -> tuple[int, str, str]:
        asked.append(argv)
        return (1, "", "no restart today") if argv[1] == "restart" else (0, "", "")

    monkeypatch.setattr(restart.AnsibleModule, "run_command", run)
    with patch_module_args({"unit": name}), pytest.raises(SystemExit):
        restart.main()
    result = json.loads(capsys.readouterr().out)
    assert result["changed"] is True
    assert "no restart today" in result["refused"]
    assert ["systemctl", "reset-failed", "sglang.service"] in asked
    assert asked[-1][:2] == ["systemctl", "restart"]


def test_a_dry_run_restarts_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(restart.AnsibleModule, "run_command", None)
    with patch_module_args({"unit": "sglang", "_ansible_check_mode": True}), pytest.raises(SystemExit):
        restart.main()
    assert json.loads(capsys.readouterr().out)["changed"] is True


class Service:
    """A unit with a process that runs ``command``, or with none."""

    def __init__(self, command: list[str] | None, reload: str = "no") -> None:
        self._process = None if command is None else (7, command)
        self._shown = {"ActiveState": "failed" if command is None else "active", "NeedDaemonReload": reload}

    def show(self, *names: str) -> dict[str, str]:
        return {name: self._shown[name] for name in names}

    def process(self) -> tuple[int, list[str]] | None:
        return self._process


@pytest.mark.parametrize(
    ("running", "difference"),
    [
        (["/p", "--budget", "16"], ""),
        (["/p", "--budget", "8"], "--budget is '8', expected '16'"),
        (["/p", "--budget"], "'16' is missing"),
        (["/p", "--budget", "16", "-v"], "'-v' is too much"),
        (None, "no main process (failed)"),
    ],
)
def test_a_process_is_compared_with_what_it_should_run(running: list[str] | None, difference: str) -> None:
    found = state.look(Service(running), ["/p", "--budget", "16"])
    assert found["difference"] == difference


def test_an_edited_unit_file_is_noticed() -> None:
    assert state.look(Service(["/p"], reload="yes"), ["/p"])["need_reload"] is True
    assert state.look(Service(["/p"]), ["/p"])["need_reload"] is False
