"""Train the target: a few layers for most of the steps, then grown to all."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from models.network import SHALLOW, Target, causal_layer, compiled, layer_parameters
from models.optimiser import Optimiser
from models.settings import Settings
from models.tokens import Encoded
from models.training import PROCESSES, cosine, fit

_SHALLOW_SHARE = 0.7
"""How far the schedule of the rates is when the target grows."""


def train(
    rank: int, settings: Settings, text: Path, folder: Path, seed: int, shallow_steps: int, deep_steps: int
) -> None:
    """One process of the training. Writes folder/target.safetensors (float32).

    ``text`` holds train.npz and held_out.npz. With no ``deep_steps`` the target stays shallow.
    """
    torch.manual_seed(seed)
    corpus, held_out = Encoded.load(text / "train.npz"), Encoded.load(text / "held_out.npz")
    share = _SHALLOW_SHARE if deep_steps else 1.0

    def run(target: Target, name: str, steps: int, scale: tuple[float, float], warm_up: int) -> None:
        layer = compiled(causal_layer)
        matrices, norms = layer_parameters(list(target.layers))
        optimiser = Optimiser(
            matrices, [target.embedding, target.head, target.norm, *norms], matrix_rate=0.02, other_rate=2e-3
        )

        def loss_of(windows: Tensor) -> Tensor:
            logits = target(windows[:, :-1], layer)
            return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())

        def loss(step: int) -> Tensor:
            rng = np.random.default_rng([seed, rank, step, len(target.layers)])
            return loss_of(corpus.windows(settings.batch // PROCESSES, settings.length + 1, rng))

        def held_out_loss() -> str:
            rng = np.random.default_rng(seed)
            count = settings.batch // PROCESSES
            with torch.no_grad():
                losses = [loss_of(held_out.windows(count, settings.length + 1, rng)).item() for _ in range(8)]
            return f"held out {np.mean(losses):.4f}"

        def rate(step: int) -> float:
            start, end = scale
            return cosine(start + (end - start) * step / steps) * min(1.0, (step + 1) / warm_up)

        every = settings.checkpoint_every if len(target.layers) == SHALLOW else settings.checkpoint_every // 2
        checkpoint = folder / f"{name}.pt"
        fit(rank, target, optimiser, loss, steps, rate, checkpoint, max(1, every), held_out_loss)

    target = Target(SHALLOW, torch.bfloat16)
    run(target, "shallow", shallow_steps, (0.0, share), warm_up=100)
    if deep_steps:
        target = target.grown()
        run(target, "deep", deep_steps, (share, 1.0), warm_up=15)
    if rank == 0:
        tensors = {name: value.float().contiguous() for name, value in target.published().items()}
        new = folder / "target.new"
        save_file(tensors, new)
        new.replace(folder / "target.safetensors")
