"""What systemd says about a unit, and which processes are its own."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

#: States of a unit that isn't going to answer any more without a new start.
_DEAD = ("failed", "inactive", "deactivating")

_PROPERTIES = (
    "LoadState",
    "ActiveState",
    "SubState",
    "Result",
    "MainPID",
    "InvocationID",
    "NRestarts",
    "ExecMainCode",
    "ExecMainStatus",
    "ControlGroup",
    "InactiveExitTimestampMonotonic",
    "ExecMainStartTimestampMonotonic",
)


class UnitError(RuntimeError):
    """systemd can't be asked, or doesn't know the unit."""


@dataclass(frozen=True)
class UnitState:
    """A unit at one moment.

    ``exec_main_code``/``exec_main_status`` tell how the main process ended: code 1 exited with that
    status, 2 killed and 3 dumped core by that signal, 0 not ended. Start times are seconds of the
    monotonic clock, 0 when it never started.
    """

    active_state: str
    sub_state: str
    result: str
    main_pid: int
    invocation_id: str
    n_restarts: int
    exec_main_code: int
    exec_main_status: int
    control_group: str
    left_inactive_s: float
    main_started_s: float

    def dead(self) -> bool:
        """Whether this start of the unit is over (a pending automatic restart counts as over)."""
        return self.active_state in _DEAD or self.sub_state.startswith("auto-restart")

    def same_start(self, earlier: UnitState) -> bool:
        """Whether this is the start that ``earlier`` saw, with the same main process."""
        return (
            self.invocation_id == earlier.invocation_id
            and self.n_restarts == earlier.n_restarts
            and (self.main_pid == earlier.main_pid or earlier.main_pid == 0)
        )

    def started_again(self, earlier: UnitState) -> bool:
        """Whether systemd has started the unit anew since ``earlier``."""
        return self.invocation_id != earlier.invocation_id or self.n_restarts > earlier.n_restarts

    def ended(self) -> str:
        """How it ended, in words."""
        how = {1: "exited with status", 2: "was killed by signal", 3: "dumped core on signal"}
        if self.exec_main_code in how:
            return (
                f"the main process {how[self.exec_main_code]} {self.exec_main_status} (Result={self.result})"
            )
        return f"the unit is {self.active_state}/{self.sub_state} (Result={self.result})"


def unit_state(unit: str) -> UnitState:
    """Ask systemd for the unit's state. Raises UnitError when there is no such unit or no systemd."""
    argv = ["systemctl", "show", "--property", ",".join(_PROPERTIES), "--", unit]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)
    except FileNotFoundError as error:
        raise UnitError("systemctl isn't on this machine; run where the unit runs") from error
    except subprocess.TimeoutExpired as error:
        raise UnitError(f"systemctl show {unit} gave no answer in 30 s; is systemd overloaded?") from error
    if done.returncode:
        raise UnitError(f"systemctl show {unit} failed: {done.stderr.strip()[:300] or done.returncode}")
    return parse_show(done.stdout, unit)


def parse_show(text: str, unit: str) -> UnitState:
    """Parse the output of ``systemctl show``. Raises UnitError for a unit that isn't loaded."""
    values = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
    load = values.get("LoadState", "")
    if load != "loaded":
        raise UnitError(
            f"unit {unit} is {load or 'unknown'} to systemd; expected a loaded unit, "
            "check its name (sglang_service_name)"
        )

    def number(key: str) -> int:
        value = values.get(key, "")
        return int(value) if value.isdigit() else 0

    return UnitState(
        active_state=values.get("ActiveState", ""),
        sub_state=values.get("SubState", ""),
        result=values.get("Result", ""),
        main_pid=number("MainPID"),
        invocation_id=values.get("InvocationID", ""),
        n_restarts=number("NRestarts"),
        exec_main_code=number("ExecMainCode"),
        exec_main_status=number("ExecMainStatus"),
        control_group=values.get("ControlGroup", ""),
        left_inactive_s=number("InactiveExitTimestampMonotonic") / 1e6,
        main_started_s=number("ExecMainStartTimestampMonotonic") / 1e6,
    )


def in_control_group(pid: int, control_group: str, proc: Path = Path("/proc")) -> bool:
    """Whether the process is in the control group or below it.

    Looks at ``/proc/PID/cgroup``, on the legacy, hybrid and unified hierarchy alike; in a container
    whose paths carry a prefix, the group's path may follow it.
    """
    if not control_group or control_group == "/":
        return False
    try:
        lines = (proc / str(pid) / "cgroup").read_text().splitlines()
    except OSError:
        return False
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "name=systemd") and f"{control_group}/" in f"{path}/":
            return True
    return False


def listeners(port: int, proc: Path = Path("/proc")) -> dict[int, str]:
    """Processes that listen on the TCP port, as ``{pid: command name}``, over IPv4 and IPv6.

    A listener whose process can't be seen (it takes root to look into another user's) is pid 0.
    """
    inodes: set[str] = set()
    for table in ("net/tcp", "net/tcp6"):
        try:
            rows = (proc / table).read_text().splitlines()[1:]
        except OSError:
            continue
        for row in rows:
            fields = row.split()
            # local address as hex ip:port; state 0A is LISTEN; field 9 is the socket's inode
            if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.add(f"socket:[{fields[9]}]")
    if not inodes:
        return {}
    return _holders(inodes, proc) or {0: "not visible to this user"}


def _holders(sockets: set[str], proc: Path) -> dict[int, str]:
    found: dict[int, str] = {}
    for folder in proc.iterdir():
        if not folder.name.isdigit():
            continue
        try:
            if any(str(link.readlink()) in sockets for link in (folder / "fd").iterdir()):
                found[int(folder.name)] = (folder / "comm").read_text().strip()
        except OSError:  # it ended meanwhile, or isn't ours to look at
            continue
    return found
