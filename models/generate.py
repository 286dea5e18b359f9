"""Continue text with the target and keep what its layers say: what the drafts learn from."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from models.network import (
    GROWTH,
    HEAD,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    TAPS,
    Target,
    finish,
    project,
    rms_norm,
    rotary,
    shared,
)
from models.settings import Settings
from models.tokens import Encoded
from models.training import save

_TEMPERATURE = 0.8
"""A draft that has only seen what the target likes best puts all on it where two words are as good."""


@dataclass(frozen=True)
class Sequences:
    """Ids [N, T], the tapped layers' outputs [N, T, 3 * HIDDEN], and where the continuations begin [N]."""

    ids: Tensor
    features: Tensor
    begin: Tensor


class Decoder:
    """The target with a cache of keys and values."""

    def __init__(self, target: Target, dtype: Any) -> None:
        self.dtype = dtype
        self.embedding = target.embedding.detach()
        self.norm = target.norm.detach()
        self.head = target.head.detach().to(dtype)
        self.weights: list[Any] = []
        for layer in target.layers:
            weights = [one.detach() for one in layer.weights()]
            self.weights.append(tuple(one.to(dtype) for one in weights[:4]) + tuple(weights[4:]))
        # A target that hasn't grown has the same outputs at the layers it would have grown from.
        self.taps = TAPS if len(self.weights) == LAYERS else tuple(tap // GROWTH for tap in TAPS)

    def continue_text(self, prefixes: Tensor, length: int, temperature: float = 0.0) -> Sequences:
        """Continue prefixes [N, P] to ``length`` tokens: greedily, or sampled at a temperature above 0."""
        count, prefix = prefixes.shape
        shape = (len(self.weights), count, KV_HEADS, length, HEAD)
        keys, values = torch.empty(shape, dtype=self.dtype), torch.empty(shape, dtype=self.dtype)
        ids = torch.zeros(count, length, dtype=torch.long)
        ids[:, :prefix] = prefixes
        features = torch.empty(count, length, len(TAPS) * HIDDEN, dtype=self.dtype)
        all_cos, all_sin = rotary(torch.arange(length))
        start, end = 0, prefix
        with torch.no_grad():
            while start < length:
                x = F.embedding(ids[:, start:end], self.embedding)
                tapped = []
                for number, weights in enumerate(self.weights):
                    q, k, v = project(x, weights, all_cos[start:end], all_sin[start:end], self.dtype)
                    keys[number, :, :, start:end], values[number, :, :, start:end] = k, v
                    k, v = keys[number, :, :, :end], values[number, :, :, :end]
                    if end - start == 1:
                        # The heads that share keys become rows: no key is copied.
                        rows = q.reshape(count, KV_HEADS, HEADS // KV_HEADS, HEAD)
                        attended = F.scaled_dot_product_attention(rows, k, v).reshape(count, HEADS, 1, HEAD)
                    else:
                        attended = F.scaled_dot_product_attention(q, shared(k), shared(v), is_causal=True)
                    x = finish(x, attended, weights, self.dtype)
                    if number in self.taps:
                        tapped.append(x.to(self.dtype))
                features[:, start:end] = torch.cat(tapped, -1)
                if end < length:
                    logits = F.linear(rms_norm(x[:, -1], self.norm).to(self.dtype), self.head).float()
                    if temperature:
                        ids[:, end] = torch.multinomial(torch.softmax(logits / temperature, -1), 1)[:, 0]
                    else:
                        ids[:, end] = logits.argmax(-1)
                start, end = end, end + 1
        return Sequences(ids, features, torch.full((count,), prefix))


def generate(
    rank: int, settings: Settings, text: Path, weights: Path, folder: Path, seed: int, batches: int, size: int
) -> None:
    """One process's share: folder/RANK-NUMBER.pt. The very first batch continues held-out text."""
    decoder = Decoder(Target.from_published(load_file(weights)), torch.bfloat16)
    corpus, held_out = Encoded.load(text / "train.npz"), Encoded.load(text / "held_out.npz")
    for number in range(batches):
        path = folder / f"{rank}-{number}.pt"
        if path.exists():
            continue
        began = time.perf_counter()
        rng = np.random.default_rng([seed, rank, number])
        torch.manual_seed(int(rng.integers(2**31)))
        validation = rank == 0 and number == 0
        count = min(64, size) if validation else size
        prefix = 64 if validation else int(rng.integers(16, 128))
        prefixes = (held_out if validation else corpus).windows(count, prefix, rng)
        made = decoder.continue_text(prefixes, settings.length, 0.0 if validation else _TEMPERATURE)
        save({"ids": made.ids.to(torch.int16), "features": made.features, "begin": made.begin}, path)
        seconds = time.perf_counter() - began
        if rank == 0:
            print(f"  batch {number + 1}/{batches}: {count} sequences in {seconds:.0f} s", flush=True)


def load(folder: Path) -> tuple[Sequences, Sequences]:
    """(to train on, to validate on): all that ``generate`` wrote."""
    parts = [(path.name, torch.load(path, weights_only=True)) for path in sorted(folder.glob("*-*.pt"))]

    def joined(chosen: list[dict[str, Tensor]]) -> Sequences:
        ids = torch.cat([part["ids"] for part in chosen]).long()
        return Sequences(
            ids,
            torch.cat([part["features"] for part in chosen]),
            torch.cat([part["begin"] for part in chosen]),
        )

    train = [part for name, part in parts if name != "0-0.pt"]
    return joined(train), joined([part for name, part in parts if name == "0-0.pt"])
