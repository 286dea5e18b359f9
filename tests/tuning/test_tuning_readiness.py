"""Readiness: by the unit's state, its own process and a real generation."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tuning.standin import INVOCATION, Host, Service
from tuning import readiness
from tuning.readiness import ReadyReport, wait_ready

JOURNALS = Path(__file__).parent / "journals"


@pytest.fixture(autouse=True)
def own(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Processes that count as the unit's; the stand-in server runs in this one."""
    pids = {os.getpid()}
    monkeypatch.setattr(readiness, "in_control_group", lambda pid, group: pid in pids)
    monkeypatch.setattr(readiness, "_STUCK_LOOK_S", 0.05)
    return pids


@pytest.fixture
def free_url() -> Iterator[str]:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))  # bound but not listening: nobody else gets it
        yield f"http://127.0.0.1:{one.getsockname()[1]}"


def wait(url: str, timeout_s: float = 20.0) -> ReadyReport:
    return wait_ready("x.service", url, timeout_s=timeout_s, poll_s=0.02)


def later(host: Host, *lines: str, **unit: object) -> threading.Thread:
    """Change the unit once the wait has begun."""

    def act() -> None:
        time.sleep(0.2)
        host.log(*lines)
        host.unit(**unit)

    thread = threading.Thread(target=act)
    thread.start()
    return thread


def kind(report: ReadyReport) -> str:
    assert not report.ok
    assert report.failure is not None
    return report.failure.kind


DEAD = {
    "ActiveState": "failed",
    "SubState": "failed",
    "Result": "signal",
    "ExecMainCode": 2,
    "ExecMainStatus": 9,
}


def test_ready(host: Host, service: Service) -> None:
    now = time.monotonic()
    host.unit(
        InactiveExitTimestampMonotonic=int((now - 16) * 1e6),
        ExecMainStartTimestampMonotonic=int((now - 15.5) * 1e6),
    )
    report = wait(service.url)
    assert report.ok
    assert report.failure is None
    assert (report.invocation_id, report.main_pid) == (INVOCATION, 4321)
    phases = report.phases
    assert phases.process_s == pytest.approx(0.5, abs=0.01)
    assert phases.boot_s is not None
    assert phases.listening_s is not None
    assert phases.healthy_s is not None
    assert 16 <= phases.listening_s <= phases.healthy_s <= phases.boot_s
    assert "/v1/models" not in service.paths


def test_a_clock_that_makes_no_sense_counts_from_the_wait(host: Host, service: Service) -> None:
    host.unit(InactiveExitTimestampMonotonic=int((time.monotonic() + 9e5) * 1e6))
    report = wait(service.url)
    assert report.phases.boot_s is not None
    assert report.phases.boot_s < 9e4


def test_health_is_not_enough(host: Host, service: Service) -> None:
    service.generate = 503
    report = wait(service.url, timeout_s=3)
    assert kind(report) == "timeout"
    assert report.phases.healthy_s is not None
    assert report.phases.boot_s is None
    assert report.failure is not None
    assert "/generate: HTTP 503" in report.failure.summary


def test_becomes_ready_when_health_and_generation_do(host: Host, service: Service) -> None:
    service.health = service.generate = 503

    def heal() -> None:
        time.sleep(0.2)
        service.health = 200
        time.sleep(0.2)
        service.generate = 200

    thread = threading.Thread(target=heal)
    thread.start()
    assert wait(service.url).ok
    thread.join()


def test_an_answer_of_another_process_is_no_answer(host: Host, service: Service, own: set[int]) -> None:
    own.clear()
    report = wait(service.url, timeout_s=0.5)
    assert kind(report) == "port_in_use"
    assert report.failure is not None
    assert f"process {os.getpid()}" in report.failure.summary
    assert "which isn't part of x.service" in report.failure.summary
    assert service.paths == []  # it was never asked


def test_a_port_that_changed_hands_meanwhile_proves_nothing(
    host: Host, service: Service, own: set[int]
) -> None:
    service.on_plain = own.clear
    assert kind(wait(service.url, timeout_s=3)) == "port_in_use"


def test_a_port_that_could_not_be_bound_ends_the_wait(host: Host, service: Service, own: set[int]) -> None:
    own.clear()
    host.log(*(JOURNALS / "port_in_use.txt").read_text().splitlines())
    report = wait(service.url, timeout_s=60)  # the real engine lives on; only the journal tells
    assert kind(report) == "port_in_use"
    assert report.failure is not None
    assert "[Errno 98]" in report.failure.summary


def test_death_is_classified_with_its_own_journal(host: Host, free_url: str) -> None:
    host.log("Unknown speculative algorithm name: of an earlier start", invocation="f" * 32)
    lines = (JOURNALS / "draft_missing.txt").read_text().splitlines()
    thread = later(host, *lines, **DEAD)
    report = wait(free_url, timeout_s=60)
    thread.join()
    assert kind(report) == "draft_missing"
    assert report.failure is not None
    assert any("'/nope'" in line for line in report.failure.journal_tail)


def test_death_while_the_first_generation_hangs(host: Host, service: Service) -> None:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()  # accepts and never answers
    with listener:
        thread = later(host, "Scheduler watchdog timeout", **DEAD)
        report = wait(f"http://127.0.0.1:{listener.getsockname()[1]}", timeout_s=60)
        thread.join()
    assert kind(report) == "watchdog"


@pytest.mark.parametrize(
    ("unit", "again"),
    [
        ({"InvocationID": "e" * 32, "MainPID": 5000, "NRestarts": 1}, True),
        ({"ActiveState": "activating", "SubState": "auto-restart", "MainPID": 0}, False),
        ({"MainPID": 5000}, False),
        (DEAD | {"MainPID": 0}, False),
    ],
)
def test_a_restart_ends_the_wait(host: Host, free_url: str, unit: dict[str, object], again: bool) -> None:
    thread = later(host, "torch.OutOfMemoryError: CUDA out of memory.", **unit)
    report = wait(free_url, timeout_s=60)
    thread.join()
    assert kind(report) == "out_of_memory"
    assert report.invocation_id == INVOCATION  # of the start that was waited for
    assert report.failure is not None
    assert ("systemd has started the unit again" in report.failure.summary) is again


def test_already_dead(host: Host, free_url: str) -> None:
    host.log("ValueError: Unknown speculative algorithm name: DDTREE")
    host.killed()
    assert kind(wait(free_url, timeout_s=60)) == "unknown_algorithm"


def test_timeout_says_how_far_it_came(host: Host, free_url: str) -> None:
    host.log("Loading shards: 3/64")
    report = wait(free_url, timeout_s=0.2)
    assert kind(report) == "timeout"
    assert report.failure is not None
    assert "has no listener" in report.failure.summary
    assert "sglang_ready_timeout" in report.failure.hint
    assert report.failure.journal_tail == ["Loading shards: 3/64"]


def test_unknown_unit_and_no_systemd(host: Host, free_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    host.unit(LoadState="not-found")
    report = wait(free_url)
    assert kind(report) == "crashed"
    assert report.failure is not None
    assert "not-found" in report.failure.summary
    monkeypatch.setenv("PATH", "/nonexistent")
    report = wait(free_url)
    assert report.failure is not None
    assert "systemctl isn't on this machine" in report.failure.summary


def test_api_key_is_sent(host: Host, service: Service) -> None:
    assert wait_ready("x.service", service.url, 20, 0.02, api_key="k1").ok
    assert service.authorizations == {"Bearer k1"}
