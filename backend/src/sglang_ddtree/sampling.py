"""One token per tree node from the target's own distribution, filtered as the request asks.

Walking the tree along tokens drawn this way needs no rejection step: wherever the walk ends, every committed
token was drawn from the target's distribution after exactly the tokens before it.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.sampler import top_k_top_p_min_p_sampling_from_probs_torch
from torch import Tensor

from sglang_ddtree.tree import on_host


def answer_nodes(logits: Tensor, sampling_info: Any, nodes: int, positions: Tensor) -> Tensor:
    """The target's token after each node.

    Args:
        logits: ``[batch * nodes, vocab]``, penalties and biases applied.
        sampling_info: SGLang's sampling parameters of the batch; greedy requests have top-k 1 there.
        nodes: per request.
        positions: ``[batch * nodes]``, which seeded requests draw by.

    Returns:
        int64 ``[batch * nodes]``.
    """
    if sampling_info is None or sampling_info.is_all_greedy:
        # NumPy's finds the same, the first of equals, in half the time.
        return torch.from_numpy(logits.numpy().argmax(-1)) if on_host(logits) else logits.argmax(-1)

    def spread(values: Tensor) -> Tensor:
        return values.repeat_interleave(nodes, dim=0)

    seed = sampling_info.sampling_seed
    probabilities = torch.softmax(logits.float() / spread(sampling_info.temperatures), dim=-1)
    filters = (
        sampling_info.need_top_k_sampling
        or sampling_info.need_top_p_sampling
        or sampling_info.need_min_p_sampling
    )
    if not filters and seed is None:
        # Filters sort the vocabulary at every node.
        return torch.multinomial(probabilities, 1).squeeze(1)
    drawn: Tensor = top_k_top_p_min_p_sampling_from_probs_torch(
        probabilities,
        spread(sampling_info.top_ks),
        spread(sampling_info.top_ps),
        spread(sampling_info.min_ps),
        sampling_info.need_min_p_sampling,
        None if seed is None else spread(seed),
        positions,
    )
    return drawn.to(torch.int64)
