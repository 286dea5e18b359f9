"""The client against a server that can do what a real SGLang can't be made to do."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence
from typing import Any

import pytest

from tests.tuning.standin import DROP, HANG, Service, chunk
from tuning import loadgen
from tuning.loadgen import Ask, LoadError, Sampling, Target, percentiles, prepare, run_level
from tuning.models import Level, RequestRecord
from tuning.prompts import Prompt

ASKS = [Ask(f"p{number}", "c", (number, 100)) for number in range(6)]
DONE = b"data: [DONE]\n\n"


def level(
    service: Service, asks: Sequence[Ask] = ASKS, concurrency: int = 2, tokens: int = 10, **target: Any
) -> Level:
    made = Target(service.url, **target)
    return asyncio.run(run_level(made, asks, concurrency, Sampling(tokens), repeats=1))


def only(service: Service, script: list[Any], **target: Any) -> RequestRecord:
    service.scripts[0] = script
    return level(service, ASKS[:1], 1, **target).records[0]


def test_counts_are_the_servers(service: Service) -> None:
    made = level(service)
    assert (made.requests, made.failed) == (6, 0)
    assert made.completion_tokens == 60
    # 10 tokens: 1 by prefill, then 3 steps of 3
    assert made.acceptance is not None
    assert (made.acceptance.tokens, made.acceptance.steps) == (54, 18)
    assert made.acceptance.histogram == [0, 0, 18]
    assert [record.prompt_id for record in made.records] == [ask.id for ask in ASKS]
    assert made.tok_s == pytest.approx(60 / made.wall_s)


def test_the_last_step_counts_whole_even_when_the_answer_is_cut(service: Service) -> None:
    made = level(service, tokens=9).acceptance  # 1 + 3 + 3 + (3 cut to 2)
    assert made is not None
    assert (made.tokens, made.steps) == (54, 18)


def test_without_speculation_there_are_no_verify_steps(service: Service) -> None:
    service.speculating = False
    made = level(service)
    assert {record.verify_steps for record in made.records} == {None}
    assert made.acceptance is not None
    assert made.acceptance.tau == 1.0


def test_same_outputs_same_digests(service: Service) -> None:
    first, service.speculating = level(service), False
    second = level(service, concurrency=1)
    assert [r.output_sha256 for r in first.records] == [r.output_sha256 for r in second.records]
    assert len({r.output_sha256 for r in first.records}) == 6
    service.scripts[12] = [chunk([1, 2]), chunk([1, 3], {"type": "stop"}), DONE]
    assert level(service).records[0].output_sha256 != first.records[0].output_sha256


def test_requests_are_greedy_uncached_and_streamed(service: Service) -> None:
    asyncio.run(run_level(Target(service.url), ASKS[:2], 2, Sampling(5, ignore_eos=False)))
    assert len(service.bodies) == 4  # two rounds keep both workers busy
    assert len({body["extra_key"] for body in service.bodies}) == 4
    for body in service.bodies:
        assert body["stream"] is True
        assert body["sampling_params"] == {"max_new_tokens": 5, "temperature": 0, "ignore_eos": False}


@pytest.mark.parametrize(("concurrency", "prompts"), [(1, 6), (3, 6), (4, 2), (6, 6)])
def test_concurrency_is_reached_and_kept(service: Service, concurrency: int, prompts: int) -> None:
    service.together = concurrency
    waiting = asyncio.run(run_level(Target(service.url), ASKS[:prompts], concurrency, Sampling(300)))
    assert service.most_in_flight == concurrency
    assert waiting.requests % prompts == 0
    assert waiting.requests >= 2 * concurrency or waiting.requests == prompts


def test_api_key_is_sent_and_only_when_there_is_one(service: Service) -> None:
    level(service)
    assert service.authorizations == {None}
    service.authorizations.clear()
    level(service, api_key="k1")
    assert service.authorizations == {"Bearer k1"}


def test_incremental_streaming_gives_the_same_record(service: Service) -> None:
    whole = level(service)
    service.incremental = True
    parts = level(service, incremental=True)
    assert [r.output_sha256 for r in parts.records] == [r.output_sha256 for r in whole.records]
    assert parts.completion_tokens == whole.completion_tokens
    # taken for cumulative, the pieces must not pass as an answer
    assert level(service).failed == 6


def test_chunks_split_anywhere(service: Service) -> None:
    import json

    text = b"".join(
        b"data: " + json.dumps(one).encode() + b"\n\n"
        for one in (chunk([5]), chunk([5, 6, 7], {"type": "length"}))
    )
    record = only(service, [text[:9], text[9:60], text[60:], DONE])
    assert record.ok
    assert record.completion_tokens == 3


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ([chunk([1]), DROP], "connection lost after 1 chunks"),
        ([DROP], "connection lost after 0 chunks"),
        ([chunk([1]), chunk([1, 2])], r"ended without \[DONE\] after 2 chunks"),
        ([DONE], "ended before its first chunk"),
        ([chunk([1]), DONE], "before the request was finished"),
        ([b"data: {nonsense\n\n", DONE], "a chunk isn't JSON"),
        ([b"data: \xff\xfe\n\n", DONE], "a chunk isn't JSON"),
        ([b"data: [1, 2]\n\n", DONE], "a chunk is no JSON object"),
        ([{"text": "a"}, DONE], "no meta_info"),
        ([{"error": {"message": "scheduler is dead"}}, DONE], "scheduler is dead"),
        ([chunk([1]), {"object": "error", "message": "m"}, DONE], "answered with an error"),
        ([chunk([1], {"type": "abort", "message": "retracted: OOM"}), DONE], "retracted: OOM"),
        (
            [chunk([1, 2], {"type": "length"}, completion_tokens=3), DONE],
            "2 output ids came for 3 completion",
        ),
        ([chunk([], {"type": "length"}), DONE], "0 output ids came for 0"),
        ([chunk([1], {"type": "length"}, prompt_tokens=None), DONE], "counts make no sense"),
        (
            [chunk([1, 2], {"type": "length"}, spec_correct_drafts_histogram=["x"]), DONE],
            "counts make no sense",
        ),
    ],
)
def test_bad_answers_are_records_with_the_reason(service: Service, script: list[Any], said: str) -> None:
    import re

    record = only(service, script)
    assert not record.ok
    assert re.search(said, record.error), record.error


def test_a_hang_is_bounded(service: Service) -> None:
    record = only(service, [chunk([1]), HANG], stall_timeout_s=1.0)
    assert not record.ok
    assert "after 1 chunks" in record.error
    service.scripts[1] = [HANG]
    made = level(service, ASKS[:2], 2, request_timeout_s=2.0)
    assert [one.ok for one in made.records] == [False, True]


def test_one_failure_leaves_the_other_requests_alone(service: Service) -> None:
    service.scripts[2] = [DROP]
    made = level(service, concurrency=1)
    assert (made.requests, made.failed) == (6, 1)
    assert [record.ok for record in made.records] == [True, True, False, True, True, True]
    assert made.completion_tokens == 50


def test_a_server_that_is_not_there() -> None:
    made = asyncio.run(run_level(Target("http://127.0.0.1:9"), ASKS, 2, Sampling(5), repeats=1))
    assert made.failed == 6
    assert "connection lost after 0 chunks" in made.records[0].error
    assert made.tok_s == 0.0
    assert made.acceptance is None


def test_http_errors_carry_the_servers_words(service: Service) -> None:
    made = level(service, ASKS[:1], 1)
    assert made.failed == 0
    bad = asyncio.run(run_level(Target(service.url + "/nowhere"), ASKS[:1], 1, Sampling(5), repeats=1))
    assert bad.records[0].error.startswith("HTTP 404")


def test_times_from_the_definition() -> None:
    seen = loadgen._Progress(first_at=10.5, first_tokens=1, last_at=12.5)
    final = {"ids": list(range(41)), "meta": {"prompt_tokens": 3}, "reason": "length"}
    record = loadgen._record(ASKS[0], seen, final, began=10.0, ended=12.6)
    assert record.ttft_s == pytest.approx(0.5)
    assert record.e2e_s == pytest.approx(2.6)
    assert record.itl_s == pytest.approx(2.0 / 40)  # tokens, not chunks


def test_a_first_chunk_of_several_tokens_does_not_flatter_the_latency() -> None:
    seen = loadgen._Progress(first_at=10.5, first_tokens=11, last_at=12.5)
    final = {"ids": list(range(41)), "meta": {}, "reason": "length"}
    assert loadgen._record(ASKS[0], seen, final, 10.0, 12.6).itl_s == pytest.approx(2.0 / 30)
    whole = loadgen._Progress(first_at=10.5, first_tokens=41, last_at=10.5)
    assert loadgen._record(ASKS[0], whole, final, 10.0, 12.6).itl_s is None


def test_first_token_is_the_first_chunk_that_has_one(service: Service) -> None:
    record = only(service, [chunk([]), chunk([]), chunk([1, 2], {"type": "length"}), DONE])
    assert record.ok
    assert record.ttft_s is not None
    assert record.itl_s is None


@pytest.mark.parametrize(
    "values", [[3.0], [1.0, 2.0], [5.0, 1.0, 4.0, 2.0, 3.0], [float(n) for n in range(101)]]
)
def test_percentiles(values: list[float]) -> None:
    made = percentiles(values)
    assert made is not None
    assert made.p50 == pytest.approx(statistics.median(values))
    assert (made.min, made.max) == (min(values), max(values))
    assert made.mean == pytest.approx(statistics.fmean(values))
    if len(values) > 1:
        cuts = statistics.quantiles(values, n=100, method="inclusive")
        assert (made.p95, made.p99) == pytest.approx((cuts[94], cuts[98]))


def test_percentiles_of_nothing() -> None:
    assert percentiles([]) is None


@pytest.mark.parametrize(("concurrency", "asks"), [(0, ASKS), (1, [])])
def test_impossible_levels(service: Service, concurrency: int, asks: list[Ask]) -> None:
    with pytest.raises(ValueError, match="expected at least one of each"):
        level(service, asks, concurrency)


PROMPTS = [Prompt(id="a", category="c", text="abc"), Prompt(id="b", category="c", text="xyz")]


@pytest.mark.parametrize(
    ("chat", "mode", "used", "first"),
    [
        (True, "auto", "chat", (1, 97, 98, 99)),
        (False, "auto", "raw", (97, 98, 99)),
        (True, "raw", "raw", (97, 98, 99)),
        (True, "chat", "chat", (1, 97, 98, 99)),
    ],
)
def test_prompts_go_through_the_template_if_there_is_one(
    service: Service, chat: bool, mode: Any, used: str, first: tuple[int, ...]
) -> None:
    service.chat = chat
    asks, how = prepare(Target(service.url), PROMPTS, mode)
    assert how == used
    assert asks[0] == Ask("a", "c", first)
    assert [ask.id for ask in asks] == ["a", "b"]


def test_a_template_that_is_demanded_must_be_there(service: Service) -> None:
    service.chat = False
    with pytest.raises(LoadError, match=r"prompt a can't be tokenised as chat: HTTP 400: .*no chat template"):
        prepare(Target(service.url), PROMPTS, "chat")


def test_prepare_without_a_server() -> None:
    with pytest.raises(LoadError, match="ConnectionError"):
        prepare(Target("http://127.0.0.1:9"), PROMPTS)


async def test_cancelling_closes_the_connections(service: Service) -> None:
    service.scripts = {0: [chunk([1]), HANG], 1: [chunk([1]), HANG]}
    running = asyncio.create_task(run_level(Target(service.url), ASKS, 2, Sampling(5)))
    while service.in_flight < 2:
        await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert len(service.bodies) == 2
