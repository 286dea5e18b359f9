"""What the modules need of systemd: one unit's state, its command, and the command its process runs.

Everything goes through a ``run`` callable with the signature of ``AnsibleModule.run_command``, so that unit
tests can look at the exact arguments.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

Run = Callable[[list[str]], tuple[int, str, str]]

_BUS = "org.freedesktop.systemd1"
_REFERENCE = re.compile(r"\$\$|\$\{(?P<braced>[A-Za-z_]\w*)\}|\$(?P<plain>[A-Za-z_]\w*)")


class UnitError(RuntimeError):
    """systemd refused something; the message says what was asked and what it answered."""


def unit_name(name: str) -> str:
    """``name`` with the suffix ``.service``, where it does not end in a unit's suffix already."""
    return name if name.endswith((".service", ".timer")) else f"{name}.service"


def bus_path(unit: str) -> str:
    """The unit's D-Bus object path: all but letters and digits escaped as ``_xx`` (a leading digit too)."""
    escaped = "".join(
        c if c.isascii() and c.isalnum() and not (i == 0 and c.isdigit()) else f"_{ord(c):02x}"
        for i, c in enumerate(unit)
    )
    return f"/org/freedesktop/systemd1/unit/{escaped}"


def expand(argument: str, environment: Mapping[str, str]) -> list[str]:
    """One ExecStart argument as systemd hands it over: ``$$`` is ``$``, variables are the process's own.

    ``$NAME`` that stands alone becomes as many arguments as it has words; an unset variable is empty
    (systemd.service(5), "Command lines").
    """
    alone = re.fullmatch(r"\$([A-Za-z_]\w*)", argument)
    if alone:
        return environment.get(alone[1], "").split()

    def value(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        return environment.get(match["braced"], "") if match["braced"] else match[0]

    return [_REFERENCE.sub(value, argument)]


def first_difference(expected: Sequence[str], found: Sequence[str]) -> str:
    """Where two commands part, in words; empty when they are the same."""
    for position, (want, have) in enumerate(zip(expected, found, strict=False)):
        if want != have:
            before = expected[position - 1] if position else ""
            of_flag = before.startswith("--") and not want.startswith("--")
            where = before if of_flag else f"argument {position}"
            return f"{where} is {have!r}, expected {want!r}"
    if len(expected) > len(found):
        return f"{' '.join(expected[len(found) :])!r} is missing"
    if len(found) > len(expected):
        return f"{' '.join(found[len(expected) :])!r} is too much"
    return ""


class Unit:
    """One systemd unit, a service where the name does not say otherwise."""

    def __init__(self, name: str, run: Run, proc: Path = Path("/proc")) -> None:
        self.name = unit_name(name)
        self.run = run
        self._proc = proc

    def call(self, *argv: str) -> str:
        """Run a command and return its output. Raises UnitError when it fails."""
        rc, out, err = self.run(list(argv))
        if rc != 0:
            said = (err.strip() or out.strip() or "nothing").splitlines()[-1]
            raise UnitError(f"`{' '.join(argv)}` failed (rc {rc}): {said}")
        return out

    def show(self, *properties: str) -> dict[str, str]:
        """The unit's properties by name."""
        out = self.call("systemctl", "show", self.name, "--property", ",".join(properties))
        return dict(line.split("=", 1) for line in out.splitlines() if "=" in line)

    def command(self) -> list[str]:
        """What systemd would start: the one ExecStart, drop-ins included, as it was last loaded.

        Specifiers are resolved, variables are not (see ``expand``). Raises UnitError for a unit that is
        not there or has another number of commands than one.
        """
        out = self.call(
            *(
                "busctl",
                "--json=short",
                "get-property",
                _BUS,
                bus_path(self.name),
                f"{_BUS}.Service",
                "ExecStart",
            )
        )
        commands = json.loads(out)["data"]
        if len(commands) != 1:
            raise UnitError(
                f"{self.name} has {len(commands)} ExecStart commands, expected one; is it deployed?"
            )
        return [str(argument) for argument in commands[0][1]]

    def start_anew(self, verb: str = "restart") -> str:
        """Restart (or stop) the unit; returns what systemd said when it refused, else nothing.

        Forgets earlier failures first: systemd refuses a unit that failed too often a short while ago, also
        when its command has been put right since.
        """
        with contextlib.suppress(UnitError):  # a unit that is not loaded has no failures to forget
            self.call("systemctl", "reset-failed", self.name)
        try:
            self.call("systemctl", verb, self.name)
        except UnitError as error:
            return str(error)
        return ""

    def process(self) -> tuple[int, list[str]] | None:
        """The main process's id and arguments; None when there is none."""
        pid = int(self.show("MainPID").get("MainPID", "0"))
        if pid == 0:
            return None
        try:
            raw = (self._proc / str(pid) / "cmdline").read_bytes()
        except OSError:
            return None  # it ended just now
        return pid, [part.decode(errors="surrogateescape") for part in raw.split(b"\0")[:-1]]

    def environment(self, pid: int) -> dict[str, str]:
        """The environment that process was started with."""
        raw = (self._proc / str(pid) / "environ").read_bytes()
        pairs = (part.decode(errors="surrogateescape").partition("=") for part in raw.split(b"\0") if part)
        return {name: value for name, _, value in pairs}

    def mismatch(self) -> str:
        """How the running process's command differs from the unit's; empty when it does not."""
        wanted = self.command()
        running = self.process()
        if running is None:
            state = self.show("ActiveState", "SubState")
            return f"it has no main process ({state.get('ActiveState')}/{state.get('SubState')})"
        pid, found = running
        environment = self.environment(pid) if any("$" in argument for argument in wanted) else {}
        expected = [part for argument in wanted for part in expand(argument, environment)]
        return first_difference(expected, found)
