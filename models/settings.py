"""What decides the result of a training. Everything is counted in steps, so the clock has no say."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """One training from nothing. The defaults are those of `make models`."""

    seed: int = 1
    library_characters: int = 400_000
    walks: int = 280
    talks: int = 280
    length: int = 384
    """Tokens of a training window and of a generated sequence."""
    batch: int = 8
    """Windows a step, over both processes."""
    shallow_steps: int = 2600
    deep_steps: int = 300
    generate_batches: int = 4
    """Batches of each process."""
    generate_size: int = 256
    draft_batch: int = 24
    draft_blocks: int = 192
    """Tokens in the blocks that are drafted at once in one sequence."""
    draft_steps: int = 1200
    block16_steps: int = 350
    weak_steps: int = 40
    other_steps: int = 250
    other_size: int = 96
    """Sequences that the mismatched draft's target generates, a process."""
    mismatched_steps: int = 100
    checkpoint_every: int = 100
    greedy_tokens: int = 256


SMOKE = Settings(
    library_characters=150_000,
    walks=16,
    talks=30,
    shallow_steps=16,
    deep_steps=6,
    generate_batches=2,
    generate_size=24,
    draft_batch=8,
    draft_steps=12,
    block16_steps=8,
    weak_steps=4,
    other_steps=6,
    other_size=12,
    mismatched_steps=4,
    checkpoint_every=5,
    greedy_tokens=48,
)
"""The whole pipeline in some minutes; the result is worth nothing."""
