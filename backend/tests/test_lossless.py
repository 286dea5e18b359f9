"""Greedy output is the autoregressive output, whatever the tree and whatever the server is busy with.

One server holds the largest tree; all smaller ones are asked for request by request.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from typing import Any

import pytest
import requests
from engine import Server, serve, tree_flags
from prompts import TEXT

POINTS = [
    *((1, 1), (3, 2), (4, 4), (7, 1), (8, 4), (13, 3)),
    *((16, 4), (16, 8), (24, 6), (32, 8), (48, 8), (64, 8)),
]
BATCH = 8
SINGLE_TOKENS = 20
#: Lengths in a batch differ, so that requests come and go in the middle of others.
TOKENS = [12, 20, 28, 36, 44]
CHUNK = 48
#: Everything: every point sees all prompts, without overlap and one at a time too, and not a share of them.
WHOLE = os.environ.get("DDTREE_WHOLE") == "1"
SHARES = 1 if WHOLE else 4


def sources() -> list[str]:
    """Fifty prompts from 1 to about 250 tokens, some of which begin alike."""
    lines = TEXT.splitlines(keepends=True)
    made = [TEXT[i * 211 : i * 211 + 3 + 17 * i] for i in range(40)]
    made += ["".join(lines[: 2 + i]) for i in range(10)]
    return made


PROMPTS = sources()


def lengths() -> list[int]:
    return list(itertools.islice(itertools.cycle(TOKENS), len(PROMPTS)))


def ask(server: Server, prompts: list[str], tokens: list[int], points: list[tuple[int, int]] | None) -> Any:
    """One batch; request i runs with points[i] unless the server's own are meant."""
    sampling = [
        {
            "max_new_tokens": count,
            "temperature": 0,
            "ignore_eos": True,
            **(
                {"custom_params": {"ddtree_budget": points[i][0], "ddtree_topk_cap": points[i][1]}}
                if points
                else {}
            ),
        }
        for i, count in enumerate(tokens)
    ]
    answer = requests.post(
        f"{server.url}/generate", json={"text": prompts, "sampling_params": sampling}, timeout=600
    )
    answer.raise_for_status()
    return answer.json()


def in_batches(
    server: Server, points: list[tuple[int, int]] | None, share: slice = slice(None)
) -> list[list[int]]:
    """The share of the prompts, ``BATCH`` at a time; the points are gone through in turn."""
    prompts, tokens = PROMPTS[share], lengths()[share]
    asked = list(itertools.islice(itertools.cycle(points), len(prompts))) if points else None
    outputs = []
    for start in range(0, len(prompts), BATCH):
        part = slice(start, start + BATCH)
        answers = ask(server, prompts[part], tokens[part], asked[part] if asked else None)
        outputs += [answer["output_ids"] for answer in answers]
    return outputs


def differing(outputs: list[list[int]], expected: list[list[int]]) -> list[int]:
    """Which prompts got another answer."""
    return [i for i, (got, want) in enumerate(zip(outputs, expected, strict=True)) if got != want]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """The autoregressive answers."""
    with serve(["--disable-radix-cache"], tmp_path_factory.mktemp("ar") / "log") as server:
        outputs = in_batches(server, None)
    assert len(PROMPTS) >= 50
    assert [len(output) for output in outputs] == lengths()
    return outputs


@pytest.fixture(scope="module", params=[True, False], ids=["overlap", "no overlap"])
def overlap(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(scope="module")
def server(overlap: bool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """With overlap as on accelerators, without as the CPU engine is by itself."""
    flags = [*tree_flags(64, 8), "--chunked-prefill-size", str(CHUNK)]
    environment = {"SGLANG_DDTREE_CPU_OVERLAP": "1" if overlap else ""}
    with serve(flags, tmp_path_factory.mktemp("tree") / "log", environment) as made:
        shown = requests.get(f"{made.url}/server_info", timeout=60).json()
        assert shown["disable_overlap_schedule"] is not overlap
        yield made


def label(value: tuple[int, int]) -> str:
    return f"{value[0]}:{value[1]}"


@pytest.mark.parametrize("point", POINTS, ids=label)
def test_batches_of_mixed_lengths(
    server: Server, overlap: bool, expected: list[list[int]], point: tuple[int, int]
) -> None:
    """Without overlap half of the prompts for each point, all prompts over all points."""
    share = slice(None) if overlap or WHOLE else slice(POINTS.index(point) % 2, None, 2)
    assert differing(in_batches(server, [point], share), expected[share]) == []


def test_chunked_prefill_and_the_radix_cache_were_in_it(server: Server, expected: list[list[int]]) -> None:
    """After the batches above every prompt is in the cache; long ones had been split."""
    answers = ask(server, PROMPTS[:BATCH], lengths()[:BATCH], None)
    hits = [answer["meta_info"]["cached_tokens"] for answer in answers]
    assert sum(hits) > 0
    assert differing([answer["output_ids"] for answer in answers], expected[:BATCH]) == []
    assert f"#new-token: {CHUNK}," in server.log.read_text()


def test_every_request_with_a_tree_of_its_own(server: Server, expected: list[list[int]]) -> None:
    assert differing(in_batches(server, POINTS), expected) == []


@pytest.mark.parametrize("point", POINTS, ids=label)
def test_one_at_a_time(server: Server, expected: list[list[int]], point: tuple[int, int]) -> None:
    """A share of the prompts for each point, all prompts over all points."""
    share = slice(POINTS.index(point) % SHARES, None, SHARES)
    outputs = [
        ask(server, [prompt], [min(SINGLE_TOKENS, count)], [point])[0]["output_ids"]
        for prompt, count in zip(PROMPTS[share], lengths()[share], strict=True)
    ]
    assert differing(outputs, [answer[:SINGLE_TOKENS] for answer in expected[share]]) == []
