"""The detector of text that goes round in circles."""

from __future__ import annotations

import random

import pytest

from models.periodic import is_periodic


@pytest.mark.parametrize("period", [1, 2, 7, 8, 20])
def test_a_loop_at_the_end_is_found(period: int) -> None:
    loop = list(range(100, 100 + period))
    assert is_periodic([1, 2, 3, *loop * max(3, -(-24 // period))])


def test_two_rounds_are_not_enough() -> None:
    assert not is_periodic([*range(50), *range(100, 120), *range(100, 120)])


def test_a_loop_that_was_left_again_does_not_count() -> None:
    assert not is_periodic([5, 6] * 40 + [7])


def test_a_short_run_does_not_count() -> None:
    assert not is_periodic([*range(40), *[9] * 23])
    assert is_periodic([*range(40), *[9] * 24])


def test_a_cut_round_at_the_end_still_counts() -> None:
    loop = list(range(10))
    assert is_periodic([99, *loop, *loop, *loop, *loop[:4]])


def test_numbered_sections_move_on() -> None:
    text = [token for number in range(20) for token in (1, 2, 1000 + number, 3, 4, 5)]
    assert not is_periodic(text)


@pytest.mark.parametrize("tokens", [[], [1], [1, 1, 1]])
def test_too_little_text_is_not_periodic(tokens: list[int]) -> None:
    assert not is_periodic(tokens)


def test_random_text_is_not_periodic() -> None:
    rng = random.Random(3)
    assert not is_periodic([rng.randrange(2048) for _ in range(256)])
