"""What systemd says, and whose process holds a port."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from tests.tuning.standin import INVOCATION, Host
from tuning.units import UnitError, in_control_group, listeners, parse_show, unit_state

SHOW = """\
Result=signal
NRestarts=2
MainPID=0
ControlGroup=/system.slice/sglang-ddtree.service
LoadState=loaded
ActiveState=activating
SubState=auto-restart
ExecMainCode=2
ExecMainStatus=9
InvocationID=0123456789abcdef0123456789abcdef
InactiveExitTimestampMonotonic=1500000
ExecMainStartTimestampMonotonic=1750000
"""


def test_show() -> None:
    state = parse_show(SHOW, "x.service")
    assert state.active_state == "activating"
    assert state.n_restarts == 2
    assert state.invocation_id == INVOCATION
    assert (state.left_inactive_s, state.main_started_s) == (1.5, 1.75)
    assert state.ended() == "the main process was killed by signal 9 (Result=signal)"


@pytest.mark.parametrize(
    ("active", "sub", "dead"),
    [
        ("active", "running", False),
        ("activating", "start", False),
        ("activating", "start-pre", False),
        ("activating", "auto-restart", True),
        ("activating", "auto-restart-queued", True),
        ("deactivating", "stop-sigterm", True),
        ("inactive", "dead", True),
        ("failed", "failed", True),
    ],
)
def test_dead(active: str, sub: str, dead: bool) -> None:
    assert replace(parse_show(SHOW, "x"), active_state=active, sub_state=sub).dead() is dead


def test_same_start() -> None:
    first = replace(parse_show(SHOW, "x"), main_pid=5)
    assert first.same_start(first)
    assert not replace(first, invocation_id="f" * 32).same_start(first)
    assert not replace(first, n_restarts=3).same_start(first)
    assert not replace(first, main_pid=6).same_start(first)
    assert replace(first, main_pid=6).same_start(replace(first, main_pid=0))  # forked meanwhile


@pytest.mark.parametrize("load", ["not-found", "masked", "error", ""])
def test_unit_that_is_not_loaded(host: Host, load: str) -> None:
    host.unit(LoadState=load)
    with pytest.raises(UnitError, match=r"check its name \(sglang_service_name\)"):
        unit_state("x.service")


def test_unit_state_asks_systemctl(host: Host) -> None:
    host.unit(MainPID=17)
    assert unit_state("x.service").main_pid == 17


def test_no_systemctl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(UnitError, match="systemctl isn't on this machine"):
        unit_state("x.service")


def test_systemctl_that_fails(host: Host) -> None:
    (host.folder / "bin" / "systemctl").write_text("#!/bin/sh\necho 'Failed to connect to bus' >&2\nexit 1\n")
    with pytest.raises(UnitError, match="Failed to connect to bus"):
        unit_state("x.service")


GROUP = "/system.slice/x.service"


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        ("0::/system.slice/x.service\n", True),  # unified
        ("0::/system.slice/x.service/sub\n", True),  # delegated below
        ("9:name=systemd:/system.slice/x.service\n8:pids:/\n0::/\n", True),  # hybrid or legacy
        ("0::/machine.slice/host1/system.slice/x.service\n", True),  # seen from outside a container
        ("0::/system.slice/x.service2\n", False),
        ("0::/system.slice/y.service\n", False),
        ("8:memory:/system.slice/x.service\n0::/\n", False),  # a controller alone says nothing
        ("0::/\n", False),
        ("", False),
    ],
)
def test_control_group(tmp_path: Path, text: str, inside: bool) -> None:
    (tmp_path / "12").mkdir()
    (tmp_path / "12" / "cgroup").write_text(text)
    assert in_control_group(12, GROUP, proc=tmp_path) is inside


@pytest.mark.parametrize("group", ["", "/"])
def test_the_root_group_proves_nothing(tmp_path: Path, group: str) -> None:
    (tmp_path / "12").mkdir()
    (tmp_path / "12" / "cgroup").write_text("0::/\n")
    assert not in_control_group(12, group, proc=tmp_path)


def test_a_process_that_is_gone_is_in_no_group(tmp_path: Path) -> None:
    assert not in_control_group(12, GROUP, proc=tmp_path)


@pytest.mark.parametrize(("family", "address"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_listeners(family: socket.AddressFamily, address: str) -> None:
    with socket.socket(family) as one:
        one.bind((address, 0))
        port = one.getsockname()[1]
        assert listeners(port) == {}  # bound is not listening
        one.listen()
        assert list(listeners(port)) == [os.getpid()]


def test_a_connection_is_no_listener() -> None:
    with socket.socket() as one, socket.socket() as client:
        one.bind(("127.0.0.1", 0))
        one.listen()
        address = one.getsockname()
        client.connect(address)
        accepted, _ = one.accept()
        one.close()
        with accepted:  # has the port as its own, and doesn't listen
            assert listeners(address[1]) == {}


def test_listener_of_an_unseen_process(tmp_path: Path) -> None:
    (tmp_path / "net").mkdir()
    row = "   0: 0100007F:7530 00000000:0000 0A 00000000:00000000 00:00000000 00000000  0  0 4711 1 0"
    (tmp_path / "net" / "tcp").write_text(f"  sl  local_address\n{row}\n")
    assert listeners(30000, proc=tmp_path) == {0: "not visible to this user"}
    assert listeners(30001, proc=tmp_path) == {}
