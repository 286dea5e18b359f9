"""The measurement: its order, its window, and everything that must end it."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from tests.tuning.standin import DROP, HANG, INVOCATION, Host, Service, chunk, metrics_line
from tuning import measure as module
from tuning.measure import MeasurementFailed, Workload, measure
from tuning.models import Measurement
from tuning.prompts import Prompt

PROMPTS = [Prompt(id=f"p{n}", category="even" if n % 2 == 0 else "odd", text=f"{n} text") for n in range(4)]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_POLL_S", 0.05)
    monkeypatch.setattr(module, "_SETTLE_S", 0.5)


def workload(**values: Any) -> Workload:
    given: dict[str, Any] = {
        "prompts": PROMPTS,
        "max_tokens": 10,
        "warmup_tokens": 4,
        "warmup_passes": 2,
        "warmup_tolerance": 1e9,
        "journal_timeout_s": 0.3,
    }
    return Workload(**(given | values))


def run(service: Service, unit: str | None = "x.service", **values: Any) -> Measurement:
    return measure(unit, service.url, workload(**values))


def fails(service: Service, **values: Any) -> MeasurementFailed:
    with pytest.raises(MeasurementFailed) as caught:
        run(service, **values)
    return caught.value


@pytest.fixture
def journalled(host: Host, service: Service) -> Host:
    """A host whose service writes the backend's line for every answer."""
    service.on_done = lambda commits: host.log(metrics_line(commits)) if commits else None
    return host


def test_a_whole_measurement(journalled: Host, service: Service) -> None:
    made = run(service, levels=[1, 2])
    assert made.invocation_id == INVOCATION
    assert [level.concurrency for level in made.levels] == [2, 1]  # highest first
    assert made.warnings == []
    # 4 prompts at both levels: 8 answers of 1 + 3 + 3 + 3 tokens
    responses, by_journal = made.acceptance.responses, made.acceptance.journal
    assert (responses.tokens, responses.steps) == (72, 24)
    assert by_journal is not None
    assert (by_journal.tokens, by_journal.steps, by_journal.source) == (72, 24, "journal-metrics")
    assert by_journal.histogram == [0, 0, 24, 0, 0, 0, 0, 0]
    assert (made.acceptance.agreement, made.acceptance.coverage) == (0.0, 1.0)
    assert {name: one.steps for name, one in made.acceptance.by_category.items()} == {"even": 12, "odd": 12}
    assert set(made.outputs) == {"p0", "p1", "p2", "p3"}
    assert made.workload.prompt_mode == "chat"
    assert made.server["speculative_algorithm"] == "DDTREE"
    assert made.warmup.stable
    assert service.paths.count("/flush_cache") == 2


def test_digest_tells_workloads_apart(service: Service) -> None:
    first = run(service, unit=None).workload.digest
    assert run(service, unit=None).workload.digest == first
    assert run(service, unit=None, max_tokens=11).workload.digest != first
    assert run(service, unit=None, prompts=PROMPTS[:3]).workload.digest != first
    assert run(service, unit=None, prompt_mode="raw").workload.digest != first
    service.speculating = False
    assert run(service, unit=None).workload.digest == first  # the arm is not the workload


def test_a_journal_that_lags_is_waited_for(host: Host, service: Service) -> None:
    def late(commits: list[int]) -> None:
        threading.Timer(0.5, host.log, [metrics_line(commits)]).start()

    service.on_done = late
    made = run(service, journal_timeout_s=30)
    assert made.acceptance.coverage == 1.0
    assert made.acceptance.agreement == 0.0


def test_journal_and_responses_that_disagree(host: Host, service: Service) -> None:
    service.on_done = lambda commits: host.log(metrics_line([one + 1 for one in commits]))
    made = run(service)
    assert made.acceptance.agreement == pytest.approx(1 / 3)
    assert any("33.3 % apart" in warning for warning in made.warnings)


def test_a_journal_without_the_line(host: Host, service: Service) -> None:
    made = run(service)
    assert made.acceptance.journal is None
    assert made.acceptance.agreement is None
    assert any("no line about the accept length" in warning for warning in made.warnings)


def test_a_line_that_contradicts_itself(host: Host, service: Service) -> None:
    service.on_done = lambda commits: host.log(metrics_line(commits).replace("steps=3", "steps=4"))
    made = run(service)
    assert any("contradicts itself" in warning for warning in made.warnings)
    assert made.acceptance.journal is None


def test_whole_windows_that_miss_the_end(host: Host, service: Service) -> None:
    line = (
        "Decode batch, #running-req: 1, #token: 9, token usage: 0.01, accept len: 3.00, accept rate: 0.29, "
        "cpu graph: False, gen throughput (token/s): 9.00, #queue-req: 0"
    )
    service.on_request = lambda number: host.log(line) if number >= 4 and number % 3 == 0 else None
    # 42 answers of 3 steps; 14 windows of 40 steps would be 560
    made = run(service, max_tokens=100, warmup_passes=1)
    assert made.acceptance.journal is not None
    assert made.acceptance.journal.source == "journal-decode"
    assert made.acceptance.journal.steps == 40
    assert made.acceptance.coverage == pytest.approx(40 / 132)
    assert any("30 % of the verify steps" in warning for warning in made.warnings)


def test_no_speculation(host: Host, service: Service) -> None:
    service.speculating = False
    made = run(service)
    assert made.acceptance.responses.tau == 1.0
    assert all(record.verify_steps is None for record in made.levels[0].records)


def test_an_engine_that_speculates_without_being_asked(host: Host, service: Service) -> None:
    service.speculating = False
    service.on_done = lambda commits: host.log(metrics_line([2] * 5))
    assert any("100.0 % apart" in warning for warning in run(service).warnings)


def test_speculation_without_a_verify_step_is_no_measurement(host: Host, service: Service) -> None:
    real = service._info
    service._info = lambda: real() | {"speculative_algorithm": "DDTREE"}  # type: ignore[method-assign]
    service.speculating = False
    error = fails(service)
    assert error.failure.kind == "request_failed"
    assert "no response tells of a verify step" in error.failure.summary


def test_collapsed_acceptance_raises_an_alarm(journalled: Host, service: Service) -> None:
    service.commit = 1
    assert any("accept length 1.00: speculation gains nothing" in one for one in run(service).warnings)
    service.commit = 2
    assert run(service).warnings == []


def test_cached_tokens_raise_an_alarm(journalled: Host, service: Service) -> None:
    service.cached = 2
    assert "8 prompt tokens came from the cache; expected 0" in run(service).warnings


def test_warm_up_goes_on_until_stable_or_its_bound(service: Service) -> None:
    made = run(service, unit=None, warmup_tolerance=-1.0, warmup_passes=3)
    assert (made.warmup.passes, made.warmup.stable) == (3, False)
    assert "not stable after 3 warm-up passes" in made.warnings[0]
    made = run(service, unit=None, warmup_tolerance=-1.0, warmup_passes=9, warmup_seconds=0.0)
    assert made.warmup.passes == 2


def test_warm_up_is_at_the_highest_concurrency(service: Service) -> None:
    service.together = 4
    run(service, unit=None, levels=[1, 4], warmup_requests=1, warmup_passes=1)
    warm = [body for body in service.bodies if body["sampling_params"]["max_new_tokens"] == 4]
    assert len(warm) == 4
    assert service.most_in_flight == 4


def test_flush_is_tried_again_while_busy(service: Service) -> None:
    service.flush_codes = [400, 400, 200]
    run(service, unit=None)
    assert service.paths.count("/flush_cache") == 3


def test_a_service_that_others_use_is_no_measurement(service: Service) -> None:
    service.flush_codes = [400] * 999
    error = fails(service, unit=None, flush_timeout_s=0.5)
    assert error.failure.kind == "busy"
    assert "someone else is using the service" in error.failure.summary


def test_a_failed_request_fails_the_measurement(host: Host, service: Service) -> None:
    service.scripts[9] = [chunk([1]), DROP]  # after 8 of warm-up
    host.log("something in the journal")
    error = fails(service)
    assert error.failure.kind == "request_failed"
    assert "1 of 4 requests failed at concurrency 1; the first, prompt p1: connection lost" in str(error)
    assert error.failure.journal_tail == ["something in the journal"]


def test_a_crash_is_told_by_the_unit_not_by_the_client(host: Host, service: Service) -> None:
    def crash(number: int) -> None:
        if number == 9:
            host.log("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")
            host.killed()

    service.on_request = crash
    service.scripts[9] = [chunk([1]), DROP]
    error = fails(service)
    assert error.failure.kind == "out_of_memory"
    assert error.failure.summary.startswith("crashed during the measurement: torch.OutOfMemoryError")
    assert error.failure.journal_tail


def test_a_death_that_leaves_the_connection_open_is_seen(host: Host, service: Service) -> None:
    service.on_request = lambda number: host.killed() if number == 9 else None
    service.scripts[9] = [chunk([1]), HANG]
    assert fails(service).failure.kind == "killed"  # and not after the request's own ten minutes


def test_a_restart_in_between_is_seen_though_every_answer_was_good(host: Host, service: Service) -> None:
    def restart(number: int) -> None:
        if number == 11:  # the last one
            host.unit(InvocationID="f" * 32, NRestarts=1)

    service.on_request = restart
    error = fails(service)
    assert "systemd has started it again" in error.failure.summary


def test_a_unit_that_is_dead_is_not_measured(host: Host, service: Service) -> None:
    host.killed()
    assert fails(service).failure.kind == "killed"
    assert service.bodies == []


def test_no_server_no_unit() -> None:
    with pytest.raises(MeasurementFailed) as caught:
        measure(None, "http://127.0.0.1:9", workload())
    assert str(caught.value) == "request_failed: nothing listens at http://127.0.0.1:9"


def test_no_systemd(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert "systemctl isn't on this machine" in fails(service).failure.summary


def test_counts_that_contradict_each_other(service: Service) -> None:
    bad = chunk([1, 2], {"type": "length"}, spec_verify_ct=5, spec_num_correct_drafts=1,
                spec_correct_drafts_histogram=[1])  # fmt: skip
    service.scripts[8] = [bad, b"data: [DONE]\n\n"]
    assert "histogram holds" in fails(service, unit=None).failure.summary


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"prompts": []}, "sweep_prompts"),
        ({"levels": []}, "sweep_levels"),
        ({"levels": [0]}, "sweep_levels"),
        ({"levels": [2, 2]}, "sweep_levels"),
        ({"max_tokens": 1}, "sweep_tokens"),
    ],
)
def test_impossible_workloads(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        workload(**values)
