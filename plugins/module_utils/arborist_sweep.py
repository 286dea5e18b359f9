"""One service under a sweep, on its host: the claim, the volatile drop-in, the lease, the way back.

Everything a sweep puts on a host lies under ``/run`` and is gone after a reboot:

``/run/systemd/system/<unit>.d/90-sweep.conf``
    the drop-in that replaces the deployed command;
``/run/systemd/system/<name>-sweep-lease.timer`` and ``.service``
    the lease: when it runs out, the host itself puts the deployed command back;
``/run/sglang-sweep/<name>.json`` and ``.sh``
    who sweeps (the claim), and what the lease runs.

A deployment or promotion keeps ``/run/sglang-sweep/<name>.deploying`` there until it has proved the service,
so that no sweep begins on a release or a unit that is being changed. One that failed, too, leaves it there.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import shlex
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ansible.module_utils.arborist_unit import Run, Unit, UnitError, expand, first_difference, unit_name

_ALIVE = ("active", "activating", "reloading")

_TIMER = """\
[Unit]
Description=Give {unit} its deployed command back if the sweep's controller is gone

[Timer]
# Two clocks: the first may be stretched by a daemon-reload, the second misled by a clock that is set.
OnActiveSec={seconds}s
OnCalendar={deadline}
AccuracySec=1s
"""

_SERVICE = """\
[Unit]
Description=Give {unit} its deployed command back: the sweep's lease ran out
StartLimitIntervalSec=0

[Service]
Type=oneshot
ExecStart=/bin/sh {script}
# Until systemd has taken the drop-in's end in (it refuses to reload when /run is full, say).
Restart=on-failure
RestartSec=10
"""

_SCRIPT = """\
#!/bin/sh
# The lease of a sweep ran out: give {unit} its deployed command back.
rm -f {claim}
if {dirty} || [ -e {dropin} ]; then
    rm -f {dropin}
    rmdir {folder} 2>/dev/null
    systemctl daemon-reload || exit 1
    systemctl reset-failed {unit}
    systemctl {verb} {unit}
fi
systemctl stop --no-block {lease}.timer
rm -f {timer} {service} {script}
systemctl daemon-reload
"""


@dataclass(frozen=True)
class Claim:
    """Who sweeps this service. ``token`` names the controller's process.

    ``dirty`` once the service's process may run something else than the deployed command.
    """

    token: str
    study: str
    controller: str
    started_at: str
    was_active: bool
    dirty: bool
    expires_at: float


class Taken(RuntimeError):
    """The service is another sweep's. ``claim`` says whose, None when nobody holds it any more."""

    def __init__(self, message: str, claim: Claim | None) -> None:
        super().__init__(message)
        self.claim = claim


class Deploying(RuntimeError):
    """The service is being deployed, or its last deployment did not come to its end."""


class SweptService:
    """The service ``name`` on this host, as a sweep handles it. ``root`` stands for ``/`` in tests."""

    def __init__(self, name: str, run: Run, root: Path = Path("/")) -> None:
        self.unit = Unit(name, run)
        stem = unit_name(name).removesuffix(".service")
        units = root / "run/systemd/system"
        state = root / "run/sglang-sweep"
        self.lease = f"{stem}-sweep-lease"
        self.dropin = units / f"{self.unit.name}.d" / "90-sweep.conf"
        self.timer = units / f"{self.lease}.timer"
        self.service = units / f"{self.lease}.service"
        self.script = state / f"{stem}.sh"
        self.record = state / f"{stem}.json"
        self.deploying = state / f"{stem}.deploying"
        self._lock = state / f"{stem}.lock"

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other modules on this host out while one looks and changes."""
        self._lock.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        with self._lock.open("a") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield

    # --- what is there ---
    def claim(self) -> Claim | None:
        """The claim on record, if there is a readable one."""
        try:
            return Claim(**json.loads(self.record.read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def lease_runs(self) -> bool:
        """Whether the lease's timer waits."""
        state: str = Unit(f"{self.lease}.timer", self.unit.run).show("ActiveState")["ActiveState"]
        return state == "active"

    def holder(self) -> Claim | None:
        """Who holds the service now: a claim counts while its lease runs."""
        claim = self.claim()
        return claim if claim is not None and self.lease_runs() else None

    def active(self) -> bool:
        """Whether the unit runs or is on its way."""
        return self.unit.show("ActiveState").get("ActiveState") in _ALIVE

    def dropin_loaded(self) -> bool:
        """Whether systemd goes by the drop-in, be it there any more or not."""
        return str(self.dropin) in self.unit.show("DropInPaths").get("DropInPaths", "").split()

    def leftovers(self) -> list[str]:
        """What a sweep left on this host, as paths."""
        return [
            str(p) for p in (self.dropin, self.timer, self.service, self.script, self.record) if p.exists()
        ]

    def swept_by(self) -> str:
        """Which sweep has the service, alive or cut off, in words; empty when none has."""
        holder, left = self.holder(), self.leftovers()
        if holder is not None:
            return describe(holder)
        return f"a sweep that was cut off and left {', '.join(left)}" if left else ""

    def deployment(self) -> str:
        """When the deployment began that has not come to its end, as it names itself; empty without one."""
        try:
            return self.deploying.read_text().strip()
        except FileNotFoundError:
            return ""

    def unfinished(self) -> str:
        """Which deployment has not come to its end, in words; empty without one."""
        began = self.deployment()
        return f"a deployment that began at {began} has not ended, or failed" if began else ""

    def refuse_swept(self) -> None:
        """Raise Taken when a sweep has the service, alive or cut off."""
        swept_by = self.swept_by()
        if swept_by:
            raise Taken(
                f"{self.unit.name} is held by {swept_by}: let it finish, or run restore.yml first",
                self.claim(),
            )

    def refuse_unfinished(self) -> None:
        """Raise Deploying when a deployment has not ended."""
        unfinished = self.unfinished()
        if unfinished:
            raise Deploying(f"{self.unit.name}: {unfinished}: if it no longer runs, run deploy.yml again")

    # --- changes ---
    def begin_deployment(self) -> str:
        """Keep sweeps away until end_deployment; returns its argument. Raises Taken when a sweep is there.

        Another deployment is no obstacle: nobody could tell whether the one before still runs or was cut
        off, and the last one decides.
        """
        self.refuse_swept()
        while (began := utc(time.time())) == self.deployment():
            time.sleep(0.001)  # it names the deployment
        _write(self.deploying, began + "\n", 0o644)
        return began

    def refuse_overtaken(self, began: str) -> None:
        """Raise Deploying when another deployment has begun since, Taken when a sweep has.

        One that was held up would else write its unit over the other's, or under a sweep.
        """
        self.refuse_swept()
        if self.deployment() != began:
            raise Deploying(
                f"{self.unit.name}: another deployment has overtaken this one, which began at {began} and "
                "stops here; see what is deployed, and run it again if it still should be"
            )

    def end_deployment(self, began: str) -> None:
        """Let sweeps begin again: the service is as deployed. Nothing where another has begun since."""
        if self.deployment() == began:
            self.deploying.unlink(missing_ok=True)

    def take(
        self, token: str, study: str, controller: str, lease_s: int, from_token: str = ""
    ) -> tuple[Claim, list[str]]:
        """Claim the service and arm the lease; returns the claim and what an earlier sweep had left.

        A claim whose lease runs is respected, unless its token is ``token`` or ``from_token`` (a
        controller known to be gone). Raises Taken, and Deploying while the unit is being written. After
        it, the unit's loaded command is the deployed one.
        """
        self.refuse_unfinished()
        holder = self.holder()
        if holder is not None and holder.token not in (token, from_token):
            raise Taken(f"{self.unit.name} is being swept by {describe(holder)}", holder)
        before = self.claim()
        left = self.leftovers()
        swept = self.dropin.exists() or (before is not None and before.dirty)
        self._remove_dropin()
        if swept:
            self.unit.call("systemctl", "daemon-reload")
        was_active = before.was_active if before is not None else (swept or self.active())
        claim = Claim(
            token=token,
            study=study,
            controller=controller,
            started_at=utc(time.time()),
            was_active=was_active,
            dirty=swept,
            expires_at=0.0,
        )
        return self._arm(claim, lease_s), left

    def apply(self, token: str, content: str, command: list[str], lease_s: int) -> dict[str, Any]:
        """Put the drop-in in place, renew the lease, restart; returns facts about the new invocation.

        ``command`` is what the drop-in must come to once systemd has read it. Raises Taken when the
        claim is no longer this sweep's, UnitError when systemd refused or read another command.
        A unit that cannot start is no error here: the readiness wait says why.
        """
        claim = self.mine(token)
        before = self.unit.show("InvocationID").get("InvocationID", "")
        _write(self.dropin, content, 0o644)
        claim = self._arm(replace(claim, dirty=True), lease_s)
        loaded = [part for argument in self.unit.command() for part in expand(argument, {})]
        difference = first_difference(command, loaded)
        if difference:
            raise UnitError(
                f"systemd reads another command than {self.dropin} says: {difference}; "
                f"see `systemctl cat {self.unit.name}` for a drop-in that comes after it"
            )
        started = time.time()
        refused = self.unit.start_anew("restart")
        after = self.unit.show("InvocationID", "ActiveState", "SubState", "Result")
        if after.get("InvocationID", "") == before and after.get("ActiveState") in _ALIVE:
            raise UnitError(f"{self.unit.name} still runs as before: {refused or 'the restart did nothing'}")
        return {
            "invocation_id": after.get("InvocationID", ""),
            "started_at": utc(started),
            "restart_s": round(time.time() - started, 3),
            "lease_until": claim.expires_at,
        }

    def renew(self, token: str, lease_s: int) -> Claim:
        """Start the lease's clock anew. Raises Taken when the claim is no longer this sweep's."""
        return self._arm(self.mine(token), lease_s)

    def mine(self, token: str) -> Claim:
        """This sweep's claim. Raises Taken when it is gone or another's."""
        claim = self.claim()
        if claim is None:
            raise Taken(
                f"this sweep no longer holds {self.unit.name}: restore.yml ended it, the host was restarted, "
                "or its lease ran out (then raise sweep_lease_seconds)",
                None,
            )
        if claim.token != token:
            raise Taken(f"another sweep has taken {self.unit.name} over: {describe(claim)}", claim)
        return claim

    def wrong(self) -> list[str]:
        """What keeps this host from being as deployed, in words; empty when nothing does."""
        found = []
        if self.dropin.exists():
            found.append(f"a sweep's drop-in, {self.dropin}")
        elif self.dropin_loaded():
            found.append(f"a sweep's drop-in that systemd still goes by, {self.dropin}")
        if self.lease_runs() or set(self.leftovers()) - {str(self.dropin)}:
            found.append(f"a sweep's lease, {self.lease}.timer")
        claim = self.claim()
        if claim is None and not found and self.deployment():
            return []  # it puts its own process right, and may just be between writing and restarting
        if claim is None or claim.was_active:
            difference = self.unit.mismatch()
            if difference:
                found.append(f"another command than deployed: {difference}")
        elif self.active():
            found.append("a running service that did not run before the sweep")
        return found

    def restore(self) -> None:
        """The deployed command back, the lease and the claim gone. The caller checks whose claim it is."""
        claim = self.claim()
        self._remove_dropin()
        self.unit.call("systemctl", "daemon-reload")
        if claim is not None and not claim.was_active:
            refused = self.unit.start_anew("stop")
        else:
            refused = self.unit.start_anew("restart") if self.unit.mismatch() else ""
        if refused and self.unit.process() is not None:
            raise UnitError(refused)  # the lease stays armed: the host tries once more by itself
        # Nothing of the sweep runs any more. A deployed service that can't start is not the sweep's to hold.
        self._disarm()
        if refused:
            raise UnitError(
                "the sweep's drop-in and lease are gone, but the deployed service does not start: "
                f"{refused}; see `journalctl -u {self.unit.name} -n 50`, then run deploy.yml"
            )

    # --- parts ---
    def _arm(self, claim: Claim, lease_s: int) -> Claim:
        """Write claim and lease, load them, start the lease's clock anew."""
        claim = replace(claim, expires_at=round(time.time() + lease_s, 3))
        deadline = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(claim.expires_at + 1))
        quoted = {
            "unit": shlex.quote(self.unit.name),
            "claim": shlex.quote(str(self.record)),
            "dropin": shlex.quote(str(self.dropin)),
            "folder": shlex.quote(str(self.dropin.parent)),
            "timer": shlex.quote(str(self.timer)),
            "service": shlex.quote(str(self.service)),
            "script": shlex.quote(str(self.script)),
            "lease": shlex.quote(self.lease),
            "dirty": "true" if claim.dirty else "false",
            "verb": "restart" if claim.was_active else "stop",
        }
        _write(self.script, _SCRIPT.format(**quoted), 0o700)
        _write(self.service, _SERVICE.format(unit=self.unit.name, script=self.script), 0o644)
        _write(self.timer, _TIMER.format(unit=self.unit.name, seconds=lease_s, deadline=deadline), 0o644)
        _write(self.record, json.dumps(asdict(claim), indent=2) + "\n", 0o644)
        self.unit.call("systemctl", "daemon-reload")
        self.unit.call("systemctl", "restart", f"{self.lease}.timer")
        return claim

    def _disarm(self) -> None:
        if self.lease_runs():
            try:
                self.unit.call("systemctl", "stop", f"{self.lease}.timer")
            except UnitError:
                if self.lease_runs():  # else it ran out just now, and took its timer away itself
                    raise
        for path in (self.timer, self.service, self.script, self.record):
            path.unlink(missing_ok=True)
        self.unit.call("systemctl", "daemon-reload")

    def _remove_dropin(self) -> None:
        self.dropin.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # not there, or somebody else's drop-ins are in it
            self.dropin.parent.rmdir()


def describe(claim: Claim) -> str:
    """Who holds a service, for a person."""
    left = max(0, round(claim.expires_at - time.time()))
    return (
        f"study {claim.study} (controller {claim.controller}, since {claim.started_at}); "
        f"its lease runs out in {left} s"
    )


def utc(seconds: float) -> str:
    """ISO 8601 in UTC, to the millisecond."""
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"{whole}.{int(seconds % 1 * 1000):03d}Z"


def _write(path: Path, content: str, mode: int) -> None:
    """Replace ``path`` in one step, folders included."""
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.new")
    fresh.write_text(content)
    fresh.chmod(mode)
    fresh.replace(path)
