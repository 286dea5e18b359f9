"""What the modules read of systemd. The JSON is what busctl of systemd 252 printed for a real unit."""

from __future__ import annotations

from pathlib import Path

import pytest
from ansible.module_utils.arborist_unit import Unit, UnitError, bus_path, expand, first_difference, unit_name

from tests.plugins.support import Systemctl

BUSCTL = (
    "busctl --json=short get-property org.freedesktop.systemd1 "
    "/org/freedesktop/systemd1/unit/sglang_2dddtree_2eservice org.freedesktop.systemd1.Service ExecStart"
)
EXEC = (
    '{"type":"a(sasbttttuii)","data":[["/bin/sh",["/bin/sh","-c","sleep 10000","a b%c","x$$y","0",'
    '"{\\"a\\": 1}"],false,1796006713786401,1378828098,0,0,259,0,0]]}'
)


def running(proc: Path, pid: int, argv: list[str], environ: str = "") -> None:
    folder = proc / str(pid)
    folder.mkdir(parents=True)
    (folder / "cmdline").write_bytes(b"".join(a.encode() + b"\0" for a in argv))
    (folder / "environ").write_bytes(environ.encode())


@pytest.mark.parametrize(
    ("unit", "path"),
    [
        ("sglang-ddtree.service", "sglang_2dddtree_2eservice"),
        ("k26_a@1.service", "k26_5fa_401_2eservice"),
        ("8b.service", "_38b_2eservice"),
    ],
)
def test_object_paths_are_escaped_as_systemd_does(unit: str, path: str) -> None:
    assert bus_path(unit) == f"/org/freedesktop/systemd1/unit/{path}"


def test_unit_names() -> None:
    assert unit_name("a") == "a.service"
    assert unit_name("a.service") == "a.service"
    assert unit_name("a.timer") == "a.timer"


@pytest.mark.parametrize(
    ("argument", "parts"),
    [
        ("x$$y", ["x$y"]),
        ("$$HOME", ["$HOME"]),
        ("--port=${PORT}", ["--port=30000"]),
        ("$MORE", ["-a", "-b"]),
        ("${MORE}", ["-a  -b"]),
        ("${NONE}", [""]),
        ("$NONE", []),
        ("a$MORE", ["a$MORE"]),
        ('{"a": 1}', ['{"a": 1}']),
    ],
)
def test_arguments_reach_the_process_expanded(argument: str, parts: list[str]) -> None:
    assert expand(argument, {"PORT": "30000", "MORE": "-a  -b"}) == parts


def test_a_difference_names_its_place() -> None:
    assert first_difference(["p", "-b", "16"], ["p", "-b", "16"]) == ""
    assert first_difference(["p", "-b", "16"], ["p", "-b", "8"]) == "argument 2 is '8', expected '16'"
    assert first_difference(["p", "--b", "16"], ["p", "--b", "8"]) == "--b is '8', expected '16'"
    assert first_difference(["p", "-b", "16"], ["p"]) == "'-b 16' is missing"
    assert first_difference(["p"], ["p", "-x"]) == "'-x' is too much"


def test_the_command_is_what_systemd_loaded(systemctl: Systemctl) -> None:
    systemctl.answers[BUSCTL] = EXEC
    unit = Unit("sglang-ddtree", systemctl)
    assert unit.command() == ["/bin/sh", "-c", "sleep 10000", "a b%c", "x$$y", "0", '{"a": 1}']
    assert systemctl.calls == [BUSCTL.split(" ")]


def test_a_unit_without_a_command_is_not_deployed(systemctl: Systemctl) -> None:
    systemctl.answers[BUSCTL] = '{"type":"a(sasbttttuii)","data":[]}'
    with pytest.raises(UnitError, match=r"has 0 ExecStart commands, expected one; is it deployed\?"):
        Unit("sglang-ddtree", systemctl).command()


def test_what_systemd_refuses_is_said(systemctl: Systemctl) -> None:
    systemctl.failures[BUSCTL] = "Unknown interface\n"
    with pytest.raises(UnitError, match=r"get-property .* failed \(rc 1\): Unknown interface"):
        Unit("sglang-ddtree", systemctl).command()


@pytest.mark.parametrize(
    ("argv", "difference"),
    [
        (["-c", "sleep 10000", "a b%c", "x$y", "0", '{"a": 1}'], ""),
        (["-c", "sleep 10000", "a b%c", "x$y", "1", '{"a": 1}'], "argument 5 is '1', expected '0'"),
    ],
)
def test_the_running_command_is_compared_argument_by_argument(
    systemctl: Systemctl, tmp_path: Path, argv: list[str], difference: str
) -> None:
    systemctl.answers[BUSCTL] = EXEC
    systemctl.answers["systemctl show sglang-ddtree.service --property MainPID"] = "MainPID=77\n"
    running(tmp_path, 77, ["/bin/sh", *argv])
    assert Unit("sglang-ddtree", systemctl, proc=tmp_path).mismatch() == difference


def test_no_process_is_a_mismatch(systemctl: Systemctl) -> None:
    systemctl.answers[BUSCTL] = EXEC
    systemctl.answers["systemctl show sglang-ddtree.service --property MainPID"] = "MainPID=0\n"
    systemctl.answers["systemctl show sglang-ddtree.service --property ActiveState,SubState"] = (
        "ActiveState=failed\nSubState=failed\n"
    )
    assert Unit("sglang-ddtree", systemctl).mismatch() == "it has no main process (failed/failed)"
