"""One control group per host: it holds all of the host's processes, so it is also how they are found.

No pid file can be stale: what runs is what the kernel lists in the group.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from .system import Problem

MOUNT = Path("/sys/fs/cgroup")
KEEPER = "keeper"
CONTROLLERS = ("cpu", "io", "memory", "pids")


def hierarchies() -> list[Path]:
    """Return the hierarchies systemd uses to track processes, version 2 first.

    That is the one hierarchy of a cgroup v2 machine; on a hybrid one version 2 without controllers
    (`unified`) and version 1's `systemd`.
    """
    if (MOUNT / "cgroup.controllers").exists():
        return [MOUNT]
    found = [MOUNT / name for name in ("unified", "systemd") if (MOUNT / name / "cgroup.procs").exists()]
    if not found or found[0].name != "unified":
        raise Problem(f"no cgroup v2 hierarchy at {MOUNT} or {MOUNT}/unified: mount one (type cgroup2) there")
    return found


def names(prefix: str) -> set[str]:
    """Return what follows the prefix in the names of groups that begin with it."""
    return {path.name.removeprefix(prefix) for top in hierarchies() for path in top.glob(f"{prefix}*")}


def command_name(pid: int) -> str:
    """Return a process's short name; empty when it is gone."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def number_inside(pid: int) -> int:
    """Return a process's number in its own, innermost pid namespace; 0 when it is gone."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("NSpid:"):
                return int(line.split()[-1])
    return 0


class Group:
    """The control group of one host, in every hierarchy that matters."""

    def __init__(self, name: str) -> None:
        self.directories = [top / name for top in hierarchies()]

    def create(self) -> None:
        """Make the group, and below it the one the supervisor goes into."""
        for directory in self.directories:
            (directory / KEEPER).mkdir(parents=True, exist_ok=True)
        # Where version 2 has controllers to give, the host's own limits work.
        for directory in (self.directories[0].parent, self.directories[0]):
            for controller in CONTROLLERS:
                with suppress(OSError):  # not to be had here: such limits are accepted but not enforced
                    (directory / "cgroup.subtree_control").write_text(f"+{controller}")

    def pids(self, below: str = "") -> Iterator[int]:
        """Yield the processes of the group, or of one group below it."""
        for directory in self.directories:
            for top, _, _ in os.walk(directory / below):
                with suppress(OSError):
                    yield from map(int, (Path(top) / "cgroup.procs").read_text().split())

    def supervisor(self) -> int | None:
        """Return the process that boots the host again when it asks for a reboot."""
        return next(self.pids(KEEPER), None)

    def leader(self) -> int | None:
        """Return the process, as numbered here, that is PID 1 inside the host."""
        for pid in self.pids():
            if number_inside(pid) == 1 and command_name(pid) == "systemd":
                return pid
        return None

    def empty(self) -> bool:
        """Say whether no process is left."""
        return next(self.pids(), None) is None

    def remove(self, timeout: float = 20.0) -> None:
        """Kill every process and remove the group; nothing to do when there is none."""
        deadline = time.monotonic() + timeout
        while any(directory.exists() for directory in self.directories):
            for pid in self.pids():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for directory in self.directories:
                for top, _, _ in os.walk(directory, topdown=False):
                    with suppress(OSError):  # busy for a moment after the kill
                        Path(top).rmdir()
            if time.monotonic() > deadline:
                left = sorted(set(self.pids()))
                raise Problem(f"{self.directories[0]} is still busy with processes {left}")
            time.sleep(0.01)
