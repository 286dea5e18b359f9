"""The tree builder against plain heaps, one node at a time, in one interleaved run on one thread.

    .venv-engine/bin/python benchmarks/tree_builder.py          (make benchmark does the set-up)

Two heaps: one gives the very tree of the builder, equals in the order of depth and rank path; the other
leaves the order of equals open, which is as little as a heap can do. All start from the same best tokens per
depth and end with the same kind of tensors. Times are medians; a ratio is the heap's time over the builder's.
Each timed call follows one of the same kind, so that no way pays for the caches that another has filled. The
last column is the same ratio where each call follows matrix products instead, as it does in a server.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from sglang_ddtree.tree import build_tree_from_topk
from torch import Tensor

DEPTH, VOCABULARY = 7, 512
WEIGHTS = [torch.ones(1024, 1024) for _ in range(4)]
ACTIVATIONS = torch.ones(64, 1024)


def heap(values: Tensor, tokens: Tensor, budget: int, ordered: bool) -> list[Tensor]:
    """Trees as tensors: tokens, parents, depths, ranks, scores.

    Args:
        values: ``[batch, depth, ranks]`` log-probabilities, descending.
        tokens: of the same shape.
        budget: nodes besides the root.
        ordered: whether equal scores pop by depth and rank path, or in any order.
    """
    trees: list[tuple[list[int], list[int], list[int], list[int], list[float]]] = []
    for rows, names in zip(values.tolist(), tokens.tolist(), strict=True):
        depths, ranks = len(rows), len(rows[0])
        nodes: list[int] = []
        parents: list[int] = []
        levels: list[int] = []
        places: list[int] = []
        scores: list[float] = []
        waiting: list[Any] = [(-rows[0][0], 1, (0,) if ordered else 0, 0, 0.0)]
        while waiting and len(nodes) < budget:
            negative, depth, path, parent, above = heapq.heappop(waiting)
            rank = path[-1] if ordered else path
            nodes.append(names[depth - 1][rank])
            parents.append(parent)
            levels.append(depth)
            places.append(rank)
            scores.append(-negative)
            if rank + 1 < ranks:
                sibling = (*path[:-1], rank + 1) if ordered else rank + 1
                heapq.heappush(waiting, (-(above + rows[depth - 1][rank + 1]), depth, sibling, parent, above))
            if depth < depths:
                child = (*path, 0) if ordered else 0
                score = negative - rows[depth][0]
                heapq.heappush(waiting, (score, depth + 1, child, len(nodes), -negative))
        trees.append((nodes, parents, levels, places, scores))
    return [torch.tensor(column) for column in zip(*trees, strict=True)]


def forward() -> None:
    """What a model leaves of the caches."""
    for weight in WEIGHTS:
        ACTIVATIONS @ weight


def medians(
    ways: list[Callable[[], object]], rounds: int, before: Callable[[], object] | None = None
) -> list[float]:
    """Milliseconds of each way, each timed call right after ``before``, which is the way itself if None."""
    times: list[list[float]] = [[] for _ in ways]
    for _ in range(rounds + 2):
        for way, taken in zip(ways, times, strict=True):
            (before or way)()
            start = time.perf_counter()
            way()
            taken.append(time.perf_counter() - start)
    return [statistics.median(taken[2:]) * 1e3 for taken in times]


def main() -> None:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(description="The tree builder against plain heaps.")
    parser.add_argument("--rounds", type=int, default=31, help="interleaved rounds (default: %(default)s)")
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(1)
    print(
        f"Depth {DEPTH}, vocabulary {VOCABULARY}, one thread, medians of {rounds} interleaved rounds, ms.\n"
    )
    print("| topk cap | budget | batch | builder | heap, same order | ratio | any order | ratio | cold |")
    print("|---:|---:|---:|---:|---:|---:|---:|---:|---:|")
    for cap, budget, batch in itertools.product((4, 8, 32), (16, 64, 256, 1024), (1, 8)):
        logits = torch.randn(batch, DEPTH, VOCABULARY, generator=generator) * 3
        values, tokens = torch.log_softmax(logits, -1).topk(min(cap, budget), -1)
        ways: list[Callable[[], object]] = [
            partial(build_tree_from_topk, values, tokens, budget),
            partial(heap, values, tokens, budget, ordered=True),
            partial(heap, values, tokens, budget, ordered=False),
        ]
        ours, ordered, plain = medians(ways, rounds)
        cold, cold_heap = medians(ways[:2], rounds, before=forward)
        print(
            f"| {cap} | {budget} | {batch} | {ours:.3f} | {ordered:.3f} | {ordered / ours:.1f} "
            f"| {plain:.3f} | {plain / ours:.1f} | {cold_heap / cold:.1f} |"
        )


if __name__ == "__main__":
    main()
