"""What all trainings share: two processes, one reduction a step, checkpoints, a schedule in steps.

Two processes of one thread each are faster than one process of two threads: nothing waits inside a step.
"""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed
import torch.multiprocessing
from torch import Tensor, nn

from models.optimiser import Optimiser

PROCESSES = 2


def in_processes(function: Callable[..., None], *arguments: Any) -> None:
    """Call ``function(rank, *arguments)`` in PROCESSES processes that can reduce tensors among them."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_enter, (f"file://{folder}/store", function, arguments), nprocs=PROCESSES)


def _enter(rank: int, store: str, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    # A training may be stopped for hours and go on.
    torch.distributed.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=PROCESSES, timeout=timedelta(days=30)
    )
    function(rank, *arguments)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def save(value: Any, path: Path) -> None:
    """torch.save in one step: a reader finds the old file or the new one."""
    new = path.with_suffix(".new")
    torch.save(value, new)
    new.replace(path)


def cosine(progress: float, flat: float = 0.3, least: float = 0.03) -> float:
    """The rate's share: 1 for the first ``flat`` of the training, then half a cosine down to ``least``."""
    if progress < flat:
        return 1.0
    return max(least, 0.5 + 0.5 * math.cos(math.pi * (progress - flat) / (1 - flat)))


def fit(
    rank: int,
    module: nn.Module,
    optimiser: Optimiser,
    loss: Callable[[int], Tensor],
    steps: int,
    scale: Callable[[int], float],
    checkpoint: Path,
    every: int,
    report: Callable[[], str],
) -> None:
    """Train ``module`` in place for ``steps`` steps, going on from the checkpoint if there is one.

    ``loss(step)`` is this process's loss and must depend on nothing but its step. ``report`` is called by
    process 0 with every checkpoint.
    """
    first = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        module.load_state_dict(saved["module"])
        optimiser.load_state(saved["optimiser"])
        first = saved["step"]
    mean, began = math.nan, time.perf_counter()
    for step in range(first, steps):
        value = loss(step)
        value.backward()
        _average(list(module.parameters()))
        optimiser.step(scale(step))
        mean = value.item() if math.isnan(mean) else 0.98 * mean + 0.02 * value.item()
        done = step + 1
        if rank == 0 and (done % every == 0 or done == steps):
            pace = (done - first) / (time.perf_counter() - began)
            print(f"  step {done}/{steps}  loss {mean:.4f}  {report()}  {pace:.2f} steps/s", flush=True)
            save({"module": module.state_dict(), "optimiser": optimiser.state(), "step": done}, checkpoint)


def _average(parameters: list[Tensor]) -> None:
    """Replace each gradient by its mean over the processes."""
    joined = torch.cat([one.grad.flatten() for one in parameters])
    torch.distributed.all_reduce(joined)
    joined /= PROCESSES
    for one, mean in zip(parameters, joined.split([one.numel() for one in parameters]), strict=True):
        one.grad.copy_(mean.view_as(one))


def quiet_compiler() -> None:
    """Keep torch.compile's own processes down to one, as the cores are busy."""
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
