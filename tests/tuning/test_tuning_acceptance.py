"""One definition of the accept length, by hand and against the tempting wrong ones."""

from __future__ import annotations

from typing import Any

import pytest

from tests.tuning.facts import record
from tests.tuning.standin import metrics_line
from tuning import acceptance, journal
from tuning.acceptance import AcceptanceError
from tuning.journal import DdtreeLine, DecodeLine, Entry
from tuning.loadgen import _verify_counts
from tuning.models import RequestRecord

# A real answer of SGLang 0.5.23 (chain, 40 tokens asked for): 1 token by prefill + 41 committed - 2 cut = 40.
REAL = {
    "completion_tokens": 40,
    "spec_accept_length": 3.3333333333333335,
    "spec_num_correct_drafts": 29,
    "spec_num_proposed_drafts": 84,
    "spec_verify_ct": 12,
    "spec_correct_drafts_histogram": [4, 2, 1, 1, 2, 0, 0, 2],
}


def speculated(steps: int, committed: int, histogram: list[int] | None = None, **more: Any) -> RequestRecord:
    return record(verify_steps=steps, committed_tokens=committed, histogram=histogram or [], **more)


def lines(*commits: list[int]) -> list[DdtreeLine]:
    return journal.parse_metrics(Entry("", 0, 0, metrics_line(one), "") for one in commits)


def test_a_real_answer() -> None:
    steps, committed, histogram = _verify_counts(REAL)
    made = acceptance.from_responses(
        [record(completion_tokens=40, verify_steps=steps, committed_tokens=committed, histogram=histogram)]
    )
    assert (made.tokens, made.steps, made.histogram) == (41, 12, REAL["spec_correct_drafts_histogram"])
    assert made.tau == pytest.approx(41 / 12)
    assert made.tau != pytest.approx(REAL["spec_accept_length"], rel=0.01)  # another definition, 2.4 % off


def test_sum_over_sum_not_mean_of_means() -> None:
    # 8 tokens a step over 1 step, 1 token a step over 99: 107/100, while the mean of the two is 4.5
    made = acceptance.from_responses([speculated(1, 8), speculated(99, 99)])
    assert made.tau == pytest.approx(1.07)
    by_journal = acceptance.from_journal(lines([8], [1] * 99), [], 40)
    assert by_journal is not None
    assert by_journal.tau == pytest.approx(1.07)
    assert acceptance.agreement(made, by_journal) == 0.0


def test_journal_lines_add_up_with_their_histogram() -> None:
    made = acceptance.from_journal(lines([1, 2, 2], [8]), [], 40)
    assert made is not None
    assert (made.tokens, made.steps) == (13, 4)
    assert made.histogram == [1, 2, 0, 0, 0, 0, 0, 1]
    assert made.source == "journal-metrics"


def test_histograms_of_different_lengths_add_up() -> None:
    made = acceptance.from_responses([speculated(2, 3, [1, 1]), speculated(1, 4, [0, 0, 0, 1])])
    assert made.histogram == [1, 1, 0, 1]


def test_failed_requests_do_not_count() -> None:
    made = acceptance.from_responses([speculated(10, 20), speculated(10, 80, ok=False)])
    assert (made.tokens, made.steps) == (20, 10)


def test_without_speculation_each_decode_step_is_one_token() -> None:
    made = acceptance.from_responses([record(completion_tokens=128), record(completion_tokens=1)])
    assert (made.tokens, made.steps, made.tau) == (127, 127, 1.0)


def test_an_answer_of_the_prefill_alone_has_no_step() -> None:
    made = acceptance.from_responses([speculated(10, 20), record(completion_tokens=1)])
    assert (made.tokens, made.steps) == (20, 10)


def test_some_speculated_and_some_not_is_a_contradiction() -> None:
    with pytest.raises(AcceptanceError, match="without a verify step"):
        acceptance.from_responses([speculated(10, 20), record(completion_tokens=5)])


@pytest.mark.parametrize("histogram", [[4, 2, 1, 1, 2, 0, 0, 1], [5, 1, 1, 1, 2, 0, 0, 2]])
def test_histogram_that_contradicts_the_counts(histogram: list[int]) -> None:
    with pytest.raises(AcceptanceError, match="histogram holds"):
        acceptance.from_responses([speculated(12, 41, histogram)])


def test_counts_from_the_histogram_alone() -> None:
    assert _verify_counts({"spec_correct_drafts_histogram": [3, 2]}) == (5, 7, [3, 2])
    assert _verify_counts({"spec_correct_drafts_histogram": []}) == (None, None, [])
    assert _verify_counts({}) == (None, None, [])


def decode(accept_len: float | None, running: int = 1) -> DecodeLine:
    return DecodeLine(0, "", None, running, 0, accept_len, 1.0, False)


def test_decode_lines_are_weighted_by_their_batch() -> None:
    made = acceptance.from_journal([], [decode(4.0, running=1), decode(2.0, running=3)], 40)
    assert made is not None
    assert (made.steps, made.tokens, made.source) == (160, 400, "journal-decode")


def test_decode_lines_of_single_steps_are_exact() -> None:
    # 7 tokens over 3 requests print as 2.33; a thousand such lines are still 7,000 tokens
    made = acceptance.from_journal([], [decode(2.33, running=3)] * 1000, 1)
    assert made is not None
    assert (made.tokens, made.steps) == (7000, 3000)


def test_decode_lines_without_speculation() -> None:
    made = acceptance.from_journal([], [decode(None)] * 3, 40)
    assert made is not None
    assert (made.tau, made.steps) == (1.0, 120)


def test_metrics_lines_win_over_decode_lines() -> None:
    made = acceptance.from_journal(lines([3]), [decode(1.0)], 40)
    assert made is not None
    assert made.tau == 3.0


def test_an_empty_window_has_no_accept_length() -> None:
    assert acceptance.from_journal([], [], 40) is None
    assert acceptance.from_responses([]).tau is None


def test_agreement_is_relative_to_the_responses() -> None:
    four = acceptance.from_responses([speculated(10, 40)])
    five = acceptance.from_responses([speculated(10, 50)])
    assert acceptance.agreement(four, five) == pytest.approx(0.25)
    assert acceptance.agreement(five, four) == pytest.approx(0.20)
    assert acceptance.agreement(four, acceptance.from_responses([])) is None


def test_categories_keep_their_own_sums() -> None:
    made = acceptance.by_category(
        [
            speculated(10, 40, category="code"),
            speculated(10, 20, category="prose"),
            speculated(30, 30, category="code"),
        ]
    )
    assert {name: one.tau for name, one in made.items()} == {"code": 1.75, "prose": 2.0}
