"""Penalties and the least length, exact at every node of a tree.

SGLang keeps one sum of penalties per request. In a tree every node stands for another text: a node's
penalties are those of the committed output and of the nodes above it. The committed output is counted on the
device, so that nothing waits for a result to reach the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sglang_ddtree.tree import ancestor_mask


def required(parameters: Any) -> bool:
    """Whether a request's sampling parameters ask for any of them."""
    return bool(
        parameters.frequency_penalty != 0.0
        or parameters.presence_penalty != 0.0
        or parameters.repetition_penalty != 1.0
        or parameters.min_new_tokens > 0
    )


class OutputCounts:
    """How often each token is in the committed output of each request, by the request's slot."""

    def __init__(self, vocabulary: int, device: Any) -> None:
        """Nothing is allocated before the first request that needs it."""
        self._vocabulary = vocabulary
        self._device = device
        self._counts: Tensor | None = None

    def begin(self, pool: int, slots: Tensor, reqs: Sequence[Any], sampled: Tensor) -> None:
        """Count what requests have put out whose prefill has just been run.

        Args:
            pool: how many slots there are.
            slots: int64 ``[batch]``.
            reqs: SGLang's requests; their output so far is what was there before this prefill.
            sampled: int64 ``[batch]``, the token that the prefill gave, which the host has not seen yet.
        """
        rows = [row for row, req in enumerate(reqs) if required(req.sampling_params)]
        if not rows:
            return
        if self._counts is None:
            self._counts = torch.zeros(pool, self._vocabulary, dtype=torch.int32, device=self._device)
        mine = slots[torch.tensor(rows, device=slots.device)]
        self._counts[mine] = 0
        before = [(i, token) for i, row in enumerate(rows) for token in reqs[row].output_ids]
        if before:
            at, tokens = (torch.tensor(column, device=slots.device) for column in zip(*before, strict=True))
            self._add(mine[at], tokens)
        self._add(mine, sampled[torch.tensor(rows, device=slots.device)])

    def commit(self, slots: Tensor, reqs: Sequence[Any], tokens: Tensor, lengths: Tensor) -> None:
        """Add a step's committed tokens.

        Args:
            slots: int64 ``[batch]``.
            reqs: of the batch.
            tokens: int64 ``[batch, width]``.
            lengths: int ``[batch]``: how many of them were committed.
        """
        if self._counts is None or not any(required(req.sampling_params) for req in reqs):
            return
        committed = torch.arange(tokens.shape[1], device=tokens.device) < lengths.unsqueeze(1)
        self._counts.index_put_(
            (slots.unsqueeze(1).expand_as(tokens), tokens), committed.to(torch.int32), accumulate=True
        )

    def apply(
        self, logits: Tensor, slots: Tensor, reqs: Sequence[Any], tokens: Tensor, paths: Tensor
    ) -> None:
        """Change the target's logits in place as the requests ask.

        Args:
            logits: ``[batch, nodes, vocabulary]``.
            slots: int64 ``[batch]``.
            reqs: of the batch.
            tokens: int64 ``[batch, nodes]``, the root first.
            paths: int64 ``[batch, nodes, depth]`` of the tree.
        """
        parameters = [req.sampling_params for req in reqs]
        if self._counts is None or not any(map(required, parameters)):
            return
        # The root is the last committed token, so it is counted already.
        path = ancestor_mask(paths)
        path[:, :, 0] = False
        size, nodes = tokens.shape
        counts = self._counts[slots].unsqueeze(1).expand(-1, nodes, -1).to(torch.float32)
        counts = counts.scatter_add(2, tokens.unsqueeze(1).expand(-1, nodes, -1), path.to(torch.float32))

        def column(values: Sequence[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float32, device=logits.device).view(size, 1, 1)

        used = counts > 0
        added = counts * column([p.frequency_penalty for p in parameters])
        added += used * column([p.presence_penalty for p in parameters])
        logits -= added
        factor = torch.where(used, column([p.repetition_penalty for p in parameters]), 1.0)
        logits.copy_(torch.where(logits < 0, logits * factor, logits / factor))
        self._least_length(logits, counts, reqs)

    def _least_length(self, logits: Tensor, counts: Tensor, reqs: Sequence[Any]) -> None:
        for row, req in enumerate(reqs):
            least = req.sampling_params.min_new_tokens
            # What the host knows of the output may lag behind, never run ahead.
            if least > len(req.output_ids):
                short = counts[row].sum(-1, keepdim=True) < least
                stops = torch.tensor(sorted(_stop_tokens(req)), device=logits.device)
                if len(stops):
                    logits[row, :, stops] = torch.where(short, -torch.inf, logits[row][:, stops])

    def _add(self, slots: Tensor, tokens: Tensor) -> None:
        assert self._counts is not None
        ones = torch.ones_like(tokens, dtype=torch.int32)
        self._counts.index_put_((slots, tokens.to(torch.int64)), ones, accumulate=True)


def _stop_tokens(req: Any) -> set[int]:
    """Tokens that end a request: its own, the model's, the tokenizer's."""
    found = set(req.sampling_params.stop_token_ids or ()) | set(req.eos_token_ids or ())
    if req.tokenizer is not None:
        found |= set(req.tokenizer.additional_stop_token_ids or ())
        found |= {req.tokenizer.eos_token_id}
    return {int(token) for token in found if token is not None}
