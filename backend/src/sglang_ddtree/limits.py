"""The budget and topk cap in force: of the whole server, and of single requests.

A server starts with the largest it can do, because its KV reservation and its graphs are sized by it. Below
that both can be lowered and raised again while it runs: for all requests through SGLang's own
``/set_internal_state`` (``{"server_args": {"ddtree_budget": 8, "ddtree_topk_cap": 4}}``), for one request
through its ``custom_params`` (``{"ddtree_budget": 8}``). Within the budget in force the server can choose
each step's own (``{"server_args": {"ddtree_adaptive": 1}}``). Greedy output does not depend on any of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from sglang_ddtree.adaptive import AdaptiveBudget
from sglang_ddtree.options import Options, from_environment

BUDGET_KEY = "ddtree_budget"
TOPK_CAP_KEY = "ddtree_topk_cap"
KEYS = (BUDGET_KEY, TOPK_CAP_KEY)
#: Of the whole server only.
ADAPTIVE_KEY = "ddtree_adaptive"


class Limits:
    """What is in force in this process; every rank of a server is told the same."""

    def __init__(self, most: Options) -> None:
        """Start with everything the server was started for."""
        self.most = most
        self.budget = most.budget
        self.topk_cap = most.topk_cap
        self.adaptive = most.adaptive
        #: Why this server can't be adaptive, None when it can; the worker knows.
        self.adaptive_refusal: str | None = None
        self.chooser = AdaptiveBudget(most.budget)

    def refusal(self, values: Mapping[str, Any]) -> str | None:
        """Why ``values`` (by the keys of this module, others are not looked at) can't be taken, or None."""
        for key, most in self._ceilings():
            if values.get(key) is not None and _whole(values[key], most) is None:
                return (
                    f"{key} is {values[key]!r}, expected a whole number from 1 to {most}, what the server "
                    "was started for"
                )
        unknown = [key for key in values if key.startswith("ddtree_") and key not in KEYS]
        if unknown:
            return f"{unknown[0]} is unknown, expected one of {', '.join(KEYS)}"
        return None

    def switch_refusal(self, key: str, value: Any) -> str | None:
        """Why the whole server can't be switched to a value, or None."""
        if key != ADAPTIVE_KEY:
            return self.refusal({key: value})
        if value not in (0, 1) or isinstance(value, bool):
            return f"{key} is {value!r}, expected 0 (off) or 1 (on)"
        return self.adaptive_refusal if value else None

    def set(self, key: str, value: float) -> None:
        """Put a value in force that :meth:`switch_refusal` has nothing against."""
        if key == BUDGET_KEY:
            self.budget = int(value)
        elif key == TOPK_CAP_KEY:
            self.topk_cap = int(value)
        else:
            self.adaptive = bool(value)

    def of_requests(self, parameters: Iterable[Any]) -> tuple[list[int], list[int]]:
        """Budget and topk cap of each request from its ``custom_params``; most ask for nothing.

        They get the server's, and so does one that asks for what it can't have (a refused request still goes
        through a step or two), or whose parameters are no mapping, which SGLang lets pass.
        """
        budgets, caps = [], []
        for asked in parameters:
            budget = cap = None
            if isinstance(asked, Mapping):
                budget = _whole(asked.get(BUDGET_KEY), self.most.budget)
                cap = _whole(asked.get(TOPK_CAP_KEY), self.most.topk_cap)
            budgets.append(budget or self.budget)
            caps.append(cap or self.topk_cap)
        return budgets, caps

    def _ceilings(self) -> tuple[tuple[str, int], ...]:
        return (BUDGET_KEY, self.most.budget), (TOPK_CAP_KEY, self.most.topk_cap)


def _whole(value: Any, most: int) -> int | None:
    """``value`` as a whole number from 1 to ``most``, None when it is something else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 1 <= value <= most:
        return None
    return int(value) if value == int(value) else None


_current: Limits | None = None


def current() -> Limits:
    """The limits of this process, made from its options when first asked for."""
    global _current
    if _current is None:
        _current = Limits(from_environment())
    return _current
