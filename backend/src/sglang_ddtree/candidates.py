"""All rank paths that can be in a small tree, worked out once for a shape.

A rank path ``(r1, .., rd)``, counted from 1, comes after every path that is no longer and has no larger rank
at any depth: none of them scores lower, and equals go by depth and rank path. With itself these are ``r1 +
r1 r2 + .. + r1 r2 .. rd`` nodes, so the path can be in a tree of budget B only if that sum is at most B. Of
the 2 million paths of 8 ranks and 7 depths 1,083 are left at B = 32. Their scores are a few additions, and
the tree is a sort of them: no choice per level, no search for parents.

Imports torch and NumPy only.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

Array: TypeAlias = "np.ndarray[Any, Any]"


@dataclass(frozen=True)
class Candidates:
    """Rank paths in the order of depth and rank path; candidate ``i`` is called ``i + 1``, the root 0."""

    depths: Any
    """int64 ``[candidates]``."""
    ranks: Any
    """int64 ``[candidates]``: the last of the rank path, from 0."""
    parents: Any
    """int64 ``[candidates]``: name of the parent."""
    paths: Any
    """int64 ``[candidates, depth]``: names of the ancestors by depth, itself included, then 0."""
    gains: Any
    """int64 ``[depth, candidates]``: where the gain of the path's rank is in ``[depth * ranks]``, and beyond
    its end where a 0 is that follows them."""
    tokens: Any
    """int64 ``[candidates]``: where its token is in ``[depth * ranks]``."""
    levels: tuple[tuple[Array, Array], ...]
    """For each depth its candidates' parents, counted within their level, and ranks."""

    def __len__(self) -> int:
        """How many there are."""
        return len(self.depths)


# Up to some 9 MB each.
@lru_cache(maxsize=32)
def candidates(
    depth: int, ranks: int, budget: int, most: int, device: str | None = None
) -> Candidates | None:
    """As tensors on a device, without one as arrays; None if there are more than ``most``."""
    if device is not None:
        found = candidates(depth, ranks, budget, most)
        if found is None:
            return None
        columns = {name: column for name, column in vars(found).items() if name != "levels"}
        tensors = {name: torch.from_numpy(column).to(device) for name, column in columns.items()}
        return Candidates(**tensors, levels=found.levels)
    product, total = np.ones(1, np.int64), np.zeros(1, np.int64)
    above = np.zeros((1, depth), np.int64)
    levels: list[tuple[Array, Array, Array, Array]] = []
    places: list[tuple[Array, Array]] = []
    first = 1
    for level in range(depth):
        children = np.clip((budget - total) // product, 0, ranks)
        if first + int(children.sum()) - 1 > most:
            return None
        parent = np.repeat(np.arange(len(product)), children)
        rank = np.arange(len(parent)) - np.repeat(np.cumsum(children) - children, children)
        product = product[parent] * (rank + 1)
        total = total[parent] + product
        paths = above[parent]
        paths[:, level] = np.arange(first, first + len(parent))
        levels.append((np.full(len(parent), level + 1), rank, above[parent, max(level - 1, 0)], paths))
        places.append((parent, rank))
        first += len(parent)
        above = paths
    depths, last, parents, paths = (np.concatenate(column) for column in zip(*levels, strict=True))
    rank_of = np.concatenate([[0], last])
    gains = np.where(paths > 0, np.arange(depth) * ranks + rank_of[paths], depth * ranks)
    return Candidates(
        depths,
        last,
        parents,
        paths,
        np.ascontiguousarray(gains.T),
        (depths - 1) * ranks + last,
        tuple(places),
    )


def build(found: Candidates, gains: Tensor, tokens: Tensor, count: int) -> tuple[Any, ...]:
    """The best ``count`` candidates, best first, as tensors; nothing is read back.

    Args:
        found: on the device of the tensors.
        gains: float64 ``[batch, depth, ranks]``.
        tokens: int64 of the same shape.
        count: nodes, at most the candidates.

    Returns:
        tokens, parents, depths, ranks and scores ``[batch, count]``, paths ``[batch, count, depth]``.
    """
    flat = torch.nn.functional.pad(gains.flatten(1), (0, 1))
    # Added depth by depth: another order of additions would round to another order of near equals.
    scores = flat[:, found.gains[0]]
    for index in found.gains[1:]:
        scores += flat[:, index]
    best = scores.sort(dim=1, descending=True, stable=True)
    order = best.indices[:, :count]
    batch = len(order)
    place = order.new_zeros(batch, len(found) + 1)
    names = torch.arange(1, count + 1, device=order.device).expand(batch, count)
    place.scatter_(1, order + 1, names)
    paths = place.gather(1, found.paths[order].flatten(1)).view(batch, count, -1)
    nodes = tokens.flatten(1).gather(1, found.tokens[order])
    parents = place.gather(1, found.parents[order])
    return nodes, parents, found.depths[order], found.ranks[order], best.values[:, :count], paths


def scores_on_host(found: Candidates, gains: Array) -> Array:
    """Of all candidates, float64 ``[batch, candidates]``."""
    scores = np.empty((len(gains), len(found)))
    above = np.zeros((len(gains), 1))
    end = 0
    for level, (parents, ranks) in enumerate(found.levels):
        start, end = end, end + len(ranks)
        # No bounds to check: "clip" spares take() a buffer.
        gain = gains[:, level].take(ranks, 1, mode="clip")
        above = np.add(above.take(parents, 1, mode="clip"), gain, out=scores[:, start:end])
    return scores


def build_on_host(found: Candidates, gains: Array, tokens: Array, count: int) -> tuple[Any, ...]:
    """As :func:`build`, with arrays."""
    batch = len(gains)
    scores = scores_on_host(found, gains)
    limits = np.partition(scores, len(found) - count, axis=1)[:, -count]
    order = np.empty((batch, count), np.int64)
    for row in range(batch):
        # At least the best, in the order that equals have; then only they are sorted.
        kept = np.flatnonzero(scores[row] >= limits[row])
        order[row] = kept[np.argsort(-scores[row, kept], kind="stable")[:count]]
    rows = np.arange(batch)[:, None]
    place = np.zeros((batch, len(found) + 1), np.int64)
    place[rows, order + 1] = np.arange(1, count + 1)
    return (
        tokens.reshape(batch, -1)[rows, found.tokens[order]],
        place[rows, found.parents[order]],
        found.depths[order],
        found.ranks[order],
        scores[rows, order],
        place[rows[..., None], found.paths[order]],
    )
