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
times less work. Small trees, the usual ones, need no levels at all: see ``candidates.py``. All ways give the
same tree, equals included.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from sglang_ddtree.candidates import Array, build, build_on_host, candidates

__all__ = [
    "DraftTree",
    "RootedTree",
    "ancestor_mask",
    "best_log_probs",
    "build_tree",
    "build_tree_from_topk",
    "grow_tree",
    "top_tokens",
    "tree_size",
]

#: Candidates of a level are pruned before they are scored once there are this many times more than
#: can matter.
_PRUNE_FACTOR = 2
#: On a CPU rows are worked on in groups of about this many candidates a level.
_HOST_ELEMENTS = 65536
#: So many times the budget of candidates give a good first limit.
_FEW = 8
#: Most candidates of a small tree: on an accelerator of one tree, on a CPU of all of a step.
_MOST_CANDIDATES = 32768
_MOST_HOST_CANDIDATES = 16384
#: Columns of a builder that gives root and paths as well.
_WITH_ROOT = 6
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


@dataclass(frozen=True)
class RootedTree:
    """A batch of draft trees as the target verifies them: the same columns with the root in front.

    All ``[batch, budget + 1]`` but ``paths``.
    """

    tokens: Tensor
    """int64; the root's, the last committed token, is for the caller to write."""
    parents: Tensor
    """int64: node; 0 for the root itself."""
    depths: Tensor
    """int64: 0 for the root."""
    ranks: Tensor
    """int64: rank of the token at its depth; -1 for padding."""
    scores: Tensor
    """float64: log-probability of the path, 0 for the root; -inf for nodes that are not in use."""
    paths: Tensor
    """int64 ``[batch, budget + 1, depth]``: the node's ancestors by depth, itself included, then 0."""
    count: int
    """Nodes besides the root that are no padding."""

    @property
    def width(self) -> int:
        """Nodes, the root included."""
        return int(self.tokens.shape[1])

    def limited(self, budgets: Tensor) -> RootedTree:
        """Each tree with as many nodes in use: a smaller budget's tree is the beginning of a larger one's."""
        beyond = torch.arange(self.width, device=budgets.device) > budgets.unsqueeze(1)
        return replace(self, scores=self.scores.masked_fill(beyond, -torch.inf))

    def first(self, budget: int) -> RootedTree:
        """All trees cut to one budget, in shape as well."""
        columns = {name: column[:, : budget + 1] for name, column in vars(self).items() if name != "count"}
        return RootedTree(**columns, count=min(self.count, budget))


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
    if on_host(values):
        best, tokens = values.topk(min(k + 1, values.shape[-1]), dim=-1)
        if all(len(set(row)) == len(row) for row in best.reshape(-1, best.shape[-1]).tolist()):
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
        log-probabilities ``[..., k]`` float32 and token ids ``[..., k]`` int64, best first, equal ones by id;
        -inf throughout where there is no distribution.
    """
    logits = logits.float()
    values, tokens = top_tokens(logits, min(k, logits.shape[-1]))
    if gather is None:
        # One pass; a sum of exponentials alone takes several.
        return _known(torch.log_softmax(logits, dim=-1).gather(-1, tokens)), tokens
    total = torch.logsumexp(gather(torch.logsumexp(logits, dim=-1, keepdim=True)), dim=-1, keepdim=True)
    # Parts are in the order of their ids, so that the first of equals is still the smallest id.
    tokens = gather(tokens + first_token)
    values, place = top_tokens(gather(values), k)
    return _known(values - total), tokens.gather(-1, place)


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
    columns = _best_nodes(log_probs, tokens, budget)
    if len(columns) == _WITH_ROOT:
        columns = tuple(column[:, 1:] for column in columns[:-1])
    batch, count = columns[0].shape
    nodes, parents, depths, ranks, scores = _padded(columns, count, budget)
    counts = torch.full((batch,), count, device=nodes.device)
    return DraftTree(nodes, parents, depths, ranks, scores, counts)


def grow_tree(log_probs: Tensor, tokens: Tensor, budget: int) -> RootedTree:
    """As :func:`build_tree_from_topk`, with the root and the way to each node."""
    columns = _best_nodes(log_probs, tokens, budget)
    if len(columns) != _WITH_ROOT:
        pad = torch.nn.functional.pad
        nodes, parents, depths, ranks, scores = (pad(column, (1, 0)) for column in columns)
        columns = (nodes, parents, depths, ranks, scores, _paths(parents, depths, log_probs.shape[1]))
    count = columns[0].shape[1] - 1
    nodes, parents, depths, ranks, scores, paths = _padded(columns, count, budget)
    return RootedTree(nodes, parents, depths, ranks, scores, paths, count)


def ancestor_mask(paths: Tensor) -> Tensor:
    """Who is an ancestor of whom, the node itself and the root included.

    Args:
        paths: int64 ``[batch, nodes, depth]`` of a :class:`RootedTree`.

    Returns:
        bool ``[batch, nodes, nodes]``: row ``i`` is True at the ancestors of node ``i`` (root is node 0).
    """
    batch, nodes, _ = paths.shape
    seen = torch.zeros(batch, nodes, nodes, dtype=torch.bool, device=paths.device)
    seen.scatter_(2, paths, True)
    seen[:, :, 0] = True
    return seen


def _best_nodes(log_probs: Tensor, tokens: Tensor, budget: int) -> tuple[Tensor, ...]:
    """Tokens, parents, depths, ranks and scores of the nodes; small trees bring root and paths as well."""
    if budget < 1:
        raise ValueError(f"budget is {budget}, expected at least 1")
    ranks = min(log_probs.shape[2], budget)
    tokens = tokens[..., :ranks]
    # Sums in double precision: in single precision paths of nearly equal score would swap places between
    # devices.
    gains = log_probs[..., :ranks].to(torch.float64)
    batch, depth, _ = gains.shape
    count = tree_size(depth, ranks, budget)
    if not on_host(gains):
        known = candidates(depth, ranks, budget, _MOST_CANDIDATES, str(gains.device))
        return _build(gains, tokens, budget) if known is None else build(known, gains, tokens, count)
    known = candidates(depth, ranks, budget, _MOST_HOST_CANDIDATES)
    if known is not None and len(known) * batch <= _MOST_HOST_CANDIDATES:
        return build_on_host(known, gains.detach().numpy(), tokens.numpy(), count)
    # Groups of rows whose working set stays in the cache.
    rows = max(1, _HOST_ELEMENTS // (budget * ranks))
    parts = [
        _build_on_host(some_gains, some_tokens, budget)
        for some_gains, some_tokens in zip(gains.split(rows), tokens.split(rows), strict=True)
    ]
    return parts[0] if len(parts) == 1 else tuple(map(torch.cat, zip(*parts, strict=True)))


def _build(gains: Tensor, tokens: Tensor, budget: int) -> tuple[Tensor, ...]:
    """The trees, equals ordered by depth and rank path, without reading anything back.

    Args:
        gains: float64 ``[batch, depth, ranks]``.
        tokens: int64 of the same shape.
        budget: nodes besides the root.

    Returns:
        tokens, parents, depths, ranks and scores, ``[batch, nodes]``.
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
    return nodes, parents, depths, rank, scores.gather(1, order)


def _build_on_host(gains: Tensor, tokens: Tensor, budget: int) -> tuple[Tensor, ...]:
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
    tops = np.cumsum(found[:, :, 0], axis=1)  # no node of the level is better
    scores = best = found[:, 0]  # of this level; of all levels so far, at least the best B
    limit = np.full((batch, 1), _IMPOSSIBLE)  # a node worse than this is not in the tree
    level_scores, level_codes = [scores], [np.broadcast_to(np.arange(ranks), (batch, ranks))]
    for level in range(1, depth):
        tried = ranks
        if level > 1 and not hopeless:
            tried = np.count_nonzero((tops[:, level - 1, None] + found[:, level] >= limit).any(0))
            if tried == 0:
                break
        width = scores.shape[1] * tried
        children = (scores[:, :, None] + found[:, level, None, :tried]).reshape(batch, width)
        if hopeless:
            children[(children < _IMPOSSIBLE) & (children > -np.inf)] = _IMPOSSIBLE
        codes = None
        if level > 1 and width > _FEW * budget:
            # Most are worse than what is known already; the rest is little to search for a new limit.
            children, codes = _kept(children >= limit, children, codes)
        best = np.concatenate([best, children], 1)
        if best.shape[1] > budget:
            best = np.partition(best, best.shape[1] - budget, axis=1)[:, -budget:]
            limit = np.maximum(best[:, :1], _IMPOSSIBLE)  # the first is the least
            children, codes = _kept(children >= limit, children, codes)
        elif codes is None:
            codes = np.broadcast_to(np.arange(width), (batch, width))
        scores, kept = children, children.shape[1]
        if kept == 0:
            break
        if tried < ranks:
            codes = codes // tried * ranks + codes % tried
        if kept > 2 * budget:
            # Equals in great number. The first B of them in the order of the tree are enough.
            first = np.sort(np.argsort(-scores, axis=1, kind="stable")[:, :budget], axis=1)
            scores, codes = np.take_along_axis(scores, first, 1), np.take_along_axis(codes, first, 1)
        level_scores.append(scores)
        level_codes.append(codes)

    every = np.concatenate(level_scores, 1)
    flat = np.arange(every.size).reshape(every.shape)
    final, place = _kept(every >= limit, every, flat)
    chosen = np.argsort(-final, axis=1, kind="stable")[:, : tree_size(depth, ranks, budget)]
    # From here on all indices are flat, into [batch, candidates].
    rows = np.arange(batch)[:, None]
    order = place[rows, chosen]
    total = every.shape[1]
    widths = [x.shape[1] for x in level_scores]
    ends = np.cumsum(widths)
    level_of = np.tile(np.repeat(np.arange(len(widths)), widths), batch)[order]
    codes = np.concatenate(level_codes, 1).ravel()[order]
    above, rank = np.divmod(codes, ranks)
    new = np.empty(batch * total, np.int64)
    new[order] = np.arange(1, order.shape[1] + 1)
    start = np.concatenate([[0, 0], ends])[level_of]  # of the level above
    parents = np.where(level_of > 0, new[np.minimum(rows * total + start + above, batch * total - 1)], 0)
    nodes = tokens.flatten(1).numpy()[rows, level_of * ranks + rank]
    scores = every.ravel()[order]
    if hopeless:
        scores[scores == _IMPOSSIBLE] = -np.inf
    made = (nodes, parents, level_of + 1, rank, scores)
    return tuple(map(torch.from_numpy, made))


def _padded(columns: tuple[Tensor, ...], count: int, budget: int) -> tuple[Tensor, ...]:
    """Columns of ``count`` nodes, maybe with root and paths, as wide as the budget asks."""
    if count == budget:
        return columns
    fills = (0, 0, 0, -1, -torch.inf, 0)
    return tuple(
        torch.nn.functional.pad(column, (0, 0) * (column.ndim - 2) + (0, budget - count), value=fill)
        for column, fill in zip(columns, fills, strict=False)
    )


def _paths(parents: Tensor, depths: Tensor, depth: int) -> Tensor:
    """The way from the root to each node, as in :class:`RootedTree`."""
    batch, nodes = parents.shape
    # Column 0 is the root's; what goes beyond it, up from the root, is written there too.
    paths = parents.new_zeros(batch, nodes, depth + 1)
    node = torch.arange(nodes, device=parents.device).expand(batch, nodes)
    for _ in range(min(depth, nodes - 1)):
        paths.scatter_(2, depths.gather(1, node).unsqueeze(2), node.unsqueeze(2))
        node = parents.gather(1, node)
    return paths[:, :, 1:]


def _kept(keep: Array, scores: Array, codes: Array | None) -> tuple[Array, Array]:
    """The entries of each row to keep, side by side.

    Args:
        keep: bool ``[batch, width]``.
        scores: float64 of the same shape.
        codes: int64 of the same shape; None: the columns.

    Returns:
        scores and codes, ``[batch, as many as a row has]``, padded with -inf and 0.
    """
    batch, width = keep.shape
    at = np.flatnonzero(keep)
    values = scores.ravel()[at]
    names = at % width if codes is None else codes.ravel()[at]
    if batch == 1:
        return values[None], names[None]
    row = at // width
    counts = np.bincount(row, minlength=batch)
    kept = int(counts.max())
    if kept * batch == len(at):
        return values.reshape(batch, kept), names.reshape(batch, kept)
    shift = np.arange(batch) * kept - (np.cumsum(counts) - counts)
    slot = np.arange(len(at)) + shift[row]
    found, called = np.full(batch * kept, -np.inf), np.zeros(batch * kept, np.int64)
    found[slot], called[slot] = values, names
    return found.reshape(batch, kept), called.reshape(batch, kept)


def _known(log_probs: Tensor) -> Tensor:
    """A distribution that is not one (an overflow in the draft, say) drafts nothing, and ends no server."""
    return log_probs.nan_to_num(nan=-torch.inf, neginf=-torch.inf)


def on_host(values: Tensor) -> bool:
    """Whether a look at a result costs nothing."""
    told: bool = values.is_cpu
    return told


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
