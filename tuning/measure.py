"""One measurement of a running service: warm, over an exact window, by the start it began with.

Order: the prompts are tokenised by the server; warm-up passes at the highest concurrency until two
in a row agree; then for each level, highest concurrency first, the cache is flushed and all prompts
are run. The journal's window begins after the warm-up's last line and ends when the journal has
every step that the responses told of (or a few seconds later). All the while systemd is asked
whether it is still the same start of the unit: if not, the measurement fails with a class, as a
start-up would.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import requests
from pydantic import JsonValue

from tuning import acceptance, failures, journal
from tuning.loadgen import Ask, LoadError, PromptMode, Sampling, Target, prepare, run_level
from tuning.models import (
    Acceptance,
    AcceptanceSources,
    Failure,
    FailureKind,
    Level,
    Measurement,
    RequestRecord,
    Warmup,
    WorkloadSummary,
)
from tuning.prompts import Prompt, load_prompts
from tuning.units import UnitError, UnitState, unit_state

#: A speculating service whose accept length is no more than this has collapsed: its draft is of no use.
COLLAPSED = 1.05
#: Largest disagreement between responses and journal that passes without a warning.
AGREEMENT = 0.01

_POLL_S = 0.5
_SETTLE_S = 5.0
_SERVER_KEYS = (
    "version",
    "model_path",
    "dtype",
    "device",
    "attention_backend",
    "context_length",
    "max_running_requests",
    "disable_overlap_schedule",
    "decode_log_interval",
    "speculative_algorithm",
    "speculative_draft_model_path",
    "speculative_num_draft_tokens",
    "speculative_dflash_block_size",
)


class MeasurementFailed(RuntimeError):
    """No measurement: ``failure`` says why."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(f"{failure.kind}: {failure.summary}")
        self.failure = failure


@dataclass(frozen=True)
class Workload:
    """What to ask. Two facts can be compared when their workloads are the same.

    Warm-up passes ask ``warmup_requests`` prompts (at least the highest concurrency) for
    ``warmup_tokens`` each, until two passes in a row differ by at most ``warmup_tolerance`` of their
    tok/s, at most ``warmup_passes`` times or ``warmup_seconds``.
    """

    prompts: Sequence[Prompt] = field(default_factory=load_prompts)
    levels: Sequence[int] = (1,)
    max_tokens: int = 128
    ignore_eos: bool = True
    prompt_mode: PromptMode = "auto"
    warmup_requests: int = 4
    warmup_tokens: int = 32
    warmup_passes: int = 4
    warmup_seconds: float = 60.0
    warmup_tolerance: float = 0.1
    request_timeout_s: float = 600.0
    stall_timeout_s: float = 120.0
    flush_timeout_s: float = 30.0
    journal_timeout_s: float = 5.0

    def __post_init__(self) -> None:
        """Refuse a workload that can't be run, naming the variable."""
        if not self.prompts:
            raise ValueError("the workload has no prompt; check sweep_prompts and sweep_prompt_limit")
        if not self.levels or any(level < 1 for level in self.levels):
            raise ValueError(f"levels are {list(self.levels)}; expected 1 or more (sweep_levels, --levels)")
        if len(set(self.levels)) != len(self.levels):
            raise ValueError(
                f"levels {list(self.levels)} repeat; expected each once (sweep_levels, --levels)"
            )
        if self.max_tokens < 2:
            raise ValueError(f"max_tokens is {self.max_tokens}; expected at least 2 (sweep_tokens, --tokens)")


def _refused(error: BaseException | None) -> bool:
    """Whether the connection was refused, at whatever depth of its causes."""
    while error is not None and not isinstance(error, ConnectionRefusedError):
        error = error.__cause__ or error.__context__
    return error is not None


def measure(unit: str | None, base_url: str, workload: Workload, api_key: str | None = None) -> Measurement:
    """Measure the service. ``unit`` None measures a server that systemd doesn't run, without a journal.

    Raises MeasurementFailed with a classified failure: the unit died or was restarted, requests failed, the
    service is busy with others' requests, or a speculating service made no verify step.
    """
    return _Run(unit, base_url.rstrip("/"), workload, api_key).measure()


class _Run:
    """One measurement's state."""

    def __init__(self, unit: str | None, base_url: str, workload: Workload, api_key: str | None) -> None:
        self._unit = unit
        self._workload = workload
        self._target = Target(
            base_url,
            api_key,
            request_timeout_s=workload.request_timeout_s,
            stall_timeout_s=workload.stall_timeout_s,
        )
        self._first: UnitState | None = None
        self._warnings: list[str] = []

    def measure(self) -> Measurement:
        """Run it all; see the module."""
        began = time.monotonic()
        try:
            if self._unit is not None:
                self._first = unit_state(self._unit)
                if self._first.dead():
                    raise MeasurementFailed(self._died(self._first))
            return self._steps(began)
        except (
            LoadError,
            UnitError,
            journal.JournalError,
            acceptance.AcceptanceError,
            requests.RequestException,
        ) as error:
            if self._unit is None and _refused(error):
                failure = Failure(
                    kind="request_failed",
                    summary=f"nothing listens at {self._target.base_url}",
                    hint="start the service, or give its address",
                )
                raise MeasurementFailed(failure) from error
            raise MeasurementFailed(self._why(str(error))) from error

    def _steps(self, began: float) -> Measurement:
        server = self._server()
        speculating = bool(server.get("speculative_algorithm"))
        asks, mode = prepare(self._target, self._workload.prompts, self._workload.prompt_mode)
        start = self._cursor()
        warmup, warm_records = self._warm_up(asks)
        with contextlib.suppress(journal.JournalError):  # the measured window will tell
            self._journal(start, acceptance.from_responses(warm_records), server)
        start = self._cursor()
        levels = []
        for concurrency in sorted(self._workload.levels, reverse=True):
            self._flush()
            sampling = Sampling(self._workload.max_tokens, self._workload.ignore_eos)
            levels.append(self._level(run_level(self._target, asks, concurrency, sampling)))
        sources = self._acceptance(levels, start, server, speculating)
        self._still_the_same()
        lowest = min(levels, key=lambda level: level.concurrency)
        return Measurement(
            workload=self._summary(asks, mode),
            server=server,
            invocation_id=self._first.invocation_id if self._first else "",
            warmup=warmup,
            levels=levels,
            acceptance=sources,
            outputs={record.prompt_id: record.output_sha256 for record in lowest.records},
            warnings=self._warnings,
            seconds=time.monotonic() - began,
        )

    def _summary(self, asks: Sequence[Ask], mode: Literal["chat", "raw"]) -> WorkloadSummary:
        chosen = self._workload
        what = [
            [[ask.id, list(ask.input_ids)] for ask in asks],
            sorted(chosen.levels),
            chosen.max_tokens,
            chosen.ignore_eos,
        ]
        return WorkloadSummary(
            digest=hashlib.sha256(json.dumps(what, separators=(",", ":")).encode()).hexdigest()[:16],
            prompts=[ask.id for ask in asks],
            levels=sorted(chosen.levels),
            max_tokens=chosen.max_tokens,
            ignore_eos=chosen.ignore_eos,
            prompt_mode=mode,
        )

    def _server(self) -> dict[str, JsonValue]:
        """What the server says it is; the keys that matter for a comparison."""
        answer = requests.get(
            f"{self._target.base_url}/server_info", headers=self._target.headers(), timeout=30
        )
        if answer.status_code != 200:
            raise LoadError(f"/server_info: HTTP {answer.status_code}: {answer.text[:200]}")
        try:
            info: dict[str, Any] = dict(answer.json())
        except (ValueError, TypeError) as error:
            raise LoadError(f"/server_info is no JSON object: {answer.text[:100]!r}") from error
        if info.get("incremental_streaming_output"):
            self._target = Target(
                self._target.base_url,
                self._target.api_key,
                incremental=True,
                request_timeout_s=self._workload.request_timeout_s,
                stall_timeout_s=self._workload.stall_timeout_s,
            )
        return {key: info[key] for key in _SERVER_KEYS if info.get(key) is not None}

    def _warm_up(self, asks: Sequence[Ask]) -> tuple[Warmup, list[RequestRecord]]:
        """Short passes at the highest concurrency until two in a row agree, within the bounds."""
        chosen = self._workload
        top = max(chosen.levels)
        sampling = Sampling(chosen.warmup_tokens, ignore_eos=True)
        wanted = max(top, min(chosen.warmup_requests, len(asks)))
        some = [asks[number % len(asks)] for number in range(wanted)]
        began = time.monotonic()
        rates: list[float] = []
        records: list[RequestRecord] = []
        stable = False
        while not stable and len(rates) < chosen.warmup_passes:
            if len(rates) > 1 and time.monotonic() - began > chosen.warmup_seconds:
                break
            level = self._level(run_level(self._target, some, top, sampling, repeats=1))
            records += level.records
            rates.append(level.tok_s)
            stable = len(rates) > 1 and abs(rates[-1] - rates[-2]) <= chosen.warmup_tolerance * rates[-2]
        if not stable and chosen.warmup_passes > 1:
            said = ", ".join(f"{rate:.1f}" for rate in rates)
            self._warnings.append(f"not stable after {len(rates)} warm-up passes ({said} tok/s)")
        seconds = time.monotonic() - began
        return Warmup(passes=len(rates), tok_s=rates, stable=stable, seconds=seconds), records

    def _level(self, running: Coroutine[Any, Any, Level]) -> Level:
        """Run one level while watching the unit; any failed request fails the measurement."""
        level = asyncio.run(self._watched(running))
        if level.failed:
            failed = [record for record in level.records if not record.ok]
            first = failed[0]
            raise MeasurementFailed(
                self._why(
                    f"{len(failed)} of {level.requests} requests failed at concurrency {level.concurrency}; "
                    f"the first, prompt {first.prompt_id}: {first.error}"
                )
            )
        return level

    async def _watched(self, running: Coroutine[Any, Any, Level]) -> Level:
        load = asyncio.create_task(running)
        watch = asyncio.create_task(self._watch())
        try:
            await asyncio.wait({load, watch}, return_when=asyncio.FIRST_COMPLETED)
            if watch.done() and not load.done():
                watch.result()  # raises MeasurementFailed
            return await load
        finally:
            for task in (load, watch):
                task.cancel()
            await asyncio.gather(load, watch, return_exceptions=True)

    async def _watch(self) -> None:
        """Ends, with MeasurementFailed, when this start of the unit is over."""
        while True:
            await asyncio.sleep(_POLL_S)
            await asyncio.to_thread(self._still_the_same)

    def _still_the_same(self) -> None:
        if self._unit is None or self._first is None:
            return
        now = unit_state(self._unit)
        if now.dead() or not now.same_start(self._first):
            raise MeasurementFailed(self._died(now))

    def _why(self, said: str, kind: FailureKind = "request_failed") -> Failure:
        """The unit's death if it is dying (clients see a crash first), else what the client saw."""
        if self._unit is not None and self._first is not None:
            until = time.monotonic() + _SETTLE_S
            while time.monotonic() < until:
                try:
                    self._still_the_same()
                except MeasurementFailed as died:
                    summary = f"{died.failure.summary} (the client saw: {said[:200]})"
                    return died.failure.model_copy(update={"summary": summary})
                except UnitError:
                    break
                time.sleep(_POLL_S)
            return Failure(
                kind=kind,
                summary=said,
                hint="the service is still running; read the journal's tail",
                journal_tail=journal.tail(self._entries()),
            )
        return Failure(kind=kind, summary=said, hint="read the server's log")

    def _died(self, now: UnitState) -> Failure:
        journal.sync()
        lines = [entry.message for entry in self._entries()]
        failure = failures.classify(lines, now if now.dead() else None)
        again = ", and systemd has started it again" if now.started_again(self._first or now) else ""
        return failure.model_copy(
            update={"summary": f"crashed during the measurement{again}: {failure.summary}"}
        )

    def _entries(self) -> list[journal.Entry]:
        if self._unit is None or self._first is None:
            return []
        try:
            return journal.entries(self._unit, invocation_id=self._first.invocation_id or None)
        except journal.JournalError:
            return []  # only ever shown beside another failure

    def _flush(self) -> None:
        """Empty the prefix cache. The server refuses while it is busy, which right after a pass it may be."""
        until = time.monotonic() + self._workload.flush_timeout_s
        url = f"{self._target.base_url}/flush_cache"
        while True:
            answer = requests.post(url, headers=self._target.headers(), timeout=30)
            if answer.status_code == 200:
                return
            if time.monotonic() >= until:
                raise MeasurementFailed(
                    self._why(
                        f"/flush_cache answered HTTP {answer.status_code} for "
                        f"{self._workload.flush_timeout_s:.0f} s: {answer.text[:150]}; someone else is "
                        "using the service, so nothing measured now would be its own",
                        kind="busy",
                    )
                )
            time.sleep(0.2)

    def _cursor(self) -> str | None:
        if self._unit is None:
            return None
        journal.sync()
        return journal.cursor(self._unit)

    def _journal(
        self, after: str | None, responses: Acceptance, server: dict[str, JsonValue]
    ) -> Acceptance | None:
        """The window's acceptance by the journal, once it holds every step of the responses."""
        if self._unit is None or self._first is None:
            return None
        interval = server.get("decode_log_interval")
        window = interval if isinstance(interval, int) else 40
        until = time.monotonic() + self._workload.journal_timeout_s
        journal.sync()
        while True:
            found = journal.entries(self._unit, after, self._first.invocation_id or None)
            metrics = journal.parse_metrics(found)
            made = acceptance.from_journal(metrics, journal.parse_decode(found), window)
            have = made.steps if made is not None else 0
            # lines of whole windows never hold the last steps: nothing to wait for beyond them
            missing = responses.steps - have
            enough = missing <= 0 if metrics else missing < window and made is not None
            if enough or time.monotonic() >= until:
                return made
            time.sleep(0.1)

    def _acceptance(
        self,
        levels: Sequence[Level],
        start: str | None,
        server: dict[str, JsonValue],
        speculating: bool,
    ) -> AcceptanceSources:
        records = [record for level in levels for record in level.records]
        responses = acceptance.from_responses(records)
        if speculating and not any(record.verify_steps for record in records):
            raise MeasurementFailed(
                Failure(
                    kind="request_failed",
                    summary=f"{server['speculative_algorithm']} is on, but no response tells of a verify "
                    "step",
                    hint="the backend must count steps per request; is this the pinned SGLang?",
                    journal_tail=journal.tail(self._entries()),
                )
            )
        if speculating and responses.tau is not None and responses.tau <= COLLAPSED:
            self._warnings.append(
                f"accept length {responses.tau:.2f}: speculation gains nothing; does the draft belong to "
                "this target?"
            )
        cached = sum(level.cached_tokens for level in levels)
        if cached:
            self._warnings.append(f"{cached} prompt tokens came from the cache; expected 0")
        try:
            by_journal = self._journal(start, responses, server)
        except journal.JournalError as error:
            self._warnings.append(f"journal: {error}")
            by_journal = None
        agreed = acceptance.agreement(responses, by_journal) if by_journal is not None else None
        coverage = by_journal.steps / responses.steps if by_journal is not None and responses.steps else None
        if self._unit is not None and by_journal is None:
            self._warnings.append("the journal has no line about the accept length in the measured window")
        if coverage is not None and coverage < 1 - AGREEMENT and speculating:
            self._warnings.append(
                f"the journal tells of {100 * coverage:.0f} % of the verify steps (it has only full windows "
                "of --decode-log-interval steps): its accept length is a sample"
            )
        elif agreed is not None and agreed > AGREEMENT and by_journal is not None:
            self._warnings.append(
                f"accept length by the journal is {by_journal.tau:.3f} over {by_journal.steps} steps, by the "
                f"responses {responses.tau:.3f} over {responses.steps}: {100 * agreed:.1f} % apart"
            )
        return AcceptanceSources(
            responses=responses,
            journal=by_journal,
            agreement=agreed,
            coverage=coverage,
            by_category=acceptance.by_category(records),
        )
