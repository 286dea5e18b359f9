"""Options, the journal line, the stage clock, choice of model files and of test ports; no server."""

from __future__ import annotations

import argparse
import itertools
import logging
import socket

import engine
import pytest
from sglang_ddtree import options
from sglang_ddtree.clock import StageClock
from sglang_ddtree.metrics import STAGES, StepMetrics


def parse(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--speculative-algorithm")
    options.add_flags(parser)
    return parser.parse_args(argv)


def test_flags_reach_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options.os, "environ", environ := {})
    flags = "--speculative-algorithm ddtree --speculative-ddtree-budget 24 --speculative-ddtree-topk-cap 6"
    options.store_flags(parse(*flags.split()))
    assert environ == {"SGLANG_DDTREE_BUDGET": "24", "SGLANG_DDTREE_TOPK_CAP": "6"}
    assert options.from_environment(environ) == options.Options(24, 6)
    options.store_flags(parse(*flags.split(), "--speculative-ddtree-adaptive"))
    assert options.from_environment(environ) == options.Options(24, 6, adaptive=True)
    assert options.Options(24, 6).width == 25


def test_defaults() -> None:
    assert options.from_environment({}) == options.Options(16, 4)


@pytest.mark.parametrize("algorithm", [[], ["--speculative-algorithm", "DFLASH"]])
@pytest.mark.parametrize("flag", ["--speculative-ddtree-budget 8", "--speculative-ddtree-adaptive"])
def test_flags_without_the_algorithm_are_refused(algorithm: list[str], flag: str) -> None:
    with pytest.raises(ValueError, match=f"{flag} was given .* expected --speculative-algorithm DDTREE"):
        options.store_flags(parse(*algorithm, *flag.split()))


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"SGLANG_DDTREE_BUDGET": "0"}, "--speculative-ddtree-budget .* is 0, expected at least 1"),
        ({"SGLANG_DDTREE_TOPK_CAP": "-3"}, "--speculative-ddtree-topk-cap .* is -3"),
        ({"SGLANG_DDTREE_BUDGET": "many"}, "'many', expected a whole number"),
        ({"SGLANG_DDTREE_ADAPTIVE": "yes"}, "--speculative-ddtree-adaptive .* is 'yes', expected 0 or 1"),
        ({"SGLANG_DDTREE_PLANT": "nomask"}, "for tests only"),
        (
            {"SGLANG_DDTREE_PLANT": "other", "SGLANG_DDTREE_TEST": "1"},
            "expected one of nomask, nomove, width, bias",
        ),
    ],
)
def test_bad_options_are_refused(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        options.from_environment(environ)


def test_metrics_line(caplog: pytest.LogCaptureFixture) -> None:
    """Steps accepting 3, 0 and 2 nodes: 3 steps, 4 + 1 + 3 tokens."""
    caplog.set_level(logging.INFO)
    metrics = StepMetrics("DDTREE metrics: budget=16 topk=4", longest=7, interval=2)
    metrics.time(draft=0.001, build=0.002, verify=0.003, commit=0.001)
    metrics.time(draft=0.002, build=0.002, verify=0.005, commit=0.001)
    metrics.add([3, 0])
    assert caplog.messages == []
    metrics.add([2])
    metrics.flush()
    assert caplog.messages == [
        "DDTREE metrics: budget=16 topk=4 steps=3 tokens=8 avg_commit_len=2.67 hist=1,0,1,1,0,0,0,0 "
        "draft_ms=1.500 build_ms=2.000 verify_ms=4.000 commit_ms=1.000"
    ]
    metrics.add([])
    metrics.add([7])
    metrics.flush()
    assert len(caplog.messages) == 2
    assert "steps=1 tokens=8 avg_commit_len=8.00" in caplog.messages[1]


def test_metrics_line_of_the_chain(caplog: pytest.LogCaptureFixture) -> None:
    """The chain has neither budget nor stages: one step of 3 draft tokens commits 4."""
    caplog.set_level(logging.INFO)
    metrics = StepMetrics("DFLASH metrics:", longest=7, interval=1, stages=())
    metrics.add([3])
    assert caplog.messages == ["DFLASH metrics: steps=1 tokens=4 avg_commit_len=4.00 hist=0,0,0,1,0,0,0,0"]


def test_silent_ranks_count_but_do_not_report(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    metrics = StepMetrics("DDTREE metrics:", longest=1, interval=1, enabled=False)
    metrics.add([1])
    assert caplog.messages == []


def test_stage_clock_on_a_cpu() -> None:
    clock = StageClock("cpu", STAGES)
    clock.start()
    for _ in STAGES:
        clock.mark()
    ((tag, times),) = clock.finished("a step")
    assert tag == "a step"
    assert list(times) == list(STAGES)
    assert all(seconds >= 0 for seconds in times.values())
    assert clock.finished() == []


def test_servers_of_runs_side_by_side_do_not_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as other, engine.claimed_port() as claimed:
        other.bind(("127.0.0.1", 0))
        taken = [claimed, other.getsockname()[1]]
        drawn = itertools.chain(taken, itertools.count(claimed + 1))
        monkeypatch.setattr(engine.random, "randrange", lambda *_: next(drawn))
        with engine.claimed_port() as mine:
            assert mine not in taken
