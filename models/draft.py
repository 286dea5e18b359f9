"""Train a draft on the target's own continuations."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.generate import Sequences, load
from models.network import Draft, block_logits, compiled, draft_hidden, layer_parameters
from models.optimiser import Optimiser
from models.settings import Settings
from models.tokens import MASK
from models.training import PROCESSES, cosine, fit


@dataclass(frozen=True)
class Recipe:
    """How one draft is trained."""

    name: str
    block: int
    steps: int
    warm: bool = False
    """Whether it starts from the draft of block 8 instead of from nothing."""


def train(
    rank: int, settings: Settings, recipe: Recipe, weights: Path, generated: Path, start: Path, folder: Path
) -> None:
    """One process of the training. Writes folder/draft.safetensors (float32).

    ``weights`` are the target's, ``generated`` its continuations, ``start`` the draft of a warm recipe.
    """
    torch.manual_seed(settings.seed)
    target = load_file(weights)
    embedding = target["model.embed_tokens.weight"].to(torch.bfloat16).float()
    head = target["lm_head.weight"]
    made, held_out = load(generated)
    block, count = recipe.block, settings.draft_blocks // recipe.block
    size = settings.draft_batch // PROCESSES
    draft = Draft.from_published(load_file(start)) if recipe.warm else Draft()
    matrices, norms = layer_parameters(list(draft.layers))
    optimiser = Optimiser(
        matrices, [draft.fuse, draft.hidden_norm, draft.norm, *norms], matrix_rate=0.015, other_rate=1e-3
    )
    # Earlier positions count more, as a later one is worth something only after them.
    importance = torch.exp(-torch.arange(block - 1) / (block / 2))
    hidden = compiled(draft_hidden)

    def proposals(source: Sequences, chosen: Tensor, anchors: Tensor) -> tuple[Tensor, Tensor]:
        ids = source.ids[chosen]
        logits = block_logits(
            draft, embedding, head, ids, source.features[chosen], anchors, block, MASK, torch.bfloat16, hidden
        )
        following = anchors[..., None] + torch.arange(1, block)
        return logits, ids.gather(1, following.flatten(1)).view_as(following)

    def loss(step: int) -> Tensor:
        rng = np.random.default_rng([settings.seed, rank, step, block])
        chosen = torch.from_numpy(rng.integers(0, len(made.ids), size))
        logits, wanted = proposals(
            made, chosen, _anchors(made.begin[chosen], count, settings.length - block, rng)
        )
        losses = F.cross_entropy(logits.flatten(0, 2), wanted.flatten(), reduction="none").view_as(wanted)
        return (losses * importance).sum(-1).mean() / importance.sum()

    def report() -> str:
        rng = np.random.default_rng(settings.seed)
        lengths = []
        with torch.no_grad():
            for first in range(0, len(held_out.ids) - size + 1, size):
                chosen = torch.arange(first, first + size)
                anchors = torch.from_numpy(rng.integers(64, settings.length - block, (size, count)))
                logits, wanted = proposals(held_out, chosen, anchors)
                lengths.append((logits.argmax(-1) == wanted).long().cumprod(-1).sum(-1).float().mean().item())
        return f"held-out accept length {1 + np.mean(lengths):.3f}"

    def rate(step: int) -> float:
        return cosine(step / recipe.steps, least=0.02) * min(1.0, (step + 1) / 50)

    every = max(1, settings.checkpoint_every)
    fit(rank, draft, optimiser, loss, recipe.steps, rate, folder / "draft.pt", every, report)
    if rank == 0:
        new = folder / "draft.new"
        save_file({name: value.float().contiguous() for name, value in draft.published().items()}, new)
        new.replace(folder / "draft.safetensors")


def _anchors(begin: Tensor, count: int, last: int, rng: np.random.Generator) -> Tensor:
    """Bonus positions [N, count], most of them in the continuation and more of them early in it."""
    share = torch.from_numpy(rng.random((len(begin), count))) ** 1.3
    inside = torch.from_numpy(rng.random((len(begin), count))) < 0.85
    least = torch.where(inside, begin[:, None] - 1, torch.ones_like(begin)[:, None])
    return (least + share * (last - least)).long()
