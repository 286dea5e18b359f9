"""The comparison of a CUDA graph's verify with one without. There is no GPU here: the graph is a stand-in."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang_ddtree import graph_check
from sglang_ddtree.graph_check import CHECK_ENV, GraphCheck, difference, hiding
from sglang_ddtree.tree import RootedTree, ancestor_mask, grow_tree

DIM, VOCABULARY, PREFIX = 16, 64, 5


class Target:
    """Attention over a prefix and the tree, in a graph or without; ``captured`` is the graph's mask."""

    def __init__(self, tree: RootedTree, captured: str, eager_fails: bool = False) -> None:
        generator = torch.Generator().manual_seed(1)
        self.tree, self.captured, self.eager_fails = tree, captured, eager_fails
        self.keys = torch.randn(PREFIX + tree.width, DIM, generator=generator)
        self.queries = torch.randn(tree.width, DIM, generator=generator)
        self.head = torch.randn(DIM, VOCABULARY, generator=generator)
        self.decode_cuda_graph_runner: object | None = object()
        self.attn_backend = SimpleNamespace(init_forward_metadata=lambda forward: self.runs.append("planned"))
        self.runs: list[str] = []
        self.buffer = torch.zeros(tree.width, VOCABULARY)
        self.strength = 1.0

    def forward_batch_generation(self, **_: Any) -> Any:
        replays = self.decode_cuda_graph_runner is not None
        self.runs.append("graph" if replays else "eager")
        if self.eager_fails and not replays:
            raise RuntimeError("out of memory")
        width = self.tree.width
        seen = ancestor_mask(self.tree.paths)[0]
        if replays and self.captured == "causal":
            seen = torch.ones(width, width, dtype=torch.bool).tril()
        if replays and self.captured == "one wrong":
            seen = seen.clone()
            seen[-1] = True
        mask = torch.cat([torch.ones(width, PREFIX, dtype=torch.bool), seen], 1)
        scores = (self.queries @ self.keys.T).masked_fill(~mask, -torch.inf) / DIM**0.5
        logits = scores.softmax(-1) @ self.keys @ self.head
        if replays:  # rounds as the graph's kernels may
            logits = logits.bfloat16().float()
        if replays and self.captured == "nan":
            logits = logits * float("nan")
        # One buffer for all runs, as graphs have.
        self.buffer.copy_(logits)
        return SimpleNamespace(
            logits_output=SimpleNamespace(next_token_logits=self.buffer), can_run_cuda_graph=replays
        )


def tree(ranks: int) -> RootedTree:
    generator = torch.Generator().manual_seed(2)
    return grow_tree(*torch.randn(1, 7, VOCABULARY, generator=generator).log_softmax(-1).topk(ranks), 12)


def verify(target: Target, check: GraphCheck) -> Any:
    result = target.forward_batch_generation()
    check.after(target, None, result, target.tree)
    return result


def test_the_same_is_served_and_looked_at_once() -> None:
    target = Target(tree(4), "tree")
    check = GraphCheck(target, {})
    graph = target.decode_cuda_graph_runner
    verify(target, check)
    verify(target, check)
    assert target.runs == ["graph", "planned", "eager", "graph"]
    assert target.decode_cuda_graph_runner is graph


@pytest.mark.parametrize("captured", ["causal", "nan"])
def test_a_graph_without_the_mask_is_not_served(captured: str) -> None:
    target = Target(tree(4), captured)
    with pytest.raises(RuntimeError, match=r"verify of 13 nodes in a CUDA graph .* --disable-cuda-graph"):
        verify(target, GraphCheck(target, {}))
    assert target.decode_cuda_graph_runner is not None


def test_a_chain_says_nothing_about_the_mask() -> None:
    target = Target(tree(1), "causal")
    check = GraphCheck(target, {})
    verify(target, check)
    assert target.runs == ["graph"]
    for _ in range(100):
        check.after(target, None, SimpleNamespace(can_run_cuda_graph=True), target.tree)
    assert check.looks == 0, "the host would wait for the device at every step"


def test_a_single_node_may_differ() -> None:
    """As where an expert was chosen differently."""
    target = Target(tree(4), "one wrong")
    verify(target, GraphCheck(target, {}))
    assert target.runs == ["graph", "planned", "eager"]


def test_the_least_that_is_refused_lies_between_rounding_and_the_fault() -> None:
    """By the demo pair: bfloat16 differs by 0.002, a causal verify by 0.1 or more."""
    assert 0.005 < graph_check._TOLERANCE < 0.08


@pytest.mark.parametrize("case", ["switched off", "eager"])
def test_not_compared(case: str) -> None:
    target = Target(tree(4), "causal")
    check = GraphCheck(target, {CHECK_ENV: "0"} if case == "switched off" else {})
    if case == "eager":
        target.decode_cuda_graph_runner = None
    verify(target, check)
    assert len(target.runs) == 1


def test_a_failure_of_the_comparison_ends_no_server(caplog: pytest.LogCaptureFixture) -> None:
    target = Target(tree(4), "tree", eager_fails=True)
    verify(target, GraphCheck(target, {}))
    assert "could not be run without its CUDA graph" in caplog.text
    assert target.decode_cuda_graph_runner is not None


def test_difference_by_hand() -> None:
    """(1, -1) and (2, 0) differ by a constant. From (1, -1) to (3, -3) it is twice the length of (1, -1)."""
    rows = torch.tensor([[1.0, -1.0], [1.0, -1.0], [3.0, -3.0]])
    reference = torch.tensor([[2.0, 0.0], [1.0, -1.0], [1.0, -1.0]])
    assert difference(rows, reference) == 0.0
    assert difference(rows[2:], reference[2:]) == pytest.approx(2.0)
    # 0, 2 and 4 times the length: the middle counts.
    three = torch.tensor([[1.0, -1.0], [3.0, -3.0], [5.0, -5.0]])
    assert difference(three, reference[[1, 1, 1]]) == pytest.approx(2.0)
    assert difference(rows[2:] * float("nan"), reference[2:]) != 0.0


def test_nodes_with_something_to_hide_from() -> None:
    """Root-1-2 is a chain. With 3 below the root and 4 below 3: 3 may see neither 1 nor 2, nor may 4."""
    paths = torch.tensor([[[0, 0], [1, 0], [1, 2], [3, 0], [3, 4]]])
    column = torch.zeros(1, 5, dtype=torch.int64)
    made = RootedTree(column, column, column, column, torch.zeros(1, 5), paths, 4)
    assert hiding(made).tolist() == [[False, False, False, True, True]]
    assert hiding(made.limited(torch.tensor([3]))).tolist() == [[False, False, False, True, False]]
