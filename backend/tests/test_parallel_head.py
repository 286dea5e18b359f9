"""A head in two parts, in two processes: the same best tokens as in one; and one product for all requests."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as distributed
from sglang_ddtree import worker
from sglang_ddtree.tree import best_log_probs, build_tree_from_topk
from torch.utils._python_dispatch import TorchDispatchMode

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


class _Products(TorchDispatchMode):
    """Keeps the names of the matrix products that torch makes."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.bmm):
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_one_product_for_all_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batched product would read the head once for each request."""
    monkeypatch.setattr(worker, "unwrap_lora_layer", lambda layer: layer)
    monkeypatch.setattr(worker, "logits_processor", lambda worker: None)
    parallel = SimpleNamespace(tp_group=SimpleNamespace(world_size=1))
    monkeypatch.setattr(worker, "get_parallel", lambda: parallel)
    head = torch.nn.Linear(16, VOCABULARY, bias=False).requires_grad_(False)
    fake: Any = SimpleNamespace(
        model_runner=SimpleNamespace(model=SimpleNamespace(lm_head=head)),
        options=SimpleNamespace(topk_cap=4, budget=16),
        _recorder=SimpleNamespace(keeps_steps=False),
    )
    block = torch.randn(BATCH, DEPTH + 1, 16)
    with _Products() as products:
        values, tokens = worker.DDTreeWorker._best_tokens(fake, block[:, 1:])
    assert products.names == ["mm"]
    for row, position in [(0, 0), (2, 6)]:
        wanted = (head.weight @ block[row, position + 1]).log_softmax(-1).topk(4)
        assert tokens[row, position].tolist() == wanted.indices.tolist()
        torch.testing.assert_close(values[row, position].float(), wanted.values)
