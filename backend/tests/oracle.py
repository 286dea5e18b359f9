"""The draft tree of the paper, one node at a time with a heap: what the builder must equal."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field


@dataclass
class HeapTree:
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)


def heap_tree(rows: list[list[float]], budget: int, topk_cap: int) -> HeapTree:
    """Best-first tree over ``rows[depth][token]`` log-probabilities.

    Equal scores pop by depth, then by rank path; equal tokens rank by token id.
    """
    ranks = min(topk_cap, budget, len(rows[0]))
    best = [sorted(range(len(row)), key=lambda t, row=row: (-row[t], t))[:ranks] for row in rows]
    tree = HeapTree()
    # (-score, depth, rank path, parent, score of the parent)
    heap = [(-rows[0][best[0][0]], 1, (0,), 0, 0.0)]
    while heap and len(tree.tokens) < budget:
        negative, depth, path, parent, above = heapq.heappop(heap)
        rank, row = path[-1], rows[depth - 1]
        tree.tokens.append(best[depth - 1][rank])
        tree.parents.append(parent)
        tree.depths.append(depth)
        tree.ranks.append(rank)
        tree.scores.append(-negative)
        if rank + 1 < ranks:
            sibling = above + row[best[depth - 1][rank + 1]]
            heapq.heappush(heap, (-sibling, depth, (*path[:-1], rank + 1), parent, above))
        if depth < len(rows):
            child = -negative + rows[depth][best[depth][0]]
            heapq.heappush(heap, (-child, depth + 1, (*path, 0), len(tree.tokens), -negative))
    return tree
