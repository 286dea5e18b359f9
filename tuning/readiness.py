"""Is the service ready? Proved by a real generation, answered by the unit's own process.

``/v1/models`` and ``/health`` alone prove nothing: the first answers before warm-up, the second has been
seen at 200 while requests hang. Meanwhile systemd is asked every poll whether this start of the
unit is still alive, so that a service that dies is known at once and not after the time-out.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

import requests

from tuning import failures, journal
from tuning.models import Failure, Phases
from tuning.units import UnitError, UnitState, in_control_group, listeners, unit_state

__all__ = ["ReadyReport", "UnitError", "UnitState", "unit_state", "wait_ready"]

#: Seconds between two looks for a service that lives but will never serve.
_STUCK_LOOK_S = 2.0
#: Longest that one HTTP request of the wait may take; the first generation can compile kernels.
_HEALTH_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class ReadyReport:
    """The end of a wait: which start of the unit, how far it came and when, and why not further."""

    ok: bool
    invocation_id: str
    main_pid: int
    phases: Phases
    failure: Failure | None


def wait_ready(
    unit: str, base_url: str, timeout_s: float, poll_s: float = 0.25, api_key: str | None = None
) -> ReadyReport:
    """Wait until the unit's service answers a real generation, or is known not to.

    The unit must have been started. Returns within about ``poll_s`` of the death of its main process, of an
    automatic restart or of the time-out, with a classified failure and the journal's tail. Never
    raises for what the service does; a machine without systemd gives a failure too.
    """
    try:
        return _Wait(unit, base_url.rstrip("/"), timeout_s, poll_s, api_key).run()
    except (UnitError, journal.JournalError) as error:
        failure = Failure(kind="crashed", summary=str(error), hint="check sglang_service_name and the host")
        return ReadyReport(False, "", 0, Phases(), failure)


class _Probe(threading.Thread):
    """Asks ``/health`` until it is 200, then for one token; in a thread, as a request may hang."""

    def __init__(self, base_url: str, deadline: float, poll_s: float, api_key: str | None) -> None:
        super().__init__(name="readiness-probe", daemon=True)
        self._base_url = base_url
        self._deadline = deadline
        self._poll_s = poll_s
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._stop_asked = threading.Event()
        self.healthy_at: float | None = None
        self.answered_at: float | None = None
        self.last = "no HTTP answer yet"

    def stop(self) -> None:
        """Make no further request."""
        self._stop_asked.set()

    def run(self) -> None:
        while self.answered_at is None and not self._stop_asked.is_set():
            if self._asked("/health", None):
                self.healthy_at = self.healthy_at or time.monotonic()
                body = {"text": "1", "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
                if self._asked("/generate", body):
                    self.answered_at = time.monotonic()
                    return
            self._stop_asked.wait(self._poll_s)

    def _asked(self, path: str, body: Mapping[str, object] | None) -> bool:
        left = max(1.0, self._deadline - time.monotonic())
        try:
            if body is None:
                answer = requests.get(
                    self._base_url + path, headers=self._headers, timeout=min(left, _HEALTH_TIMEOUT_S)
                )
            else:
                answer = requests.post(self._base_url + path, json=body, headers=self._headers, timeout=left)
        except requests.RequestException as error:
            self.last = f"{path}: {type(error).__name__}"
            return False
        self.last = f"{path}: HTTP {answer.status_code} {answer.text[:120] if body else ''}".rstrip()
        if answer.status_code != 200:
            return False
        return body is None or _has_token(answer)


def _has_token(answer: requests.Response) -> bool:
    try:
        meta = answer.json()["meta_info"]
        return int(meta["completion_tokens"]) >= 1
    except (ValueError, KeyError, TypeError):
        return False


class _Wait:
    """One wait's state."""

    def __init__(
        self, unit: str, base_url: str, timeout_s: float, poll_s: float, api_key: str | None
    ) -> None:
        self._unit = unit
        self._base_url = base_url
        self._poll_s = poll_s
        self._timeout_s = timeout_s
        self._api_key = api_key
        parts = urlsplit(base_url)
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._began = time.monotonic()
        self._deadline = self._began + timeout_s
        self._listening_at: float | None = None
        self._foreign: dict[int, str] = {}
        self._stuck_look = self._began + _STUCK_LOOK_S

    def run(self) -> ReadyReport:
        first = unit_state(self._unit)
        probe: _Probe | None = None
        try:
            while True:
                now = unit_state(self._unit)
                if now.dead() or not now.same_start(first):
                    return self._died(first, now, probe)
                if probe is None and self._owns_port(now):
                    probe = _Probe(self._base_url, self._deadline, self._poll_s, self._api_key)
                    probe.start()
                if probe is not None and probe.answered_at is not None and self._owns_port(now):
                    return self._report(now, probe, None)
                stuck = self._stuck(now)
                if stuck is not None:
                    return self._report(now, probe, stuck)
                if time.monotonic() >= self._deadline:
                    return self._report(now, probe, self._timed_out(now, probe))
                time.sleep(self._poll_s)
        finally:
            if probe is not None:
                probe.stop()

    def _owns_port(self, state: UnitState) -> bool:
        """Whether the port is held by a process of the unit (and by nobody else)."""
        holders = listeners(self._port)
        self._foreign = {
            pid: name for pid, name in holders.items() if not in_control_group(pid, state.control_group)
        }
        own = bool(holders) and not self._foreign
        if own and self._listening_at is None:
            self._listening_at = time.monotonic()
        return own

    def _stuck(self, state: UnitState) -> Failure | None:
        """A port that the unit couldn't bind: SGLang says so and lives on."""
        if not self._foreign or time.monotonic() < self._stuck_look:
            return None
        self._stuck_look = time.monotonic() + _STUCK_LOOK_S
        found = failures.stuck(self._lines(state.invocation_id))
        if found is None:
            return None
        return found.model_copy(update={"summary": f"{self._held()}: {found.summary}"})

    def _held(self) -> str:
        who = ", ".join(f"process {pid} ({name})" for pid, name in sorted(self._foreign.items()))
        return f"port {self._port} is held by {who}, which isn't part of {self._unit}"

    def _lines(self, invocation_id: str) -> list[str]:
        found = journal.entries(self._unit, invocation_id=invocation_id or None)
        return [entry.message for entry in found]

    def _died(self, first: UnitState, now: UnitState, probe: _Probe | None) -> ReadyReport:
        """Classify by the journal of the start that was waited for, not of the one after it."""
        journal.sync()
        failure = failures.classify(self._lines(first.invocation_id), now if now.dead() else None)
        if now.started_again(first):
            failure = failure.model_copy(
                update={"summary": f"{failure.summary} (systemd has started the unit again meanwhile)"}
            )
        return self._report(first, probe, failure)

    def _timed_out(self, state: UnitState, probe: _Probe | None) -> Failure:
        lines = self._lines(state.invocation_id)
        kept = failures.classify(lines).journal_tail
        if self._foreign:
            return Failure(
                kind="port_in_use",
                summary=f"{self._held()}, after {self._timeout_s:.0f} s",
                hint="stop that process, or set sglang_port",
                journal_tail=kept,
            )
        seen = probe.last if probe is not None else f"port {self._port} has no listener"
        return Failure(
            kind="timeout",
            summary=f"not ready after {self._timeout_s:.0f} s: {seen}",
            hint="raise sglang_ready_timeout (sweep_ready_timeout in a sweep) if the model loads this long",
            journal_tail=kept,
        )

    def _report(self, state: UnitState, probe: _Probe | None, failure: Failure | None) -> ReadyReport:
        start = state.left_inactive_s
        if not 0 < start <= time.monotonic():
            start = self._began  # the clock of another boot or of a time namespace: count from here

        def since(moment: float | None) -> float | None:
            return None if moment is None else round(max(0.0, moment - start), 3)

        phases = Phases(
            process_s=since(state.main_started_s or None) if state.main_pid else None,
            listening_s=since(self._listening_at),
            healthy_s=since(probe.healthy_at if probe else None),
            first_token_s=since(probe.answered_at if probe else None),
        )
        return ReadyReport(failure is None, state.invocation_id, state.main_pid, phases, failure)
