"""The stand-in kernels of the CPU engine against small examples worked out by hand."""

from __future__ import annotations

import math
import struct
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.radix_attention import AttentionType
from sglang_ddtree.cpu import attention, sgl_kernel


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values)


def test_assign_req_to_token_pool() -> None:
    table = torch.zeros(3, 6, dtype=torch.int32)
    sgl_kernel.assign_req_to_token_pool_cpu(ints(2, 0), table, ints(1, 4), ints(4, 6), ints(7, 8, 9, 5, 6), 6)
    assert table.tolist() == [[0, 0, 0, 0, 5, 6], [0] * 6, [0, 7, 8, 9, 0, 0]]


def test_assign_extend_cache_locs() -> None:
    table = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]], dtype=torch.int32)
    slots = torch.zeros(5, dtype=torch.int64)
    sgl_kernel.assign_extend_cache_locs_cpu(ints(1, 0), table, ints(0, 2), ints(3, 4), slots, 4)
    assert slots.tolist() == [5, 6, 7, 3, 4]


@pytest.mark.parametrize("ends", [(5, 4), (1, 2)])
def test_a_range_outside_its_row_is_refused(ends: tuple[int, int]) -> None:
    """Torch would cut the slice short, or wrap it, and corrupt a neighbour's sequence."""
    table = torch.zeros(2, 4, dtype=torch.int32)
    with pytest.raises(IndexError, match="4 columns"):
        sgl_kernel.assign_req_to_token_pool_cpu(ints(0, 1), table, ints(2, 2), ints(*ends), torch.zeros(9), 4)


def test_copy_all_layer_kv_cache_reads_before_it_writes() -> None:
    """Rows 3 and 5 move to 1 and 3: row 3 is source of one move and target of the other."""
    first = torch.arange(12, dtype=torch.float32).view(6, 2)
    second = torch.arange(18, dtype=torch.float32).view(6, 3) * 10
    expected = [buffer.clone() for buffer in (first, second)]
    for buffer in expected:
        buffer[1], buffer[3] = buffer[3].clone(), buffer[5].clone()
    pointers = torch.tensor([first.data_ptr(), second.data_ptr()], dtype=torch.uint64)
    sgl_kernel.copy_all_layer_kv_cache_cpu(pointers, ints(8, 12), ints(1, 3, 4), ints(3, 5, 4))
    assert torch.equal(first, expected[0])
    assert torch.equal(second, expected[1])


def test_other_names_import_and_refuse_to_run() -> None:
    with pytest.raises(NotImplementedError, match="gelu_quick"):
        sgl_kernel.gelu_quick(1)


def murmur3(data: bytes) -> int:
    """MurmurHash3 for 32 bits with seed 0, byte by byte as published."""
    hashed = 0
    tail = len(data) % 4
    for i in range(0, len(data) - tail + (4 if tail else 0), 4):
        word = int.from_bytes(data[i : i + 4], "little") * 0xCC9E2D51 & 0xFFFFFFFF
        word = ((word << 15 | word >> 17) & 0xFFFFFFFF) * 0x1B873593 & 0xFFFFFFFF
        hashed ^= word
        if len(data[i : i + 4]) == 4:
            hashed = ((hashed << 13 | hashed >> 19) & 0xFFFFFFFF) * 5 + 0xE6546B64 & 0xFFFFFFFF
    hashed ^= len(data)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        hashed = (hashed ^ hashed >> shift) * factor & 0xFFFFFFFF
    return hashed ^ hashed >> 16


def test_murmur_hash() -> None:
    assert murmur3(b"The quick brown fox jumps over the lazy dog") == 0x2E4FF723  # a published value
    seeds, positions, columns = [0, 42, 2**63 + 5, 2**64 - 1], [0, 1, 99, 2**31], [0, 1, 31999]
    made = torch.ops.sgl_kernel.murmur_hash32_cpu.default(
        torch.tensor(seeds, dtype=torch.uint64), ints(*positions), ints(*columns)
    )
    assert made.dtype == torch.uint32
    assert made.tolist() == [
        [murmur3(struct.pack("<QII", seed, position, column)) for column in columns]
        for seed, position in zip(seeds, positions, strict=True)
    ]


#: Two requests of three rows each: prefixes of two slots and of none, then the rows' own.
PREFIXES, WIDTH = (2, 0), 3
SLOTS = ((6, 1, 4, 5, 2), (0, 3, 7))
FORK = ((1, 0, 0), (1, 1, 0), (1, 0, 1))
SEEN_BY = {
    "causal": ((1, 0, 0), (1, 1, 0), (1, 1, 1)),
    "all": ((1, 1, 1),) * 3,
    "tree": FORK,
}
"""Which of a request's own rows each of them sees; the prefix is seen by all."""


class _Pool:
    """Keys and values of one layer, ``[slots, heads, size]``."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.keys, self.values = keys, values

    def get_key_buffer(self, layer: int) -> torch.Tensor:
        return self.keys

    def get_value_buffer(self, layer: int) -> torch.Tensor:
        return self.values


def verify_attention(
    kind: str, query: torch.Tensor, pool: _Pool, layers: int = 1, requests: int = 2
) -> list[torch.Tensor]:
    """What the hooks make of a verify of the first of the requests, layer by layer."""
    table = torch.zeros(2, 8, dtype=torch.int32)
    mask = []
    for row, (slots, prefix) in enumerate(zip(SLOTS[:requests], PREFIXES[:requests], strict=True)):
        table[row, : len(slots)] = torch.tensor(slots)
        mask += [seen for own in FORK for seen in (*[1] * prefix, *own)]
    backend = SimpleNamespace(
        req_to_token_pool=SimpleNamespace(req_to_token=table), token_to_kv_pool=pool, ddtree_verify=None
    )
    batch: Any = SimpleNamespace(
        forward_mode=SimpleNamespace(is_target_verify=lambda: True),
        spec_info=SimpleNamespace(
            num_tokens_per_req=WIDTH,
            custom_mask=torch.tensor(mask, dtype=torch.bool) if kind == "tree" else None,
        ),
        batch_size=requests,
        req_pool_indices=ints(*range(requests)),
        seq_lens=ints(*PREFIXES[:requests]),
        out_cache_loc=torch.cat([ints(*own[-WIDTH:]) for own in SLOTS[:requests]]),
    )
    layer: Any = SimpleNamespace(
        tp_q_head_num=4,
        tp_k_head_num=2,
        qk_head_dim=8,
        v_head_dim=8,
        layer_id=0,
        scaling=0.5,
        attn_type=AttentionType.ENCODER_ONLY if kind == "all" else AttentionType.DECODER,
    )
    attention.plan_verify(backend, batch)

    def never(*arguments: Any) -> torch.Tensor:
        raise AssertionError("the backend's own way knows no verify")

    flat: Any = query.flatten(1)
    return [
        attention.forward_extend(never, backend, flat, None, None, layer, batch)  # type: ignore[arg-type]
        for _ in range(layers)
    ]


@pytest.mark.parametrize("kind", SEEN_BY)
def test_verify_attention(kind: str) -> None:
    """Against a softmax over the slots that a row sees, one row and head after the other."""
    torch.manual_seed(1)
    pool = _Pool(torch.randn(8, 2, 8), torch.randn(8, 2, 8))
    query = torch.randn(2 * WIDTH, 4, 8)
    for found in verify_attention(kind, query, pool, layers=2):
        for row, of_heads in enumerate(found.view(2 * WIDTH, 4, 8)):
            request, own = divmod(row, WIDTH)
            prefix = PREFIXES[request]
            seen = [*SLOTS[request][:prefix]]
            seen += [SLOTS[request][prefix + i] for i in range(WIDTH) if SEEN_BY[kind][own][i]]
            for head, out in enumerate(of_heads):
                # Two heads of the query share one of the keys.
                scores = [0.5 * float(query[row, head] @ pool.keys[slot, head // 2]) for slot in seen]
                weights = [math.exp(score - max(scores)) for score in scores]
                wanted = sum(w * pool.values[slot, head // 2] for w, slot in zip(weights, seen, strict=True))
                torch.testing.assert_close(out, wanted / sum(weights))


@pytest.mark.parametrize("unowned", [0, 2])
def test_verify_attention_of_fewer_requests_than_rows(unowned: int) -> None:
    """The first request's rows are what they are beside the second; rows that none owns are zero."""
    torch.manual_seed(2)
    pool = _Pool(torch.randn(8, 2, 8), torch.randn(8, 2, 8))
    query = torch.randn(2 * WIDTH, 4, 8)
    (both,) = verify_attention("tree", query, pool)
    (alone,) = verify_attention("tree", query[: WIDTH + unowned], pool, requests=1)
    assert alone.shape == (WIDTH + unowned, 4 * 8)
    torch.testing.assert_close(alone[:WIDTH], both[:WIDTH])
    assert not alone[WIDTH:].any()


def test_layers_share_what_a_row_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model has tens of layers, and a mask of one forward is the same in all of them."""
    given = []
    own = attention.scaled_dot_product_attention

    def watched(*tensors: torch.Tensor, attn_mask: torch.Tensor | None, **arguments: Any) -> torch.Tensor:
        given.append(attn_mask)
        return own(*tensors, attn_mask=attn_mask, **arguments)

    monkeypatch.setattr(attention, "scaled_dot_product_attention", watched)
    pool = _Pool(torch.randn(8, 2, 8), torch.randn(8, 2, 8))
    verify_attention("causal", torch.randn(2 * WIDTH, 4, 8), pool, layers=3)
    assert len(given) == 6
    assert len({id(mask) for mask in given}) == 2
    assert all(mask is not None and mask.is_floating_point() for mask in given)
