"""Acceptance and the verify mask against a walk written out by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from sglang_ddtree import accept as accept_module
from sglang_ddtree.accept import _scattered_mask, accept, verify_mask
from sglang_ddtree.tree import RootedTree, grow_tree


@pytest.fixture(params=["host", "accelerator"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """On a CPU, and as accelerators do, which may not look at results."""
    if request.param == "accelerator":
        monkeypatch.setattr(accept_module, "on_host", lambda values: False)
    return str(request.param)


def walk(tokens: list[int], parents: list[int], answers: list[int], count: int) -> list[int]:
    """The committed path as an implementation with pointers would find it."""
    path = [0]
    while True:
        children = {tokens[i]: i for i in range(1, count + 1) if parents[i] == path[-1]}
        if answers[path[-1]] not in children:
            return path
        path.append(children[answers[path[-1]]])


@pytest.mark.parametrize(("budget", "cap", "vocab"), [(4, 4, 3), (16, 3, 4), (40, 2, 8), (100, 2, 4)])
def test_equals_walk(way: str, budget: int, cap: int, vocab: int) -> None:
    torch.manual_seed(budget)
    batch, depth = 64, 5
    log_probs = torch.log_softmax(torch.randn(batch, depth, vocab), -1)
    tree = grow_tree(*log_probs.topk(min(cap, vocab)), budget)
    # Answers that often follow the tree: the token of a random child, sometimes noise.
    answers = torch.randint(vocab, (batch, budget + 1))
    width = min(budget, depth) + 1
    result = accept(tree, answers, width)
    lengths = set()
    longest = width if way == "accelerator" else int(result.lengths.max())
    assert result.nodes.shape == result.tokens.shape == (batch, longest)
    for row in range(batch):
        columns = (tree.tokens[row], tree.parents[row], answers[row])
        path = walk(*(column.tolist() for column in columns), tree.count)
        committed = [int(answers[row, node]) for node in path]
        assert int(result.lengths[row]) == len(path)
        assert result.nodes[row, : len(path)].tolist() == path
        assert result.nodes[row, len(path) :].tolist() == list(range(len(path), longest))
        assert result.tokens[row, : len(path)].tolist() == committed
        assert int(result.bonus[row]) == committed[-1]
        lengths.add(len(path))
    assert len(lengths) > 2, "the case must show several path lengths to prove anything"


def test_padding_never_matches(way: str) -> None:
    """A padded node carries token 0 and parent 0; a target that answers 0 at the root must not accept it."""
    tree = RootedTree(
        tokens=torch.tensor([[9, 5, 0]]),
        parents=torch.zeros(1, 3, dtype=torch.int64),
        depths=torch.tensor([[0, 1, 0]]),
        ranks=torch.tensor([[0, 0, -1]]),
        scores=torch.tensor([[0.0, -0.5, -torch.inf]], dtype=torch.float64),
        paths=torch.tensor([[[0], [1], [0]]]),
        count=1,
    )
    result = accept(tree, torch.zeros(1, 3, dtype=torch.int64), 2)
    assert result.lengths.tolist() == [1]
    assert result.bonus.tolist() == [0]


@pytest.mark.parametrize(("make", "sum_of_prefixes"), [(verify_mask, 2), (_scattered_mask, 4)])
def test_verify_mask_by_hand(make: Callable[..., torch.Tensor], sum_of_prefixes: int) -> None:
    """Two requests with prefixes 2 and 0, trees root-1-2 and root-1, root-2."""
    paths = torch.tensor([[[0, 0], [1, 0], [1, 2]], [[0, 0], [1, 0], [2, 0]]])
    mask = make(paths, torch.tensor([2, 0]), 4)
    assert mask.numel() == 3 * (sum_of_prefixes + 6)
    first = mask[:15].view(3, 5).int().tolist()
    assert first == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert mask[15:24].view(3, 3).int().tolist() == [[1, 0, 0], [1, 1, 0], [1, 0, 1]]
