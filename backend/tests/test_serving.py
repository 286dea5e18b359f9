"""The real server, row by row: greedy output is the autoregressive one, and the counts add up.

Rows are those of the demonstration. Each server is started once; what it answered is kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from engine import CHAIN, MetricsLine, serve, tree_flags
from prompts import PROMPTS, WORKLOAD

TOKENS = 128
BATCH = 4
TREES = {"8:4": (8, 4), "16:4": (16, 4), "16:8": (16, 8), "24:6": (24, 6), "32:8": (32, 8), "48:8": (48, 8)}
#: Most tokens of a step, of any of the drafts.
LONGEST = 16
#: The draft's most probable token at each depth and nothing beside it, which is what the chain verifies.
ONE_BRANCH = "7:1"
CHATS = WORKLOAD[:3]
CHATTY = ("ar", "chain", "16:4")
#: A draft that was hardly trained and one of another target, and what their accept lengths stay below.
BAD_DRAFTS = {"draft-weak": 1.5, "draft-mismatched": 1.1}
LONG = "draft-block16"


@dataclass(frozen=True)
class Run:
    single: list[list[int]]
    batched: list[list[int]]
    steps: int
    accepted: int
    histogram: list[int]
    lines: list[MetricsLine]
    chats: list[dict[str, Any]]

    @property
    def accept_length(self) -> float:
        return (self.accepted + self.steps) / self.steps


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    logs = tmp_path_factory.mktemp("logs")
    flags = {"ar": [], "chain": CHAIN, ONE_BRANCH: tree_flags(7, 1)}
    flags |= {row: tree_flags(*point) for row, point in TREES.items()}
    flags |= {draft: tree_flags(16, 4, draft) for draft in (*BAD_DRAFTS, LONG)}

    @cache
    def of(row: str) -> Run:
        return measure(flags[row], logs / f"{row.replace(':', '-')}.log", row in CHATTY)

    return of


def measure(flags: list[str], log: Path, chatty: bool = False) -> Run:
    with serve(flags, log) as server:
        # Autoregressive decoding is slow one by one, and a batch has to say the same; a few prompts check
        # that it does.
        alone = PROMPTS if flags else PROMPTS[:BATCH]
        single = [server.generate(prompt, TOKENS) for prompt in alone]
        batched = []
        for start in range(0, len(PROMPTS), BATCH):
            batched += server.generate(PROMPTS[start : start + BATCH], TOKENS)
        # All answers are here, so all lines have to be.
        lines = server.metrics()
        chats = [server.chat(text, 512) for text in CHATS if chatty]
    counts = [answer["meta_info"] for answer in single + batched]
    histogram = [0] * LONGEST
    for count in counts:
        for accepted, requests in enumerate(count.get("spec_correct_drafts_histogram") or []):
            histogram[accepted] += requests
    return Run(
        single=[answer["output_ids"] for answer in single],
        batched=[answer["output_ids"] for answer in batched],
        steps=sum(count.get("spec_verify_ct", 0) for count in counts),
        accepted=sum(count.get("spec_num_correct_drafts", 0) for count in counts),
        histogram=histogram,
        lines=lines,
        chats=chats,
    )


def test_prompts_are_worth_the_name(run: Any) -> None:
    assert len(PROMPTS) >= 12
    assert len({len(prompt) for prompt in PROMPTS}) == len(PROMPTS)
    assert all(len(output) == TOKENS for output in run("ar").batched)
    assert len({tuple(output) for output in run("ar").batched}) == len(PROMPTS)


@pytest.mark.parametrize("row", ["chain", *TREES])
def test_greedy_output_is_the_autoregressive_one(run: Any, row: str) -> None:
    expected = run("ar").batched
    assert run("ar").single == expected[:BATCH]
    assert run(row).single == expected
    assert run(row).batched == expected


def test_answers_end_by_themselves_and_in_the_same_words(run: Any) -> None:
    answers = run("ar").chats
    assert [answer["finish_reason"] for answer in answers] == ["stop"] * len(CHATS)
    texts = [answer["message"]["content"] for answer in answers]
    assert all(len(text) > 40 for text in texts)
    for row in CHATTY[1:]:
        assert [answer["message"]["content"] for answer in run(row).chats] == texts


@pytest.mark.parametrize("draft", BAD_DRAFTS)
def test_a_bad_draft_costs_time_and_no_truth(run: Any, draft: str) -> None:
    assert run(draft).single == run(draft).batched == run("ar").batched
    assert run(draft).accept_length < BAD_DRAFTS[draft]


def test_blocks_of_sixteen_go_deeper_than_eight(run: Any) -> None:
    assert run(LONG).single == run(LONG).batched == run("ar").batched
    assert sum(run(LONG).histogram[8:]) > 0


@pytest.mark.parametrize("row", ["chain", *TREES])
def test_journal_and_responses_agree(run: Any, row: str) -> None:
    result, (budget, topk) = run(row), TREES.get(row, (0, 0))
    # The server's own warm-up request is in the journal, too: its steps are in the lines before the first of
    # ours.
    lines, steps = list(result.lines), 0
    assert {(line.budget, line.topk) for line in lines} == {(budget, topk)}
    while sum(line.steps for line in lines) > result.steps:
        steps += lines.pop(0).steps
    assert steps <= 8, "more than the warm-up is left over"
    assert sum(line.steps for line in lines) == result.steps
    assert sum(line.tokens for line in lines) == result.accepted + result.steps
    totals = [sum(column) for column in zip(*(line.histogram for line in lines), strict=True)]
    assert totals == result.histogram[: len(totals)]
    for line in lines:
        assert line.average == f"{line.tokens / line.steps:.2f}"
        assert line.tokens == sum(count * (nodes + 1) for nodes, count in enumerate(line.histogram))


@pytest.mark.parametrize("ascending", [["8:4", "16:4"], ["16:8", "32:8", "48:8"]])
def test_accept_length_does_not_fall_with_the_budget(run: Any, ascending: list[str]) -> None:
    lengths = [run(row).accept_length for row in ascending]
    assert lengths == sorted(lengths)
    assert lengths[-1] > lengths[0]


@pytest.mark.parametrize("row", TREES)
def test_a_tree_beats_the_chain(run: Any, row: str) -> None:
    assert run(row).accept_length > run("chain").accept_length > 2


def test_a_tree_of_one_branch_accepts_what_the_chain_does(run: Any) -> None:
    """Step by step. A draft whose KV is not where it belongs proposes worse, and shows nowhere else."""
    assert run(ONE_BRANCH).single == run("chain").single
    assert run(ONE_BRANCH).histogram == run("chain").histogram


@pytest.mark.parametrize("plant", ["nomask", "nomove", "width"])
def test_a_planted_fault_is_noticed(run: Any, plant: str, tmp_path: Path) -> None:
    environment = {"SGLANG_DDTREE_PLANT": plant, "SGLANG_DDTREE_TEST": "1"}
    with serve(tree_flags(16, 4), tmp_path / "log", environment) as server:
        outputs = [answer["output_ids"] for answer in server.generate(PROMPTS[:BATCH], TOKENS)]
        assert f"PLANTED FAULT {plant}" in server.log.read_text()
    expected = run("ar").batched[:BATCH]
    wrong = sum(output != reference for output, reference in zip(outputs, expected, strict=True))
    assert wrong >= 2, f"{plant} changed {wrong} of {BATCH} outputs only"
