"""The draft tree of the paper, one node at a time with a heap: what the builder must equal."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from torch import Tensor


@dataclass
class HeapTree:
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)


def best_tokens(log_probs: Tensor, ranks: int) -> list[list[list[tuple[int, float]]]]:
    """Per row and depth of ``[batch, depth, vocab]`` the best tokens, equal ones by token id."""
    limit = log_probs.topk(ranks, dim=-1).values[..., -1:]
    rows = [[[] for _ in range(log_probs.shape[1])] for _ in range(log_probs.shape[0])]
    equal = log_probs == limit
    places = ((log_probs > limit) | (equal & (equal.cumsum(-1) <= ranks))).nonzero()
    for (row, depth, token), value in zip(places.tolist(), log_probs[tuple(places.T)].tolist(), strict=True):
        rows[row][depth].append((token, value))
    return [[sorted(found, key=lambda x: (-x[1], x[0]))[:ranks] for found in row] for row in rows]


def heap_trees(log_probs: Tensor, budget: int, topk_cap: int) -> list[HeapTree]:
    """Best-first trees over ``[batch, depth, vocab]`` log-probabilities.

    Equal scores pop by depth, then by rank path; equal tokens rank by token id.
    """
    ranks = min(topk_cap, budget, log_probs.shape[-1])
    return [_heap_tree(best, budget) for best in best_tokens(log_probs, ranks)]


def _heap_tree(best: list[list[tuple[int, float]]], budget: int) -> HeapTree:
    tree = HeapTree()
    # (-score, depth, rank path, parent, score of the parent)
    heap = [(-best[0][0][1], 1, (0,), 0, 0.0)]
    while heap and len(tree.tokens) < budget:
        negative, depth, path, parent, above = heapq.heappop(heap)
        rank, row = path[-1], best[depth - 1]
        tree.tokens.append(row[rank][0])
        tree.parents.append(parent)
        tree.depths.append(depth)
        tree.ranks.append(rank)
        tree.scores.append(-negative)
        if rank + 1 < len(row):
            sibling = above + row[rank + 1][1]
            heapq.heappush(heap, (-sibling, depth, (*path[:-1], rank + 1), parent, above))
        if depth < len(best):
            child = -negative + best[depth][0][1]
            heapq.heappush(heap, (-child, depth + 1, (*path, 0), len(tree.tokens), -negative))
    return tree
