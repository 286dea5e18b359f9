"""Which nodes of a verified tree are committed, as tensors (torch only, no walk, nothing read back).

The target answers every node with the token it would put after it. A node *matches* when its token is its
parent's answer. Siblings differ in token, so at most one child of a node matches; the accepted nodes are
those that match and whose ancestors all match, which is a path from the root. The answer at its last node is
the next bonus token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Acceptance", "accept", "verify_mask"]


@dataclass(frozen=True)
class Acceptance:
    """The committed path of each request; ``width`` is the longest possible one, root included."""

    lengths: Tensor
    """int32 ``[batch]``: committed tokens of this step, bonus included (accepted nodes + 1)."""
    nodes: Tensor
    """int64 ``[batch, width]``: node at each depth of the path; beyond the path, column ``i`` holds ``i``."""
    tokens: Tensor
    """int64 ``[batch, width]``: the committed tokens, the target's answers along the path."""
    bonus: Tensor
    """int64 ``[batch]``: the last committed token, whose KV is not computed yet."""


def accept(
    tokens: Tensor,
    parents: Tensor,
    depths: Tensor,
    used: Tensor,
    ancestors: Tensor,
    answers: Tensor,
    width: int,
) -> Acceptance:
    """Find the committed path of each tree.

    Args:
        tokens: int64 ``[batch, nodes]``, root first.
        parents: int64 ``[batch, nodes]``; the root's is 0.
        depths: int64 ``[batch, nodes]``, 0 for the root, below ``width`` for nodes in use.
        used: bool ``[batch, nodes]``: False for padding, which can never match.
        ancestors: bool ``[batch, nodes, nodes]`` from :func:`sglang_ddtree.tree.ancestor_mask`.
        answers: int64 ``[batch, nodes]``: the target's token after each node.
        width: columns of the result, at least 1.
    """
    match = (tokens == answers.gather(1, parents)) & used
    match[:, 0] = True
    accepted = ~(ancestors & ~match.unsqueeze(1)).any(-1)
    lengths = accepted.sum(1)
    # Scattered by depth; all nodes that are not accepted go to a column that is cut off.
    nodes = torch.arange(width + 1, device=tokens.device).repeat(tokens.shape[0], 1)
    index = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    nodes.scatter_(1, torch.where(accepted, depths, width), index)
    # Beyond the path a column may exceed the tree (width > nodes never happens, see the caller); clamping is
    # free.
    nodes = nodes[:, :width].clamp(max=tokens.shape[1] - 1)
    committed = answers.gather(1, nodes)
    bonus = committed.gather(1, (lengths - 1).unsqueeze(1)).squeeze(1)
    return Acceptance(lengths.to(torch.int32), nodes, committed, bonus)


def verify_mask(ancestors: Tensor, prefix_lens: Tensor, prefix_sum_bound: int) -> Tensor:
    """The flat attention mask SGLang's backends take for a tree verify.

    Per request ``nodes`` rows of ``prefix + nodes`` columns, one request after the other: the whole prefix is
    seen, and of the tree a node's ancestors and the node itself.

    Args:
        ancestors: bool ``[batch, nodes, nodes]``.
        prefix_lens: int ``[batch]``, committed tokens.
        prefix_sum_bound: at least the sum of ``prefix_lens``, known to the host, so that the size needs no
            copy.

    Returns:
        bool ``[nodes * (prefix_sum_bound + batch * nodes)]``; what lies beyond the last request is True and
        unused.
    """
    batch, nodes, _ = ancestors.shape
    mask = torch.ones(nodes * (prefix_sum_bound + batch * nodes), dtype=torch.bool, device=ancestors.device)
    lens = prefix_lens.to(torch.int64)
    row = lens + nodes
    start = nodes * (row.cumsum(0) - row)
    index = torch.arange(nodes, device=ancestors.device)
    place = (start + lens).view(-1, 1, 1) + index.view(1, -1, 1) * row.view(-1, 1, 1) + index
    return mask.scatter_(0, place.flatten(), ancestors.flatten())
