"""Constrained decoding: what a request's grammar (JSON schema, regex, EBNF) allows after each node of its
tree.

SGLang's grammars run on the host. The trees are copied there before the target is launched and walked while
it runs. A node the grammar rules out can't be its parent's answer, so nothing below it is looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sglang_ddtree.candidates import Array
from sglang_ddtree.tree import RootedTree

__all__ = ["Outline", "constrain", "leave_something"]

#: Tokens in an element of SGLang's vocabulary masks, a bit each.
_BITS = 32


@dataclass(frozen=True)
class Outline:
    """Trees on the host: values by request and node."""

    tokens: list[list[int]]
    parents: list[list[int]]
    used: list[list[bool]]

    @classmethod
    def of(cls, tree: RootedTree) -> Outline:
        """Copy them; on an accelerator this waits for the trees."""
        return cls(tree.tokens.tolist(), tree.parents.tolist(), (tree.scores > -torch.inf).tolist())


def constrain(logits: Tensor, vocab_size: int, requests: Sequence[Any], trees: Outline) -> None:
    """Rule out, in place, what a request's grammar does not allow after a node.

    Args:
        logits: ``[batch * nodes, vocab]``.
        vocab_size: tokens of the model.
        requests: SGLang's; a grammar that is there has taken every committed token, the root's too.
        trees: of the requests, in their order.
    """
    width = len(trees.tokens[0])
    grammars = [(index, req.grammar) for index, req in enumerate(requests) if req.grammar is not None]
    if not grammars:
        return
    # Any of them: they come from one backend, and the masks of requests without one allow everything.
    backend = grammars[0][1]
    mask = backend.allocate_vocab_mask(vocab_size=vocab_size, batch_size=len(requests) * width, device="cpu")
    for index, grammar in grammars:
        _fill(mask, index * width, grammar, trees.tokens[index], trees.parents[index], trees.used[index])
    backend.apply_vocab_mask(logits=logits, vocab_mask=mask.to(logits.device, non_blocking=True))
    leave_something(logits)


def leave_something(logits: Tensor) -> None:
    """Make tokens equally likely, in place, where none is left.

    A grammar may ask for what no token spells, or for an end that a least length puts off. SGLang ends a
    request for a token that its grammar does not take; a distribution of nothing would end the server.
    """
    logits.masked_fill_(logits.amax(-1, keepdim=True) == -torch.inf, 0.0)


def _fill(
    mask: Tensor, first: int, grammar: Any, tokens: list[int], parents: list[int], used: list[bool]
) -> None:
    """Fill the rows of one tree, from ``first``, for the nodes that can be reached.

    The grammar is left as it was.
    """
    if grammar.is_terminated():
        return
    rows = mask.numpy()
    children: list[list[int]] = [[] for _ in tokens]
    for node in range(1, len(tokens)):
        if used[node]:
            children[parents[node]].append(node)

    grammar.fill_vocab_mask(mask, first)
    path = [0]
    while path:
        if not children[path[-1]]:
            path.pop()
            if path:
                grammar.rollback(1)
            continue
        node = children[path[-1]].pop()
        if not _allows(rows[first + path[-1]], tokens[node]):
            continue
        grammar.accept_token(tokens[node])
        if grammar.is_terminated():
            # What is committed after it is cut off.
            grammar.rollback(1)
        else:
            grammar.fill_vocab_mask(mask, first + node)
            path.append(node)


def _allows(row: Array, token: int) -> bool:
    return token < len(row) * _BITS and bool(int(row[token // _BITS]) >> token % _BITS & 1)
