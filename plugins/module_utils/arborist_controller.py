"""The controller's side of a sweep: which process drives it, and whether that process still lives."""

from __future__ import annotations

import getpass
import os
import socket
import uuid
from pathlib import Path

_PLAYBOOK = "ansible-playbook"


def token(start: int | None = None, proc: Path = Path("/proc")) -> str:
    """A name for the ansible-playbook process above ``start``: this machine, its id and its start time.

    Where there is no ``/proc`` to look at, a name that no one can find again.
    """
    pid = _playbook(os.getpid() if start is None else start, proc)
    started = _stat(pid, proc)[1] if pid else ""
    if not pid or not started or not _machine(proc):
        return f"unknown-{uuid.uuid4().hex}"
    return f"{_machine(proc)}-{pid}-{started}"


def gone(other: str, proc: Path = Path("/proc")) -> bool:
    """Whether the process that ``other`` names ran on this machine and is no more."""
    machine, pid, started = [*other.rsplit("-", 2), "", ""][:3]
    if not machine or machine != _machine(proc) or not pid.isdigit():
        return False
    return _stat(int(pid), proc)[1] != started


def describe(start: int | None = None, proc: Path = Path("/proc")) -> str:
    """The controller for a person: ``user@machine, process 123``."""
    pid = _playbook(os.getpid() if start is None else start, proc)
    return f"{getpass.getuser()}@{socket.gethostname()}" + (f", process {pid}" if pid else "")


def _machine(proc: Path) -> str:
    """Where process ids mean the same: this boot and this PID namespace; empty where it can't be told.

    Containers share their kernel's boot, but not the processes they see.
    """
    try:
        boot = (proc / "sys/kernel/random/boot_id").read_text().strip().replace("-", "")
        space = (proc / "self/ns/pid").readlink().name
    except OSError:
        return ""
    return boot + "".join(c for c in space if c.isdigit())


def _stat(pid: int, proc: Path) -> tuple[int, str]:
    """Parent's id and start time (ticks since boot, as text); (0, "") when there is no such process."""
    try:
        fields = (proc / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0, ""
    return int(fields[1]), fields[19]


def _playbook(pid: int, proc: Path) -> int:
    """The topmost of the ansible-playbook processes directly above each other; 0 when there is none."""
    found = 0
    while pid > 1:
        try:
            words = (proc / str(pid) / "cmdline").read_bytes().split(b"\0")
        except OSError:
            break
        if any(Path(os.fsdecode(word)).name == _PLAYBOOK for word in words[:4]):
            found = pid
        elif found:
            break
        pid = _stat(pid, proc)[0]
    return found
