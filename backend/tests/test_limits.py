"""Budget and topk cap in force: what may be asked for, and what a refused request gets."""

from __future__ import annotations

import re
from typing import Any

import pytest
from sglang_ddtree.limits import Limits
from sglang_ddtree.options import Options


@pytest.fixture
def limits() -> Limits:
    return Limits(Options(48, 8))


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({}, None),
        ({"thinking_budget": "whatever"}, None),
        ({"ddtree_budget": 48, "ddtree_topk_cap": 1}, None),
        ({"ddtree_budget": 8.0, "ddtree_topk_cap": None}, None),
        ({"ddtree_budget": 49}, "ddtree_budget is 49, expected a whole number from 1 to 48"),
        ({"ddtree_budget": 0}, "is 0"),
        ({"ddtree_budget": 8.5}, "is 8.5"),
        ({"ddtree_budget": True}, "is True"),
        ({"ddtree_budget": float("nan")}, "is nan"),
        ({"ddtree_topk_cap": "8"}, "ddtree_topk_cap is '8', expected a whole number from 1 to 8"),
        ({"ddtree_topk_cap": [1]}, r"is \[1\]"),
        ({"ddtree_topk": 4}, "ddtree_topk is unknown, expected one of ddtree_budget, ddtree_topk_cap"),
    ],
)
def test_what_may_be_asked_for(limits: Limits, asked: dict[str, Any], words: str | None) -> None:
    refusal = limits.refusal(asked)
    if words is None:
        assert refusal is None
    else:
        assert refusal is not None
        assert re.search(words, refusal)


def test_a_request_gets_what_it_asks_for_and_else_the_servers(limits: Limits) -> None:
    limits.set("ddtree_budget", 16.0)
    limits.set("ddtree_topk_cap", 4)
    both = {"ddtree_budget": 2, "ddtree_topk_cap": 2}
    asked = [None, {}, {"ddtree_budget": 48}, {"ddtree_topk_cap": 1}, both]
    assert limits.of_requests(asked) == ([16, 16, 48, 16, 2], [4, 4, 4, 1, 2])


@pytest.mark.parametrize("odd", [[1], "x", 5, ["ddtree_budget"]])
def test_parameters_that_are_no_mapping_ask_for_nothing(limits: Limits, odd: Any) -> None:
    assert limits.of_requests([odd, None]) == ([48, 48], [8, 8])


@pytest.mark.parametrize("bad", [99, 0, -1, "8", [8], True, 8.5, float("inf"), {}])
def test_a_refused_request_runs_with_the_servers(limits: Limits, bad: Any) -> None:
    """SGLang answers it with a 400, but takes it through a step or two first."""
    assert limits.of_requests([{"ddtree_budget": bad, "ddtree_topk_cap": bad}]) == ([48], [8])
