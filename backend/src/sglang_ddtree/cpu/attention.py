"""Target verify for SGLang's ``torch_native`` attention backend, which knows prefill and decode only.

It follows the announced width as the GPU backends do: request ``b`` owns the rows ``[b * width, (b + 1) *
width)`` and its part of the mask has ``prefix + width`` columns. Announced wrongly, it goes as wrong as they
do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


@dataclass
class _Request:
    """Where one request of a verify reads."""

    rows: slice
    slots: Tensor
    mask: Tensor | None
    """bool ``[rows, slots]``: what each row sees; None where the model's kind of attention decides."""
    _bias: Tensor | None = None

    def bias(self, causal: bool, dtype: torch.dtype) -> Tensor | None:
        """What is added to the scores, ``[rows, slots]``; made once, as every layer would convert bools."""
        if self.mask is None and not causal:
            return None
        if self._bias is None:
            mask, shape = self.mask, (self.rows.stop - self.rows.start, len(self.slots))
            if mask is None:
                mask = torch.ones(shape, dtype=torch.bool, device=self.slots.device).tril(shape[1] - shape[0])
            self._bias = torch.zeros(shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)
        return self._bias


def plan_verify(backend: Any, forward_batch: Any) -> None:
    """Work out once per forward what all layers share. Hook before ``init_forward_metadata``."""
    backend.ddtree_verify = None
    if not forward_batch.forward_mode.is_target_verify():
        return
    spec, size = forward_batch.spec_info, forward_batch.batch_size
    width = int(spec.num_tokens_per_req)
    mask = spec.custom_mask
    table = backend.req_to_token_pool.req_to_token
    requests, offset = [], 0
    for index, (row, prefix) in enumerate(
        zip(forward_batch.req_pool_indices.tolist(), forward_batch.seq_lens.tolist(), strict=True)
    ):
        rows = slice(index * width, (index + 1) * width)
        window = forward_batch.out_cache_loc[rows].long()
        slots = torch.cat([table[row, :prefix].long(), window])
        part = None
        if mask is not None:
            part = mask[offset : offset + width * (prefix + width)].view(width, prefix + width)
            part = part[: len(window), : len(slots)]
            offset += width * (prefix + width)
        requests.append(_Request(slice(rows.start, rows.start + len(window)), slots, part))
    backend.ddtree_verify = requests[:size]


def forward_extend(
    original: Callable[..., Tensor],
    backend: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer: Any,
    forward_batch: Any,
    save_kv_cache: bool = True,
    **arguments: Any,
) -> Tensor:
    """Attention of a verify; anything else goes to the backend. Hook around ``forward_extend``."""
    if not forward_batch.forward_mode.is_target_verify():
        return original(backend, q, k, v, layer, forward_batch, save_kv_cache, **arguments)
    from sglang.srt.layers.radix_attention import AttentionType
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    pool = backend.token_to_kv_pool
    if save_kv_cache and k is not None:
        pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, backend.swa_out_cache_loc), k, v)
    keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
    query = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
    causal = layer.attn_type != AttentionType.ENCODER_ONLY
    parts = []
    for request in backend.ddtree_verify:
        attended = scaled_dot_product_attention(
            query[request.rows].transpose(0, 1)[None],
            keys.index_select(0, request.slots).transpose(0, 1)[None].to(q.dtype),
            values.index_select(0, request.slots).transpose(0, 1)[None].to(q.dtype),
            attn_mask=request.bias(causal, q.dtype),
            scale=layer.scaling,
            enable_gqa=layer.tp_q_head_num != layer.tp_k_head_num,
        )
        parts.append(attended[0].transpose(0, 1).flatten(1))
    # A width that is announced wrongly leaves rows that no request owns, the last ones.
    missing = len(query) - sum(len(part) for part in parts)
    if missing:
        parts.append(q.new_zeros(missing, layer.tp_q_head_num * layer.v_head_dim))
    return parts[0] if len(parts) == 1 else torch.cat(parts)
