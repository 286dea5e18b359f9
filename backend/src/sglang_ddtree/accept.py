"""Which nodes of a verified tree are committed (torch only; accelerators read nothing back).

The target answers every node with the token it would put after it. A node *matches* when its token is its
parent's answer. Siblings differ in token, so at most one child of a node matches; the accepted nodes are
those that match and whose ancestors all match, which is a path from the root. The answer at its last node is
the next bonus token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from sglang_ddtree.tree import on_host

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
    paths: Tensor,
    answers: Tensor,
    width: int,
) -> Acceptance:
    """Find the committed path of each tree.

    Args:
        tokens: int64 ``[batch, nodes]``, root first.
        parents: int64 ``[batch, nodes]``; the root's is 0.
        depths: int64 ``[batch, nodes]``, 0 for the root, below ``width`` for nodes in use.
        used: bool ``[batch, nodes]``: False for padding, which can never match.
        paths: int64 ``[batch, nodes, depth]`` from :func:`sglang_ddtree.tree.paths_of`, the root's first.
        answers: int64 ``[batch, nodes]``: the target's token after each node.
        width: columns of the result, at least 1, at most the nodes.
    """
    if on_host(tokens):
        return _accept_on_host(tokens, parents, used, paths, answers, width)
    batch, nodes = tokens.shape
    match = (tokens == answers.gather(1, parents)) & used
    match[:, 0] = True
    # Padding has the root's path, but is not the root.
    accepted = match & match.gather(1, paths.flatten(1)).view(batch, nodes, -1).all(2)
    lengths = accepted.sum(1)
    last = (depths * accepted).argmax(1, keepdim=True)
    path = paths.gather(1, last.unsqueeze(2).expand(-1, -1, paths.shape[2])).squeeze(1)
    steps = torch.arange(width, device=tokens.device)
    path = pad(path, (1, max(0, width - 1 - path.shape[1])))[:, :width]
    path = torch.where(steps < lengths.unsqueeze(1), path, steps)
    bonus = answers.gather(1, last).squeeze(1)
    return Acceptance(lengths.to(torch.int32), path, answers.gather(1, path), bonus)


def _accept_on_host(
    tokens: Tensor, parents: Tensor, used: Tensor, paths: Tensor, answers: Tensor, width: int
) -> Acceptance:
    """As :func:`accept` where values are at hand: twenty operations on tensors take longer than this."""
    lists = [column.tolist() for column in (tokens, parents, used, answers)]
    rows = []
    for row, (names, above, counts, answer) in enumerate(zip(*lists, strict=True)):
        last, accepted = 0, [True] * len(names)
        for node in range(1, len(names)):
            parent = above[node]
            accepted[node] = accepted[parent] and counts[node] and names[node] == answer[parent]
            # Accepted nodes are a path, and come after their ancestors.
            last = node if accepted[node] else last
        path = [0, *(node for node in paths[row, last].tolist() if node)]
        nodes = [*path, *range(len(path), width)]
        rows.append([*nodes, *(answer[node] for node in nodes), answer[last], len(path)])
    made = torch.tensor(rows)
    return Acceptance(
        lengths=made[:, -1].to(torch.int32),
        nodes=made[:, :width],
        tokens=made[:, width:-2],
        bonus=made[:, -2].contiguous(),
    )


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
        bool ``[nodes * (sum of prefixes + batch * nodes)]``, on an accelerator with ``prefix_sum_bound`` for
        the sum; what lies beyond the last request is True and unused.
    """
    if on_host(prefix_lens):
        lengths = prefix_lens.tolist()
        blocks = [pad(rows, (prefix, 0), value=True) for rows, prefix in zip(ancestors, lengths, strict=True)]
        return torch.cat([block.flatten() for block in blocks])
    return _scattered_mask(ancestors, prefix_lens, prefix_sum_bound)


def _scattered_mask(ancestors: Tensor, prefix_lens: Tensor, prefix_sum_bound: int) -> Tensor:
    """As :func:`verify_mask`, without reading the lengths back."""
    batch, nodes, _ = ancestors.shape
    mask = torch.ones(nodes * (prefix_sum_bound + batch * nodes), dtype=torch.bool, device=ancestors.device)
    lens = prefix_lens.to(torch.int64)
    row = lens + nodes
    start = nodes * (row.cumsum(0) - row)
    index = torch.arange(nodes, device=ancestors.device)
    place = (start + lens).view(-1, 1, 1) + index.view(1, -1, 1) * row.view(-1, 1, 1) + index
    return mask.scatter_(0, place.flatten(), ancestors.flatten())
