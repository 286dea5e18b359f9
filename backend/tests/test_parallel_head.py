"""A head in two parts, in two processes: the same best tokens as in one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as distributed
from sglang_ddtree.tree import best_log_probs, build_tree_from_topk

PARTS, BATCH, DEPTH, VOCABULARY = 2, 3, 7, 301


def logits(levels: int | None) -> torch.Tensor:
    """With ``levels`` few values only, so that equal ones lie in both parts."""
    generator = torch.Generator().manual_seed(4)
    if levels is None:
        return torch.randn(BATCH, DEPTH, VOCABULARY, generator=generator) * 3
    return torch.randint(levels, (BATCH, DEPTH, VOCABULARY), generator=generator).float()


def part(rank: int, folder: str, levels: int | None, k: int) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=PARTS)

    def gather(tensor: torch.Tensor) -> torch.Tensor:
        made = [torch.empty_like(tensor) for _ in range(PARTS)]
        distributed.all_gather(made, tensor.contiguous())
        return torch.cat(made, dim=-1)

    cut = VOCABULARY // 2
    mine = logits(levels)[..., slice(0, cut) if rank == 0 else slice(cut, None)]
    torch.save(best_log_probs(mine, k, rank * cut, gather), f"{folder}/{rank}")
    distributed.destroy_process_group()


@pytest.mark.parametrize(("levels", "k"), [(None, 8), (None, 1), (4, 8), (1, 16)])
def test_two_parts_are_one(tmp_path: Path, levels: int | None, k: int) -> None:
    torch.multiprocessing.spawn(part, args=(str(tmp_path), levels, k), nprocs=PARTS)
    whole: Any = best_log_probs(logits(levels), k)
    made = [torch.load(tmp_path / str(rank)) for rank in range(PARTS)]
    for values, tokens in made:
        assert torch.equal(tokens, whole[1])
        assert torch.allclose(values, whole[0], atol=1e-6)
        assert torch.equal(values, made[0][0])
        tree, expected = build_tree_from_topk(values, tokens, 24), build_tree_from_topk(*whole, 24)
        assert torch.equal(tree.tokens, expected.tokens)


def test_log_probabilities_are_of_the_whole_vocabulary() -> None:
    values, tokens = best_log_probs(torch.tensor([[0.6, 0.1, 0.3]]).log() + 5.0, 2)
    assert tokens.tolist() == [[0, 2]]
    assert values.exp().tolist()[0] == pytest.approx([0.6, 0.3], rel=1e-5)
