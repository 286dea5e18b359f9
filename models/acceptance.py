"""How many tokens a draft saves, worked out from the target's greedy text without a server."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from models.network import Draft, block_logits
from models.tokens import MASK

_AT_ONCE = 16


@dataclass(frozen=True)
class Accepted:
    """What one text's steps committed."""

    chain: list[int]
    """Tokens committed by each step of the chain, bonus included."""
    tree: list[int]
    """The same for the tree."""


def measure(
    draft: Draft,
    embedding: Tensor,
    head: Tensor,
    ids: Tensor,
    features: Tensor,
    prompt: int,
    block: int,
    budget: int,
) -> Accepted:
    """Walk through one greedy text (ids [T], features [T, 3 * HIDDEN]); ``prompt`` tokens were given."""
    last = len(ids) - block
    anchors = torch.arange(prompt, last + 1)
    parts = []
    with torch.no_grad():
        for some in anchors.split(_AT_ONCE):
            logits = block_logits(draft, embedding, head, ids[None], features[None], some[None], block, MASK)
            parts.append(logits[0].log_softmax(-1))
    proposals = torch.cat(parts)
    wanted = torch.stack([ids[anchor + 1 : anchor + block] for anchor in anchors.tolist()])
    hits = (proposals.argmax(-1) == wanted).long().cumprod(-1).sum(-1).tolist()

    chain, at = [], 0
    while at < len(anchors):
        chain.append(hits[at] + 1)
        at += chain[-1]
    tree, at = [], 0
    while at < len(anchors):
        tree.append(tree_depth(proposals[at], wanted[at].tolist(), budget) + 1)
        at += tree[-1]
    return Accepted(chain, tree)


def tree_depth(log_probs: Tensor, wanted: Sequence[int], budget: int) -> int:
    """Depth to which a tree of the ``budget`` most probable nodes holds the wanted tokens.

    ``log_probs`` [D, V] are independent by depth; nodes come by the sum along their path, as in DDTree.
    """
    ranked, tokens = log_probs.topk(min(budget, log_probs.shape[1]), -1)
    scores, names = ranked.tolist(), tokens.tolist()
    order = itertools.count()
    # Minus the sum, tie-break, the sum without this node, depth, rank, whether its parents are right.
    heap = [(-scores[0][0], next(order), 0.0, 0, 0, True)]
    deepest = 0
    for _ in range(budget):
        if not heap:
            break
        minus, _, above, depth, rank, right = heapq.heappop(heap)
        fits = right and names[depth][rank] == wanted[depth]
        if fits:
            deepest = max(deepest, depth + 1)
        if rank + 1 < len(scores[depth]):
            entry = (-(above + scores[depth][rank + 1]), next(order), above, depth, rank + 1, right)
            heapq.heappush(heap, entry)
        if depth + 1 < len(scores):
            heapq.heappush(heap, (minus - scores[depth + 1][0], next(order), -minus, depth + 1, 0, fits))
    return deepest
