"""The real Triton extend kernel and the real verify metadata of SGLang, interpreted on the CPU, against dense
torch.

Run as a script with TRITON_INTERPRET=1; prints one JSON object per case. In a process of its own because the
interpreter has to be chosen before Triton is imported, and because a wrongly sized verify writes out of
bounds.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import torch
from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang_ddtree.accept import verify_mask
from sglang_ddtree.tree import ancestor_mask, grow_tree

try:
    from sglang.kernels.ops.attention.kv_indices import create_flashinfer_kv_indices_triton
except ModuleNotFoundError:  # before 0.5.23
    from sglang.kernels.ops.kvcache.kv_indices import create_flashinfer_kv_indices_triton

REQUESTS, HEADS, KV_HEADS, DIM, CONTEXT = 3, 4, 2, 32, 128
PREFIXES = [7, 19, 12]


def bare_backend(configured: int) -> Any:
    """The backend with the fields its verify metadata reads, in a server of that configured width."""
    backend = TritonAttnBackend.__new__(TritonAttnBackend)
    table = torch.randperm(REQUESTS * CONTEXT).view(REQUESTS, CONTEXT).to(torch.int32)

    def pack(
        plan: Any = None, *, req_pool_indices: Any, seq_lens: Any, indptr: Any, out: Any, **_: Any
    ) -> None:
        create_flashinfer_kv_indices_triton[(REQUESTS,)](
            table, req_pool_indices, seq_lens, indptr, None, out, table.stride(0)
        )

    vars(backend).update(
        device="cpu",
        dllm_attention=None,
        window_kv_indptr=None,
        sliding_window_size=None,
        max_context_len=CONTEXT,
        target_verify_num_tokens_per_req=configured,
        num_draft_tokens=configured,
        use_sliding_window_kv_pool=False,
        dcp_size=1,
        kv_indptr=torch.zeros(REQUESTS + 1, dtype=torch.int32),
        mask_indptr=torch.zeros(REQUESTS + 1, dtype=torch.int64),
        forward_metadata=None,
        kv_index_translator=SimpleNamespace(
            pack_read_stream=pack,
            # Before 0.5.22.
            fill_packed_read_stream=pack,
            is_translating=False,
        ),
        table=table,
    )
    return backend


def case(nodes: int, block: int, forced: bool) -> dict[str, float | int | bool]:
    """Verify random trees of ``nodes`` nodes on a server configured to ``block``.

    Args:
        nodes: per request, the root included.
        block: of the draft.
        forced: announce the block instead of the nodes, as the width used to be derived.
    """
    torch.manual_seed(nodes)
    log_probs = torch.log_softmax(torch.randn(REQUESTS, block - 1, 64), -1)
    paths = grow_tree(*log_probs.topk(8), nodes - 1).paths
    ancestors = ancestor_mask(paths)
    prefixes = torch.tensor(PREFIXES)
    backend = bare_backend(block)
    verify = DFlashVerifyInput(
        draft_token=torch.zeros(REQUESTS * nodes, dtype=torch.int64),
        positions=torch.zeros(REQUESTS * nodes, dtype=torch.int64),
        draft_token_num=nodes,
        num_tokens_per_req=block if forced else nodes,
        custom_mask=verify_mask(paths, prefixes, sum(PREFIXES) + 100),
    )
    backend.init_forward_metadata(
        SimpleNamespace(
            batch_size=REQUESTS,
            spec_info=verify,
            forward_mode=ForwardMode.TARGET_VERIFY,
            req_pool_indices=torch.arange(REQUESTS),
            seq_lens=prefixes,
            seq_lens_sum=sum(PREFIXES),
            kv_loc_plan=None,
            out_cache_loc=None,
        )
    )
    meta = backend.forward_metadata
    # Room behind the rows in use, so that a wrongly sized kernel damages nothing but shows.
    rows, spare = REQUESTS * nodes, REQUESTS * max(nodes, block) + 64
    q, k, v = (torch.randn(spare, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    k_buffer, v_buffer = (torch.randn(REQUESTS * CONTEXT, KV_HEADS, DIM) for _ in range(2))
    out = torch.zeros(spare, HEADS, DIM)
    extend_attention_fwd(
        *(
            q,
            k,
            v,
            out,
            k_buffer,
            v_buffer,
            meta.qo_indptr,
            meta.kv_indptr,
            meta.kv_indices,
            meta.custom_mask,
        ),
        *(True, meta.mask_indptr, meta.max_extend_len, 1.0, 1.0),
    )
    expected = torch.empty(rows, HEADS, DIM)
    group = HEADS // KV_HEADS
    for request, prefix in enumerate(PREFIXES):
        own = slice(request * nodes, (request + 1) * nodes)
        slots = backend.table[request, :prefix].long()
        keys = torch.cat([k_buffer[slots], k[own]]).repeat_interleave(group, 1)
        values = torch.cat([v_buffer[slots], v[own]]).repeat_interleave(group, 1)
        seen = torch.cat([torch.ones(nodes, prefix, dtype=torch.bool), ancestors[request]], 1)
        scores = torch.einsum("qhd,khd->hqk", q[own], keys) * DIM**-0.5
        expected[own] = torch.einsum(
            "hqk,khd->qhd", scores.masked_fill(~seen, float("-inf")).softmax(-1), values
        )
    error = (out[:rows] - expected).abs().amax((1, 2))
    return {
        "nodes": nodes,
        "block": block,
        "forced": forced,
        "qo_stride": int(meta.qo_indptr[1]),
        "max_error": float(error.max()),
        "wrong_rows": int((error > 1e-3).sum()),
        "rows": rows,
        "rows_written_beyond": int((out[rows:].abs().amax((1, 2)) > 0).sum()),
    }


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        nodes, block, forced = argument.split(":")
        print(json.dumps(case(int(nodes), int(block), forced == "forced")))
