"""The draft tree builder against the heap it replaces and against the paper's own identities."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from oracle import HeapTree, heap_trees
from sglang_ddtree import tree as tree_module
from sglang_ddtree.tree import (
    DraftTree,
    ancestor_mask,
    best_log_probs,
    build_tree,
    build_tree_from_topk,
    grow_tree,
    top_tokens,
    tree_size,
)


def random_log_probs(
    batch: int, depth: int, vocab: int, seed: int, levels: int | None = None
) -> torch.Tensor:
    """Normalised rows; with ``levels`` the logits take that many values only, so that ties abound."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(batch, depth, vocab, generator=generator) * 3
    if levels is not None:
        logits = torch.randint(levels, (batch, depth, vocab), generator=generator).float()
    return torch.log_softmax(logits, -1)


def row_of(tree: DraftTree, row: int) -> HeapTree:
    count = int(tree.count[row])
    return HeapTree(
        tree.tokens[row, :count].tolist(),
        tree.parents[row, :count].tolist(),
        tree.depths[row, :count].tolist(),
        tree.ranks[row, :count].tolist(),
        tree.log_probs[row, :count].tolist(),
    )


CASES = [
    # batch, depth, vocab, budget, cap, levels of the logits (None: no ties)
    *[
        (2, depth, vocab, budget, cap, levels)
        for depth, vocab, budget, cap, levels in itertools.product(
            (1, 3, 7), (8, 64), (1, 4, 16, 48), (1, 2, 8), (None, 2, 5)
        )
    ],
    (3, 15, 512, 256, 32, None),
    (3, 15, 512, 256, 32, 3),
    (1, 7, 2048, 256, 256, None),  # wide enough that levels are pruned
    (2, 7, 600, 300, 300, 4),
    (1, 7, 32000, 64, 16, None),
    (16, 7, 50, 17, 5, 2),
    (2, 3, 64, 48, 48, 1),  # all tokens equally likely: nothing but ties
]


@pytest.mark.parametrize(("batch", "depth", "vocab", "budget", "cap", "levels"), CASES)
def test_equals_heap(batch: int, depth: int, vocab: int, budget: int, cap: int, levels: int | None) -> None:
    log_probs = random_log_probs(batch, depth, vocab, seed=depth * 1000 + budget, levels=levels)
    tree = build_tree(log_probs, budget, cap)
    assert tree.tokens.shape == tree.log_probs.shape == (batch, budget)
    for row, expected in enumerate(heap_trees(log_probs, budget, cap)):
        assert row_of(tree, row) == expected
        assert int(tree.count[row]) == tree_size(depth, min(cap, budget, vocab), budget)


WAYS = ["host", "host by levels", "accelerator", "accelerator by levels"]


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What accelerators run, which may not look at results; small trees the way of large ones as well."""
    if request.param.startswith("accelerator"):
        monkeypatch.setattr(tree_module, "on_host", lambda values: False)
    if request.param.endswith("by levels"):
        monkeypatch.setattr(tree_module, "candidates", lambda *shape: None)
    return str(request.param)


@pytest.mark.parametrize(("batch", "depth", "vocab", "budget", "cap", "levels"), CASES[::5] + CASES[-7:])
@pytest.mark.parametrize("way", WAYS[1:], indirect=True)
def test_equals_heap_every_way(
    way: str, batch: int, depth: int, vocab: int, budget: int, cap: int, levels: int | None
) -> None:
    test_equals_heap(batch, depth, vocab, budget, cap, levels)


def test_equals_heap_on_ten_thousand_trees(way: str) -> None:
    """B 1-256, K 1-32, L 1-15, vocabularies 8-32,000, batches 1-16; in a third of them ties abound."""
    draw = random.Random(way)

    def between(low: int, high: int) -> int:
        """Small ones as often as large ones, the ends included."""
        return min(high, int(math.exp(draw.uniform(math.log(low), math.log(high + 1)))))

    extremes = itertools.product((1, 256), (1, 32), (1, 15), (8, 32_000), (1, 16))
    cases = 10_000 if way == "host" else 1_000
    shapes = itertools.islice(
        itertools.chain(
            extremes,
            (
                (between(1, 256), between(1, 32), draw.randint(1, 15), between(8, 32_000), between(1, 16))
                for _ in itertools.count()
            ),
        ),
        cases,
    )
    for seed, (budget, cap, depth, vocab, batch) in enumerate(shapes):
        levels = draw.choice((None, None, draw.randint(1, 6)))
        log_probs = random_log_probs(batch, depth, vocab, seed, levels)
        tree = build_tree(log_probs, budget, cap)
        for row, expected in enumerate(heap_trees(log_probs, budget, cap)):
            case = f"B={budget} K={cap} L={depth} vocab={vocab} batch={batch} levels={levels} {seed=} {row=}"
            assert row_of(tree, row) == expected, case
            assert int(tree.count[row]) == tree_size(depth, min(cap, budget, vocab), budget), case


def test_by_hand() -> None:
    """P = (.6, .3, .1) and (.7, .2, .1): nodes of .6 .42 .3 .21 .12 .1 .07 .06 .06 .03 .02 .01."""
    log_probs = torch.tensor([[[0.6, 0.3, 0.1], [0.7, 0.2, 0.1]]]).log()
    tree = build_tree(log_probs, 6, 3)
    assert tree.tokens.tolist() == [[0, 0, 1, 0, 1, 2]]
    assert tree.parents.tolist() == [[0, 1, 0, 3, 1, 0]]
    assert tree.depths.tolist() == [[1, 2, 1, 2, 2, 1]]
    assert tree.ranks.tolist() == [[0, 0, 1, 0, 1, 2]]
    assert tree.log_probs[0].exp().tolist() == pytest.approx([0.6, 0.42, 0.3, 0.21, 0.12, 0.1], rel=1e-5)
    assert tree.count.tolist() == [6]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("budget", [8, 300])
def test_a_row_that_is_no_distribution_drafts_nothing(way: str, bad: float, budget: int) -> None:
    """An overflow in the draft costs accept length; the neighbours' trees and the server stay."""
    logits = random_log_probs(2, 3, 32, seed=9)
    expected = build_tree_from_topk(*best_log_probs(logits[:1], 8), budget)
    logits[1, 1, 5] = bad
    tree = build_tree_from_topk(*best_log_probs(logits, 8), budget)
    for name in ("tokens", "parents", "depths", "ranks", "log_probs"):
        assert torch.equal(getattr(tree, name)[:1], getattr(expected, name)), name
    deep = (tree.depths[1] > 1) & (tree.ranks[1] >= 0)
    assert tree.log_probs[1][deep].eq(-math.inf).all()
    assert tree.log_probs[1][(tree.depths[1] == 1) & (tree.ranks[1] >= 0)].isfinite().all()


def test_padding() -> None:
    tree = build_tree(random_log_probs(2, 2, 8, seed=1), 10, 2)
    assert tree.count.tolist() == [6, 6]  # 2 + 4
    assert tree.ranks[:, 6:].eq(-1).all()
    assert tree.log_probs[:, 6:].eq(-math.inf).all()
    assert tree.parents[:, 6:].eq(0).all()


@pytest.mark.parametrize("levels", [None, 3])
def test_budgets_nest(levels: int | None) -> None:
    log_probs = random_log_probs(4, 7, 128, seed=5, levels=levels)
    large = build_tree(log_probs, 64, 4)
    for budget in (4, 5, 8, 16, 33, 63):
        small = build_tree(log_probs, budget, 4)
        for name in ("tokens", "parents", "depths", "ranks", "log_probs"):
            assert torch.equal(getattr(small, name), getattr(large, name)[:, :budget]), name


@pytest.mark.parametrize("levels", [None, 3])
def test_cap_only_removes_ranks(levels: int | None) -> None:
    """The nodes of a capped tree are, in order, those of the uncapped one without ranks beyond the cap."""
    log_probs = random_log_probs(1, 4, 32, seed=6, levels=levels)
    paths = {}
    for cap in (3, 32):
        tree = row_of(build_tree(log_probs, 200, cap), 0)
        spelled: list[tuple[int, ...]] = [()]
        for rank, parent in zip(tree.ranks, tree.parents, strict=True):
            spelled.append((*spelled[parent], rank))
        paths[cap] = spelled[1:]
    survivors = [path for path in paths[32] if max(path) < 3]
    assert paths[3][: len(survivors)] == survivors


def test_expected_length_is_sum_of_path_probabilities() -> None:
    """Proposition 1 of the paper, against the expectation taken over every outcome."""
    depth, vocab = 3, 4
    log_probs = random_log_probs(1, depth, vocab, seed=7).double()
    tree = row_of(build_tree(log_probs.float(), 9, 4), 0)
    nodes: dict[tuple[int, ...], int] = {(): 0}
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        paths.append((*paths[parent], token))
        nodes[paths[-1]] = len(paths) - 1
    expected = 0.0
    for outcome in itertools.product(range(vocab), repeat=depth):
        probability = math.exp(sum(float(log_probs[0, i, token]) for i, token in enumerate(outcome)))
        accepted = 0
        while accepted < depth and outcome[: accepted + 1] in nodes:
            accepted += 1
        expected += probability * accepted
    assert sum(math.exp(score) for score in tree.scores) == pytest.approx(expected, rel=1e-5)


def test_top_tokens_breaks_ties_by_index_whatever_k() -> None:
    scores = torch.tensor([0.0, -0.0, 1.0, 1.0, -2.5, -0.0, float("-inf"), -2.5])
    values, tokens = top_tokens(scores, 8)
    assert tokens.tolist() == [2, 3, 0, 1, 5, 4, 7, 6]
    assert torch.equal(values, scores[tokens])
    for k in range(1, 8):
        assert top_tokens(scores, k)[1].tolist() == tokens.tolist()[:k]


def test_paths_and_ancestor_mask(way: str) -> None:
    """As small trees bring their paths, and worked out from the parents."""
    tree = grow_tree(*random_log_probs(3, 7, 32, seed=8).topk(3), 40)
    assert tree.paths.shape == (3, 41, 7)
    mask = ancestor_mask(tree.paths)
    for row, parents in enumerate(tree.parents.tolist()):
        for node in range(41):
            path = [node] if node else []
            while path and parents[path[0]]:
                path.insert(0, parents[path[0]])
            assert tree.paths[row, node].tolist() == path + [0] * (7 - len(path))
            assert set(mask[row, node].nonzero().flatten().tolist()) == {0, *path}


@pytest.mark.parametrize(
    ("shape", "budget", "cap", "message"),
    [
        ((3, 5), 4, 2, r"\(3, 5\)"),
        ((1, 0, 5), 4, 2, r"\(1, 0, 5\)"),
        ((1, 2, 5), 0, 2, "budget is 0"),
        ((1, 2, 5), 4, 0, "topk_cap is 0"),
    ],
)
def test_bad_arguments(shape: tuple[int, ...], budget: int, cap: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_tree(torch.zeros(shape), budget, cap)
