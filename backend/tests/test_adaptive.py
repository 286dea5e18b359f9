"""The adaptive budget: what it learns against numbers known beforehand, and what it gains in a simulation."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sglang_ddtree import record
from sglang_ddtree.adaptive import AdaptiveBudget, Array
from sglang_ddtree.limits import Limits
from sglang_ddtree.options import Options
from sglang_ddtree.tree import build_tree_from_topk
from sglang_ddtree.worker import DDTreeWorker

#: Seconds of a step without nodes, and of a node.
BASE, NODE = 0.010, 0.0005
#: Of the lessons; the next one is none of those that try another width.
STEPS = 158


def seconds(width: int, batch: int = 1) -> float:
    return BASE + NODE * width * batch


def choice(chooser: AdaptiveBudget, log_probs: Array, now: float) -> int:
    """Of a step that starts now, from its whole tree."""
    most = chooser.start(len(log_probs), now)
    return chooser.choose(log_probs[:, :most])


def taught(most: int = 16, batch: int = 1, tokens: int = 2) -> AdaptiveBudget:
    """Knows the times, commits ``tokens`` a step and request, and has no reason to doubt the draft."""
    chooser = AdaptiveBudget(most)
    now = 0.0
    for step in range(1, STEPS):
        budget = choice(chooser, np.zeros((batch, most)), now)
        chooser.took(budget + 1, batch, seconds(budget + 1, batch))
        no_nodes = np.full((batch, 1), -np.inf)
        chooser.learn(no_nodes, np.zeros((batch, 9), int), np.full(batch, tokens))
        # Steps follow each other at 20 ms, so that the rate is known: tokens / 20 ms.
        now = step * 0.020
    return chooser


@pytest.mark.parametrize(
    ("batch", "tokens", "nodes"),
    [
        # One request, 2 tokens in 20 ms: 0.5 ms cost 0.05 tokens. 0.75 0.375 0.188 0.094 | 0.047; of 3 and 5,
        # the budgets there are, 5 loses less
        (1, 2, 5),
        # Half the rate, 0.025 tokens: 0.75 0.375 0.188 0.094 0.047 | 0.023
        (1, 1, 5),
        # Two requests alike: a node of each costs 1 ms at 4 tokens in 20 ms, 0.2. 1.5 0.75 0.375 | 0.188
        (2, 2, 3),
    ],
)
def test_grows_while_a_node_pays(batch: int, tokens: int, nodes: int) -> None:
    chooser = taught(batch=batch, tokens=tokens)
    log_probs = np.log(np.tile(0.75 * 0.5 ** np.arange(16), (batch, 1)))
    assert choice(chooser, log_probs, STEPS * 0.020) == nodes


def test_nodes_that_cost_nothing_are_all_taken() -> None:
    chooser = AdaptiveBudget(16)
    budgets = set()
    for step in range(40):
        budget = choice(chooser, np.full((1, 16), -2.3), step * 0.01)
        chooser.took(budget + 1, 1, 0.008)
        chooser.learn(np.full((1, budget), -2.3), np.zeros((1, 9), int), np.array([1]))
        budgets.add((step, budget))
    assert {budget for step, budget in budgets if step >= 20 and (step + 1) % 32} == {16}


def test_the_draft_is_believed_as_far_as_it_was_right() -> None:
    """Of nodes said to be accepted one time in two every fourth is, of those said to be sure all are."""
    chooser = AdaptiveBudget(2)
    log_probs = np.log(np.array([[0.999, 0.5]]))
    for step in range(4000):
        hit = step % 4 == 0
        path = np.array([[0, 1, 2 if hit else 0]])
        choice(chooser, log_probs, 0.01 * step)
        chooser.learn(log_probs, path, np.array([3 if hit else 2]))
    assert chooser.probabilities(log_probs)[0] == pytest.approx([0.999, 0.25], abs=0.01)


def test_a_disturbed_step_changes_little() -> None:
    chooser, other = taught(), taught()
    chooser.took(5, 1, 30.0)
    log_probs = np.log(np.full((1, 16), 0.5) ** np.arange(1, 17))
    budgets = [choice(one, log_probs, STEPS * 0.020) for one in (chooser, other)]
    assert budgets in ([3, 3], [5, 3])  # the same or its neighbour: there is no 4


@pytest.mark.parametrize("slow", [1, 4])
def test_a_slow_start_is_forgotten_at_once(slow: int) -> None:
    """The first step of each width takes a second, as where kernels are compiled."""
    chooser, seen, now = AdaptiveBudget(64), set(), 0.0
    likely = np.log(0.75 * 0.7 ** np.arange(64))[None]
    budgets = []
    for _ in range(60):
        budgets.append(choice(chooser, likely, now))
        took = 1.0 if budgets[-1] not in seen and len(seen) < slow else seconds(budgets[-1] + 1)
        seen.add(budgets[-1])
        chooser.took(budgets[-1] + 1, 1, took)
        chooser.learn(likely[:, : budgets[-1]], np.arange(9)[None], np.array([3]))
        now += took
    # 3 tokens in 10 ms and a node's 0.5 ms each: 0.11 tokens at 7 nodes. 0.75 * 0.7^5 = 0.13, ^6 = 0.09; and
    # nodes after the second are never accepted, which is learned.
    assert set(budgets[14:30]) <= {3, 5, 7}


def test_steps_of_others_teach_nothing() -> None:
    """As in a probe, where every node is left out."""
    chooser = taught()
    before = chooser.probabilities(np.log(np.full((1, 4), 0.5))).tolist()
    for _ in range(50):
        chooser.learn(np.log(np.full((1, 4), 0.5)), np.arange(9)[None], np.array([1]))
    assert chooser.probabilities(np.log(np.full((1, 4), 0.5))).tolist() == before


def test_goes_on_trying_other_widths() -> None:
    chooser = taught()
    found = [
        choice(chooser, np.log(np.full((1, 16), 1e-9)), 0.020 * step) for step in range(STEPS, STEPS + 160)
    ]
    assert max(found) == 16
    # Mostly it does what pays, and no node does.
    assert sorted(found)[len(found) * 9 // 10] == 1


@pytest.mark.parametrize(("likely", "budget"), [(0.06, 3), (0.15, 5)])
def test_stays_where_another_budget_is_worth_little_more(likely: float, budget: int) -> None:
    """At a price of 0.05 a step from three nodes to five is worth 2 * 0.01 tokens, or 2 * 0.1."""
    chooser = taught()
    nodes = np.full((1, 16), 1e-9)
    nodes[0, :3] = 0.5
    assert choice(chooser, np.log(nodes), STEPS * 0.020) == 3
    nodes[0, 3:5] = likely
    assert choice(chooser, np.log(nodes), (STEPS + 1) * 0.020) == budget


def test_learns_that_rows_come_by_sixteen() -> None:
    """Fifteen nodes take as long as three, which no line says: they are taken, and those beyond are not.

    16 ms for up to sixteen rows, 6 ms for each sixteen more, 2 tokens a step: sixteen rows more must be worth
    0.6 tokens. A line asks that much for as many nodes anywhere.
    """
    chooser, now = AdaptiveBudget(64), 0.0
    widths = np.random.default_rng(1).choice([4, 8, 12, 16, 24, 32, 48], 400)
    nodes = np.full((1, 64), 0.03)
    nodes[0, :3] = 0.6
    for rows in map(int, widths):
        choice(chooser, np.log(nodes), now)
        took = 0.010 + 0.006 * -(-rows // 16)
        chooser.took(rows, 1, took)
        chooser.learn(np.full((1, 1), -np.inf), np.zeros((1, 9), int), np.array([2]))
        now += 0.020
    times = chooser._of(1)
    assert times.predict_all([4, 16, 24, 48]) == pytest.approx([0.016, 0.016, 0.022, 0.028], rel=0.04)
    times.recent = 15
    found = {choice(chooser, np.log(nodes), now + 0.020 * step) for step in range(10)}
    assert found == {15}


def test_an_unused_node_is_never_worth_it() -> None:
    """A request may have asked for a smaller budget: its other nodes have no probability."""
    log_probs = np.full((1, 16), -np.inf)
    log_probs[0, :3] = np.log(0.9)
    assert choice(taught(), log_probs, STEPS * 0.020) == 3


def test_gains_on_every_fixed_budget() -> None:
    """Steps whose drafts differ in confidence: each tree its own size is worth more than any one size."""
    most, steps = 32, 6000
    draw = np.random.default_rng(1)
    # Path probabilities that fall fast or slowly; they add up to at most 7, as those of a tree do.
    trees = np.log(0.9) + np.outer(draw.choice([0.03, 0.3, 1.5], steps), -np.arange(most, dtype=float))
    lengths = {budget: np.exp(trees[:, :budget]).sum(1) + 1 for budget in range(1, most + 1)}
    fixed = max(lengths[budget].sum() / (steps * seconds(budget + 1)) for budget in lengths)

    chooser, now, tokens = AdaptiveBudget(most), 0.0, 0.0
    for step in range(steps):
        row = trees[step : step + 1]
        budget = choice(chooser, row, now)
        took = seconds(budget + 1)
        chooser.took(budget + 1, 1, took * draw.normal(1, 0.05))
        # As many accepted as expected, in the long run.
        count = int(lengths[budget][step] + draw.random())
        chooser.learn(row[:, :budget], np.arange(most + 1)[None], np.array([count]))
        now += took
        tokens += lengths[budget][step]
    assert tokens / now > 1.02 * fixed


@pytest.mark.parametrize(("adaptive", "width"), [(True, 4), (False, 9)])
def test_the_verify_is_as_narrow_as_chosen(adaptive: bool, width: int) -> None:
    """The worker cuts the trees to the budget that was chosen, here always 3 of 8, and nothing else does."""
    limits = Limits(Options(8, 4, adaptive=adaptive))
    limits.chooser = SimpleNamespace(start=lambda batch, now: 8, choose=lambda log_probs: 3)  # type: ignore[assignment]
    recorder = SimpleNamespace(budget=lambda: None, mode=record.OFF)
    worker = SimpleNamespace(
        _limits=limits, _recorder=recorder, _one_width=False, options=limits.most, device="cpu", _block=8
    )
    batch = SimpleNamespace(reqs=[SimpleNamespace(sampling_params=SimpleNamespace(custom_params=None))] * 2)
    log_probs, tokens = torch.log_softmax(torch.randn(2, 7, 16), -1).topk(4)
    nodes = DDTreeWorker._grow(worker, batch, log_probs, tokens, torch.tensor([5, 6]))
    whole = build_tree_from_topk(log_probs, tokens, 8)
    assert nodes.width == width
    assert nodes.tokens[:, 1:].tolist() == whole.tokens[:, : width - 1].tolist()
    assert nodes.scores.shape == nodes.depths.shape == nodes.paths.shape[:2] == (2, width)


def test_refused_where_widths_can_not_change() -> None:
    limits = Limits(Options(8, 4, adaptive=True))
    with pytest.raises(ValueError, match=r"adaptive: with CUDA graphs .* --disable-cuda-graph"):
        DDTreeWorker._refuse_adaptive(SimpleNamespace(_one_width=True, _limits=limits))
    limits.adaptive = False
    DDTreeWorker._refuse_adaptive(SimpleNamespace(_one_width=True, _limits=limits))
    assert "--disable-cuda-graph" in str(limits.switch_refusal("ddtree_adaptive", 1))
    assert limits.switch_refusal("ddtree_adaptive", 0) is None
    for bad in (2, 0.5, True, "1", None):
        assert "expected 0 (off) or 1 (on)" in str(limits.switch_refusal("ddtree_adaptive", bad))
