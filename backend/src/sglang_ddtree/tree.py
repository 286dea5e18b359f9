"""Draft trees from per-depth marginals, built on the device for a whole batch at once.

Imports torch and NumPy only, so that the server, the offline replay and anybody who wants to check them share
one definition.

A draft block gives, for each of ``depth`` future positions, an independent distribution over the vocabulary.
A node is a path of ranks ``(r1, .., rd)``: at depth ``i`` it takes the ``ri``-th most likely token. Its score
is the sum of the log-probabilities along the path. The tree of budget B holds the B best-scoring nodes
(Ringel and Romano, arXiv 2604.12989, section 3); ties go to the smaller ``(depth, rank path)``.

No heap is needed. A score never grows along a path, so a node's ancestors come before it in that order and
the best B nodes are closed under taking parents. They are found level by level: of each level only the best B
can matter, and of the union of all levels the best B are the tree. How many nodes each level keeps depends on
the shapes alone, so nothing is read back from the device.

On a CPU, where a look at a result is free, the sizes follow from what was found instead, which is several
times less work. Both ways give the same tree, equals included.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = [
    "DraftTree",
    "ancestor_mask",
    "best_log_probs",
    "build_tree",
    "build_tree_from_topk",
    "top_tokens",
    "tree_size",
]

#: Candidates of a level are pruned before they are scored once there are this many times more than
#: can matter.
_PRUNE_FACTOR = 2
#: On a CPU rows are worked on in groups of about this many candidates a level.
_HOST_ELEMENTS = 32768
#: Stands for -inf on a CPU: below any sum of log-probabilities.
_IMPOSSIBLE = -1e300


@dataclass(frozen=True)
class DraftTree:
    """A batch of draft trees in pop order (best first), without the root.

    All tensors but ``count`` have shape ``[batch, budget]``; ``count`` has shape ``[batch]``. A tree smaller
    than the budget (few ranks and few depths) is padded at the end: token, parent and depth 0, rank -1,
    log-probability -inf.
    """

    tokens: Tensor
    """int64: token of the node."""
    parents: Tensor
    """int64: index of the parent where the root is 0 and column ``i`` of these tensors is node ``i + 1``."""
    depths: Tensor
    """int64: 1 for children of the root."""
    ranks: Tensor
    """int64: rank of the token in the distribution of its depth, 0 is the most likely."""
    log_probs: Tensor
    """float64: sum of the log-probabilities from the root to the node."""
    count: Tensor
    """int64 ``[batch]``: nodes in use."""


def tree_size(depth: int, ranks: int, budget: int) -> int:
    """Nodes of a tree of ``depth`` levels and ``ranks`` children per node, at most ``budget`` of them."""
    total, level = 0, 1
    for _ in range(depth):
        level *= ranks
        total += level
        if total >= budget:
            return budget
    return total


def top_tokens(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The ``k`` largest of the last axis, largest first, equal ones by the smaller index.

    ``torch.topk`` leaves the order of equal values open, and it does change with ``k``; trees would then not
    nest. Here value and index are folded into one 64-bit integer each, so that all keys differ.

    Args:
        scores: ``[..., vocab]`` floating point of at most 32 bits, without NaN.
        k: how many, 1 to vocab.

    Returns:
        values ``[..., k]`` float32 and indices ``[..., k]`` int64.
    """
    values = scores.to(torch.float32)
    if values.device.type == "cpu":
        best, tokens = values.topk(min(k + 1, values.shape[-1]), dim=-1)
        if not _repeats(best):
            return best[..., :k], tokens[..., :k]
    # Adding zero turns -0.0, which compares equal to 0.0 but has other bits, into 0.0.
    bits = (values + 0.0).view(torch.int32)
    # The bits of IEEE floats order like integers once those of negative numbers are flipped.
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)
    index = torch.arange(scores.shape[-1], device=scores.device)
    keys = (ordered << 32) + (0xFFFFFFFF - index)
    tokens = 0xFFFFFFFF - (keys.topk(k, dim=-1).values & 0xFFFFFFFF)
    return values.gather(-1, tokens), tokens


def best_log_probs(
    logits: Tensor, k: int, first_token: int = 0, gather: Callable[[Tensor], Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """The ``k`` most likely tokens and their log-probabilities over the whole vocabulary.

    With tensor parallelism each rank holds a part of the vocabulary: what is gathered is the best of each
    part and one number, not the logits.

    Args:
        logits: ``[..., part]`` floating point, this rank's part of the vocabulary.
        k: how many, at most the vocabulary.
        first_token: id of the first of the part.
        gather: joins all ranks' tensors along the last axis, in the order of their parts; None: there is one
            part.

    Returns:
        log-probabilities ``[..., k]`` float32 and token ids ``[..., k]`` int64, best first, equal ones by id.
    """
    logits = logits.float()
    values, tokens = top_tokens(logits, min(k, logits.shape[-1]))
    total = torch.logsumexp(logits, dim=-1, keepdim=True)
    if gather is not None:
        total = torch.logsumexp(gather(total), dim=-1, keepdim=True)
        # Parts are in the order of their ids, so that the first of equals is still the smallest id.
        tokens = gather(tokens + first_token)
        values, place = top_tokens(gather(values), k)
        tokens = tokens.gather(-1, place)
    return values - total, tokens


def build_tree(log_probs: Tensor, budget: int, topk_cap: int) -> DraftTree:
    """Draft trees of the ``budget`` most probable nodes.

    Args:
        log_probs: ``[batch, depth, vocab]``, normalised over the full vocabulary, without NaN.
        budget: nodes besides the root, at least 1.
        topk_cap: ranks tried at a depth, at least 1; the smaller of this, the budget and the vocabulary is
            used.

    Raises:
        ValueError: wrong shape, or a budget or cap below 1.
    """
    if log_probs.ndim != 3 or 0 in log_probs.shape[1:]:
        raise ValueError(
            f"log_probs has shape {tuple(log_probs.shape)}, expected [batch, depth, vocab], none of them 0"
        )
    if topk_cap < 1:
        raise ValueError(f"topk_cap is {topk_cap}, expected at least 1")
    values, tokens = top_tokens(log_probs, min(topk_cap, max(budget, 1), log_probs.shape[-1]))
    return build_tree_from_topk(values, tokens, budget)


def build_tree_from_topk(log_probs: Tensor, tokens: Tensor, budget: int) -> DraftTree:
    """As :func:`build_tree`, from the already sorted best tokens of each depth.

    Args:
        log_probs: ``[batch, depth, ranks]``, descending along the last axis.
        tokens: ``[batch, depth, ranks]`` int64.
        budget: nodes besides the root, at least 1.
    """
    if budget < 1:
        raise ValueError(f"budget is {budget}, expected at least 1")
    ranks = min(log_probs.shape[2], budget)
    tokens = tokens[..., :ranks]
    # Sums in double precision: in single precision paths of nearly equal score would swap places between
    # devices.
    gains = log_probs[..., :ranks].to(torch.float64)
    if gains.device.type != "cpu":
        return _build(gains, tokens, budget)
    # Groups of rows whose working set stays in the cache.
    rows = max(1, _HOST_ELEMENTS // (budget * ranks))
    parts = [
        _build_on_host(some_gains, some_tokens, budget)
        for some_gains, some_tokens in zip(gains.split(rows), tokens.split(rows), strict=True)
    ]
    if len(parts) == 1:
        return parts[0]
    return DraftTree(*(torch.cat([getattr(p, f.name) for p in parts]) for f in fields(DraftTree)))


def ancestor_mask(parents: Tensor, max_depth: int | None = None) -> Tensor:
    """Who is an ancestor of whom, the node itself and the root included.

    Args:
        parents: ``[batch, budget]`` as in :class:`DraftTree`.
        max_depth: of any node, where the caller knows it; it saves passes.

    Returns:
        bool ``[batch, budget + 1, budget + 1]``: row ``i`` is True at the ancestors of node ``i`` (root is
        node 0).
    """
    batch, budget = parents.shape
    nodes = budget + 1
    seen = torch.eye(nodes, dtype=torch.bool, device=parents.device).expand(batch, nodes, nodes)
    jump = torch.nn.functional.pad(parents, (1, 0))
    # Pointer doubling: after i passes a node has seen itself and its 2^i - 1 nearest ancestors.
    for _ in range(min(budget, max_depth or budget).bit_length()):
        seen = seen | seen.gather(1, jump.unsqueeze(-1).expand(-1, -1, nodes))
        jump = jump.gather(1, jump)
    return seen


def _build(gains: Tensor, tokens: Tensor, budget: int) -> DraftTree:
    """The trees, equals ordered by depth and rank path, without reading anything back.

    Args:
        gains: float64 ``[batch, depth, ranks]``.
        tokens: int64 of the same shape.
        budget: nodes besides the root.
    """
    (batch, depth, ranks), device = gains.shape, gains.device
    # A level's nodes are kept in the order of their rank paths; "the first of equals" is then the tie rule.
    scores = gains[:, 0]
    level_scores = [scores]
    # Place of the parent in its level * ranks + rank.
    level_codes = [torch.arange(ranks, device=device).expand(batch, ranks)]
    for level in range(1, depth):
        codes, scores = _expand(scores, gains[:, level], budget)
        if scores.shape[1] > budget:
            kept = _best(scores, budget)
            codes, scores = codes.gather(1, kept), scores.gather(1, kept)
        level_scores.append(scores)
        level_codes.append(codes)
    # Across levels: smaller depth first among equals, then the rank path, so again the first of equals.
    scores = torch.cat(level_scores, 1)
    count = min(budget, scores.shape[1])
    if count < scores.shape[1]:
        kept = _best(scores, count)
        order = kept.gather(1, scores.gather(1, kept).sort(dim=1, descending=True, stable=True).indices)
    else:
        order = scores.sort(dim=1, descending=True, stable=True).indices
    # Where each candidate went, to translate parents; slot 0 is the root, slot i + 1 is candidate i.
    depths, bases = _layout(tuple(x.shape[1] for x in level_scores), device)
    place = torch.zeros(batch, scores.shape[1] + 1, dtype=torch.int64, device=device)
    place.scatter_(1, order + 1, torch.arange(1, count + 1, device=device).expand(batch, count))
    codes, depths = torch.cat(level_codes, 1).gather(1, order), depths[order]
    parents, rank = place.gather(1, bases[order] + codes // ranks), codes % ranks
    nodes = tokens.flatten(1).gather(1, (depths - 1) * ranks + rank)
    return _padded(nodes, parents, depths, rank, scores.gather(1, order), budget)


def _build_on_host(gains: Tensor, tokens: Tensor, budget: int) -> DraftTree:
    """As :func:`_build` on a CPU, where sizes may depend on what was found.

    A level keeps the children that are at least as good as the best B nodes found so far. Nothing else can be
    in the tree, and it is mostly a small part of what the shapes alone allow.

    NumPy: small operations cost it a third of what they cost torch.
    """
    found = gains.detach().numpy()
    batch, depth, ranks = found.shape
    # Padding is -inf, so tokens that cannot follow are not while the tree grows.
    hopeless = not np.isfinite(found[:, :, -1]).all()
    if hopeless:
        found = np.maximum(found, _IMPOSSIBLE)
    scores = best = found[:, 0]  # of this level; of all levels so far, at least the best B
    limit = np.full((batch, 1), _IMPOSSIBLE)  # a node worse than this is not in the tree
    level_scores, level_codes = [scores], [np.broadcast_to(np.arange(ranks), (batch, ranks))]
    for level in range(1, depth):
        tried = ranks
        if level > 1 and not hopeless:
            tried = int((scores.max(1, keepdims=True) + found[:, level] >= limit).sum(1).max())
            if tried == 0:
                break
        width = scores.shape[1] * tried
        children = (scores[:, :, None] + found[:, level, None, :tried]).reshape(batch, width)
        if hopeless:
            children[(children < _IMPOSSIBLE) & (children > -np.inf)] = _IMPOSSIBLE
        best = np.concatenate([best, children], 1)
        if best.shape[1] >= budget:
            best = np.partition(best, best.shape[1] - budget, axis=1)[:, -budget:]
            limit = np.maximum(best.min(1, keepdims=True), _IMPOSSIBLE)
        at, slot, kept = _compact(children >= limit)
        if kept == 0:
            break
        scores = np.full((batch, kept), -np.inf)
        scores.ravel()[slot] = children.ravel()[at]
        codes = np.zeros((batch, kept), np.int64)
        codes.ravel()[slot] = at % width
        if tried < ranks:
            codes = codes // tried * ranks + codes % tried
        if kept > 2 * budget:
            # Equals in great number. The first B of them in the order of the tree are enough.
            first = np.sort(np.argsort(-scores, axis=1, kind="stable")[:, :budget], axis=1)
            scores, codes = np.take_along_axis(scores, first, 1), np.take_along_axis(codes, first, 1)
        level_scores.append(scores)
        level_codes.append(codes)

    every = np.concatenate(level_scores, 1)
    at, slot, kept = _compact(every >= limit)
    worse, place = np.full((batch, kept), np.inf), np.zeros((batch, kept), np.int64)
    worse.ravel()[slot] = -every.ravel()[at]
    place.ravel()[slot] = at
    chosen = np.argsort(worse, axis=1, kind="stable")[:, : tree_size(depth, ranks, budget)]
    # From here on all indices are flat, into [batch, candidates].
    order = np.take_along_axis(place, chosen, 1)
    total = every.shape[1]
    ends = np.cumsum([x.shape[1] for x in level_scores])
    level_of = np.searchsorted(ends, order % total, side="right")
    codes = np.concatenate(level_codes, 1).ravel()[order]
    above, rank = np.divmod(codes, ranks)
    new = np.empty(batch * total, np.int64)
    new[order] = np.arange(1, order.shape[1] + 1)
    rows = np.arange(batch)[:, None]
    start = np.concatenate([[0, 0], ends])[level_of]  # of the level above
    parents = np.where(level_of > 0, new[np.minimum(rows * total + start + above, batch * total - 1)], 0)
    nodes = tokens.flatten(1).numpy()[rows, level_of * ranks + rank]
    scores = every.ravel()[order]
    if hopeless:
        scores[scores == _IMPOSSIBLE] = -np.inf
    made = [torch.from_numpy(column) for column in (nodes, parents, level_of + 1, rank, scores)]
    return _padded(made[0], made[1], made[2], made[3], made[4], budget)


def _padded(
    tokens: Tensor, parents: Tensor, depths: Tensor, ranks: Tensor, scores: Tensor, budget: int
) -> DraftTree:
    """A tree with as many columns as the budget has nodes."""
    batch, count = tokens.shape
    if count < budget:
        pad = (0, budget - count)
        tokens, parents, depths = (torch.nn.functional.pad(x, pad) for x in (tokens, parents, depths))
        ranks = torch.nn.functional.pad(ranks, pad, value=-1)
        scores = torch.nn.functional.pad(scores, pad, value=float("-inf"))
    counts = torch.full((batch,), count, dtype=torch.int64, device=tokens.device)
    return DraftTree(tokens, parents, depths, ranks, scores, counts)


def _compact(keep: np.ndarray[Any, Any]) -> tuple[Any, Any, int]:
    """Where to put the True entries of each row side by side.

    Args:
        keep: bool ``[batch, width]``.

    Returns:
        flat index of each entry, its flat index in an array ``[batch, kept]``, and ``kept``.
    """
    batch, width = keep.shape
    at = np.flatnonzero(keep)
    if batch == 1:
        return at, np.arange(len(at)), len(at)
    row = at // width
    counts = np.bincount(row, minlength=batch)
    kept = int(counts.max())
    shift = np.arange(batch) * kept - (np.cumsum(counts) - counts)
    return at, np.arange(len(at)) + shift[row], kept


def _repeats(sorted_values: Tensor) -> bool:
    """Whether any row of sorted values has equal ones. Waits for the device."""
    return bool((sorted_values[..., 1:] == sorted_values[..., :-1]).any())


def _best(scores: Tensor, count: int) -> Tensor:
    """Ascending indices of the ``count`` largest of each row, of equal ones the first: ``[batch, count]``."""
    limit = scores.topk(count, dim=1, sorted=False).values.amin(1, keepdim=True)
    above, equal = scores > limit, scores == limit
    room = count - above.sum(1, keepdim=True)
    keep = above | (equal & (equal.cumsum(1) <= room))
    # Compaction by a running count: unlike nonzero() its result has a size the host knows.
    slot = torch.where(keep, keep.cumsum(1) - 1, count)
    index = torch.arange(scores.shape[1], device=scores.device).expand_as(scores)
    return index.new_empty(scores.shape[0], count + 1).scatter_(1, slot, index)[:, :count]


def _expand(scores: Tensor, gains: Tensor, budget: int) -> tuple[Tensor, Tensor]:
    """Children of one level in the order of their rank paths.

    Args:
        scores: ``[batch, width]`` of the parents, in the order of their rank paths.
        gains: ``[batch, ranks]`` of the children's depth.
        budget: nodes besides the root.

    Returns:
        code (parent * ranks + rank) and score of the children, ``[batch, children]`` each.
    """
    (batch, width), ranks = scores.shape, gains.shape[1]
    useful = _useful_children(width, ranks, budget)
    if useful is None:
        children = (scores.unsqueeze(2) + gains.unsqueeze(1)).flatten(1)
        return torch.arange(width * ranks, device=scores.device).expand(batch, -1), children
    # That choice goes by the order of the scores; parents are not in it, and children are not to be.
    by_score = scores.sort(dim=1, descending=True, stable=True).indices
    place = torch.empty_like(by_score).scatter_(
        1, by_score, torch.arange(1, width + 1, device=scores.device).expand(batch, width)
    )
    ends = (budget // place).clamp(max=ranks).cumsum(1)
    index = torch.arange(useful, device=scores.device).expand(batch, useful).contiguous()
    parent = torch.searchsorted(ends, index, right=True)
    rank = index - torch.nn.functional.pad(ends, (1, 0)).gather(1, parent)
    return parent * ranks + rank, scores.gather(1, parent) + gains.gather(1, rank)


@lru_cache(maxsize=256)
def _useful_children(width: int, ranks: int, budget: int) -> int | None:
    """How many children of one level can be among the best B of the next; None: not worth choosing.

    Rank r under the p-th best parent is beaten by all ranks up to r under all parents up to p: it can only be
    among the best B if p * (r + 1) <= B (counting p from 1). That leaves about B ln B children instead of B *
    K.
    """
    useful = sum(min(ranks, budget // place) for place in range(1, width + 1))
    return useful if width * ranks > _PRUNE_FACTOR * useful else None


@lru_cache(maxsize=64)
def _layout(widths: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Depth of each candidate and the slot of the first of the level above it, ``[sum(widths)]`` each."""
    depths, bases, base = [], [], 0
    for level, width in enumerate(widths):
        depths += [level + 1] * width
        # The root's children have no rank to divide by: their code is below the ranks, and the root is slot
        # 0.
        bases += [base] * width
        base = base + (widths[level - 1] if level else 1)
    return torch.tensor(depths, device=device), torch.tensor(bases, device=device)
