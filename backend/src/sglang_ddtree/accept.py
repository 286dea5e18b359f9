"""Which nodes of a verified tree are committed (no SGLang; accelerators read nothing back).

The target answers every node with the token it would put after it. A node *matches* when its token is its
parent's answer. Siblings differ in token, so at most one child of a node matches; the accepted nodes are
those that match and whose ancestors all match, which is a path from the root. The answer at its last node is
the next bonus token.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from sglang_ddtree.tree import RootedTree, ancestor_mask, on_host

__all__ = ["Acceptance", "accept", "verify_mask"]


@dataclass(frozen=True)
class Acceptance:
    """The committed path of each request; ``width`` is at least the longest one, root included."""

    lengths: Tensor
    """int32 ``[batch]``: committed tokens of this step, bonus included (accepted nodes + 1)."""
    nodes: Tensor
    """int64 ``[batch, width]``: node at each depth of the path; beyond the path, column ``i`` holds ``i``."""
    tokens: Tensor
    """int64 ``[batch, width]``: the committed tokens, the target's answers along the path."""
    bonus: Tensor
    """int64 ``[batch]``: the last committed token, whose KV is not computed yet."""


def accept(tree: RootedTree, answers: Tensor, width: int) -> Acceptance:
    """Find the committed path of each tree.

    Args:
        tree: what was verified; nodes that are not in use never match.
        answers: int64 ``[batch, nodes]``: the target's token after each node.
        width: columns of the result where nothing is read back, more than the depth of any node in use and at
            most the nodes; on a CPU the longest path decides.
    """
    if on_host(answers):
        return _accept_on_host(tree, answers)
    batch, nodes = answers.shape
    match = (tree.tokens == answers.gather(1, tree.parents)) & (tree.scores > -torch.inf)
    match[:, 0] = True
    # Padding has the root's path, but is not the root.
    accepted = match & match.gather(1, tree.paths.flatten(1)).view(batch, nodes, -1).all(2)
    lengths = accepted.sum(1)
    last = (tree.depths * accepted).argmax(1, keepdim=True)
    path = tree.paths.gather(1, last.unsqueeze(2).expand(-1, -1, tree.paths.shape[2])).squeeze(1)
    steps = torch.arange(width, device=answers.device)
    path = pad(path, (1, max(0, width - 1 - path.shape[1])))[:, :width]
    path = torch.where(steps < lengths.unsqueeze(1), path, steps)
    bonus = answers.gather(1, last).squeeze(1)
    return Acceptance(lengths.to(torch.int32), path, answers.gather(1, path), bonus)


def _accept_on_host(tree: RootedTree, answers: Tensor) -> Acceptance:
    """As :func:`accept` where values are at hand: twenty operations on tensors take longer than this."""
    columns = [column.tolist() for column in (tree.tokens, tree.parents, tree.scores, answers)]
    paths = []
    for names, above, scores, answer in zip(*columns, strict=True):
        path = [0]
        for node in range(1, len(names)):
            # Nodes come after their ancestors.
            if above[node] == path[-1] and names[node] == answer[path[-1]] and scores[node] > -inf:
                path.append(node)
        paths.append(path)
    lengths = [len(path) for path in paths]
    width = max(lengths)
    nodes = [[*path, *range(len(path), width)] for path in paths]
    tokens = [[answer[node] for node in path] for answer, path in zip(columns[-1], nodes, strict=True)]
    bonus = [row[length - 1] for row, length in zip(tokens, lengths, strict=True)]
    made = (np.array(lengths, np.int32), np.array(nodes), np.array(tokens), np.array(bonus))
    return Acceptance(*map(torch.from_numpy, made))


def verify_mask(paths: Tensor, prefix_lens: Tensor, prefix_sum_bound: int) -> Tensor:
    """The flat attention mask SGLang's backends take for a tree verify.

    Per request ``nodes`` rows of ``prefix + nodes`` columns, one request after the other: the whole prefix is
    seen, and of the tree a node's ancestors and the node itself.

    Args:
        paths: int64 ``[batch, nodes, depth]`` of a :class:`~sglang_ddtree.tree.RootedTree`.
        prefix_lens: int ``[batch]``, committed tokens.
        prefix_sum_bound: at least the sum of ``prefix_lens``, known to the host, so that the size needs no
            copy.

    Returns:
        bool ``[nodes * (sum of prefixes + batch * nodes)]``, on an accelerator with ``prefix_sum_bound`` for
        the sum; what lies beyond the last request is True and unused.
    """
    if not on_host(prefix_lens):
        return _scattered_mask(paths, prefix_lens, prefix_sum_bound)
    (_, nodes, _), blocks = paths.shape, []
    rows = np.arange(nodes)[:, None]
    for path, prefix in zip(paths.numpy(), prefix_lens.tolist(), strict=True):
        block = np.ones((nodes, prefix + nodes), np.bool_)
        # All see the root; what pads a path leads there.
        block[:, prefix + 1 :] = False
        block[rows, path + prefix] = True
        blocks.append(block.ravel())
    return torch.from_numpy(blocks[0] if len(blocks) == 1 else np.concatenate(blocks))


def _scattered_mask(paths: Tensor, prefix_lens: Tensor, prefix_sum_bound: int) -> Tensor:
    """As :func:`verify_mask`, without reading the lengths back."""
    batch, nodes, _ = paths.shape
    mask = torch.ones(nodes * (prefix_sum_bound + batch * nodes), dtype=torch.bool, device=paths.device)
    lens = prefix_lens.to(torch.int64)
    row = lens + nodes
    start = nodes * (row.cumsum(0) - row)
    index = torch.arange(nodes, device=paths.device)
    place = (start + lens).view(-1, 1, 1) + index.view(1, -1, 1) * row.view(-1, 1, 1) + index
    return mask.scatter_(0, place.flatten(), ancestor_mask(paths).flatten())
