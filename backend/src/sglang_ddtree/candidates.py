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
    """Rank paths in the order of depth and rank path, counted from 1; 0 is the root."""

    table: Any
    """int64 ``[1 + candidates, 4 + depth]``, one row to read for a node. By column: where its token is in
    ``[depth * ranks]``; its depth; its rank, from 0; its parent; its ancestors by depth, itself included,
    then 0."""
    gains: Any
    """int64 ``[depth, candidates]``: where the gain of the path's rank is in ``[depth * ranks]``, and beyond
    its end where a 0 is that follows them."""

    def __len__(self) -> int:
        """How many there are, without the root."""
        return int(self.table.shape[0]) - 1


# Up to some 9 MB each.
@lru_cache(maxsize=64)
def candidates(
    depth: int, ranks: int, budget: int, most: int, device: str | None = None
) -> Candidates | None:
    """As tensors on a device, without one as arrays; None if there are more than ``most``."""
    if device is not None:
        found = candidates(depth, ranks, budget, most)
        if found is None:
            return None
        return Candidates(*(torch.from_numpy(column).to(device) for column in vars(found).values()))
    product, total = np.ones(1, np.int64), np.zeros(1, np.int64)
    above = np.zeros((1, depth), np.int64)
    # Depth, last rank, parent and path of the root, then of each level.
    levels = [(np.zeros(1, np.int64), np.zeros(1, np.int64), np.zeros(1, np.int64), above)]
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
        first += len(parent)
        above = paths
    depths, last, parents, paths = (np.concatenate(column) for column in zip(*levels, strict=True))
    gains = np.where(paths > 0, np.arange(depth) * ranks + last[paths], depth * ranks)[1:]
    places = np.maximum(depths - 1, 0) * ranks + last
    table = np.column_stack([places, depths, last, parents, paths])
    return Candidates(table, np.ascontiguousarray(gains.T))


def build(found: Candidates, gains: Tensor, tokens: Tensor, count: int) -> tuple[Tensor, ...]:
    """The root and the best ``count`` candidates, best first, as tensors; nothing is read back.

    Args:
        found: on the device of the tensors.
        gains: float64 ``[batch, depth, ranks]``.
        tokens: int64 of the same shape.
        count: nodes, at most the candidates.

    Returns:
        tokens, parents, depths, ranks and scores ``[batch, 1 + count]``, paths ``[batch, 1 + count, depth]``;
        the root's token is any.
    """
    pad = torch.nn.functional.pad
    flat = pad(gains.flatten(1), (0, 1))
    # Added depth by depth: another order of additions would round to another order of near equals.
    scores = flat[:, found.gains[0]]
    for index in found.gains[1:]:
        scores += flat[:, index]
    best = scores.sort(dim=1, descending=True, stable=True)
    names = pad(best.indices[:, :count] + 1, (1, 0))
    batch = len(names)
    place = names.new_zeros(batch, 1 + len(found))
    place.scatter_(1, names, torch.arange(1 + count, device=names.device).expand(batch, -1))
    chosen = found.table[names]
    nodes = tokens.flatten(1).gather(1, chosen[..., 0])
    # The parent and the path.
    above = place.gather(1, chosen[..., 3:].flatten(1)).view(batch, 1 + count, -1)
    scores = pad(best.values[:, :count], (1, 0))
    return nodes, above[..., 0], chosen[..., 1], chosen[..., 2], scores, above[..., 1:]


def build_on_host(found: Candidates, gains: Array, tokens: Array, count: int) -> tuple[Tensor, ...]:
    """As :func:`build`, from arrays, with as few operations as will do."""
    batch = len(gains)
    flat = np.zeros((batch, gains[0].size + 1))
    flat[:, :-1] = gains.reshape(batch, -1)
    # A sum along an axis that is not the last adds in its order. No bounds to check: "clip" spares a buffer.
    scores = flat.take(found.gains, 1, mode="clip").sum(1)
    best = np.zeros((batch, 1 + count))
    names = np.zeros((batch, 1 + count), np.int64)
    best[:, 1:], order = _best(scores, count)
    np.add(order, 1, out=names[:, 1:])
    rows = np.arange(batch)[:, None]
    place = np.zeros((batch, 1 + len(found)), np.int64)
    place[rows, names] = np.arange(1 + count)
    chosen = found.table[names]
    nodes = tokens.reshape(batch, -1)[rows, chosen[..., 0]]
    # The parent and the path.
    above = place[rows[..., None], chosen[..., 3:]]
    made = (nodes, above[..., 0], chosen[..., 1], chosen[..., 2], best, above[..., 1:])
    return tuple(map(torch.from_numpy, made))


def _best(scores: Array, count: int) -> tuple[Array, Array]:
    """The ``count`` best of each row, best first, of equal ones the first: values and indices."""
    values, order = torch.from_numpy(scores).topk(min(count + 1, scores.shape[1]), dim=1)
    if all(len(set(row)) == len(row) for row in values.tolist()):
        return values.numpy()[:, :count], order.numpy()[:, :count]
    chosen = np.argsort(-scores, axis=1, kind="stable")[:, :count]
    return np.take_along_axis(scores, chosen, 1), chosen
