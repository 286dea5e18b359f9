"""Stand-in for ``sgl_kernel`` on a CPU: the kernels SGLang's CPU engine calls for DFLASH and DDTREE, in
torch.

The released wheel of ``sglang-kernel`` holds CUDA code only and cannot load here. Any other name can be
imported, as SGLang imports many it never calls, and refuses to run.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def assign_req_to_token_pool_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
) -> None:
    """Write newly allocated slots into the rows of the token table, ``[start, end)`` of each request.

    Raises:
        IndexError: a range leaves its row of ``pool_len`` columns.
    """
    taken = 0
    for row, start, end in _ranges(req_pool_indices, start_offset, end_offset, pool_len):
        req_to_token[row, start:end] = out_cache_loc[taken : taken + end - start]
        taken += end - start


def assign_extend_cache_locs_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
) -> None:
    """Read the slots ``[start, end)`` of each request from the token table, one request after the other.

    Raises:
        IndexError: a range leaves its row of ``pool_len`` columns.
    """
    taken = 0
    for row, start, end in _ranges(req_pool_indices, start_offset, end_offset, pool_len):
        out_cache_loc[taken : taken + end - start] = req_to_token[row, start:end]
        taken += end - start


def copy_all_layer_kv_cache_cpu(data_ptrs: Tensor, strides: Tensor, tgt_loc: Tensor, src_loc: Tensor) -> None:
    """Move rows of all KV buffers: row ``src_loc[i]`` to row ``tgt_loc[i]``, all read before any is written.

    Args:
        data_ptrs: address of each buffer.
        strides: bytes per row of each buffer.
        tgt_loc: rows to write.
        src_loc: rows to read.
    """
    moves = [(t, s) for t, s in zip(tgt_loc.tolist(), src_loc.tolist(), strict=True) if t != s]
    buffers = list(zip(data_ptrs.tolist(), strides.tolist(), strict=True))
    move, written = ctypes.memmove, set()
    for target, source in moves:
        if source in written:
            break
        written.add(target)
    else:
        # No row is read after it was written: one after the other, no copies. A tree's path is such a case.
        for address, stride in buffers:
            for target, source in moves:
                move(address + target * stride, address + source * stride, stride)
        return
    for address, stride in buffers:
        rows = [ctypes.string_at(address + source * stride, stride) for _, source in moves]
        for (target, _), row in zip(moves, rows, strict=True):
            move(address + target * stride, row, stride)


_WORD = 0xFFFFFFFF


def murmur_hash32_cpu(seed: Tensor, positions: Tensor, col_indices: Tensor) -> Tensor:
    """MurmurHash3 (Appleby, x86, 32 bits, seed 0) of the 16 bytes seed, position, column, little-endian.

    Args:
        seed: uint64 ``[rows]``.
        positions: ``[rows]``, of which 32 bits count.
        col_indices: ``[columns]``, of which 32 bits count.

    Returns:
        uint32 ``[rows, columns]``.
    """
    # In 64 bits, cut to 32 after each step.
    seeds = seed.view(torch.int64)
    hashed = torch.zeros(1, dtype=torch.int64)
    for block in (seeds & _WORD, (seeds >> 32) & _WORD, positions.to(torch.int64) & _WORD):
        hashed = _mix(hashed, block)
    hashed = _mix(hashed.unsqueeze(1), col_indices.to(torch.int64).unsqueeze(0) & _WORD) ^ 16
    hashed = ((hashed ^ (hashed >> 16)) * 0x85EBCA6B) & _WORD
    hashed = ((hashed ^ (hashed >> 13)) * 0xC2B2AE35) & _WORD
    return (hashed ^ (hashed >> 16)).to(torch.uint32)


def _mix(hashed: Tensor, block: Tensor) -> Tensor:
    block = (block * 0xCC9E2D51) & _WORD
    block = (_rotated(block, 15) * 0x1B873593) & _WORD
    return (_rotated(hashed ^ block, 13) * 5 + 0xE6546B64) & _WORD


def _rotated(word: Tensor, bits: int) -> Tensor:
    return ((word << bits) | (word >> (32 - bits))) & _WORD


#: Called as an operator of torch, where the others are called as functions of the module. This file may be
#: loaded under two names, as SGLang's package and as this one's; torch wants an operator once.
_operators = torch.library.Library("sgl_kernel", "FRAGMENT")
if not hasattr(torch.ops.sgl_kernel, "murmur_hash32_cpu"):
    _operators.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor col_indices) -> Tensor")
    _operators.impl("murmur_hash32_cpu", murmur_hash32_cpu, "CPU")


def _ranges(rows: Tensor, starts: Tensor, ends: Tensor, pool_len: int) -> list[tuple[int, int, int]]:
    ranges = list(zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True))
    for row, start, end in ranges:
        if not 0 <= start <= end <= pool_len:
            raise IndexError(f"slots {start} to {end} of row {row}: the token table has {pool_len} columns")
    return ranges


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            f"sgl_kernel.{name} has no stand-in on the CPU engine (sglang_ddtree.cpu.sgl_kernel)"
        )

    refuse.__name__ = name
    return refuse
