"""What a running server's switches gain and cost: fixed budgets, the adaptive one, recording.

    .venv-engine/bin/python benchmarks/switches.py adaptive     (make benchmark does the set-up)
    .venv-engine/bin/python benchmarks/switches.py trace

One server with the demo pair, one prompt at a time. In every round each prompt runs once under each setting,
the settings in an order that moves on from prompt to prompt, so that a ratio compares neighbours in time.
Ratios are medians over these pairs, with a 95 % interval from resampling them.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "backend/tests"))

import engine
import requests
from prompts import PROMPTS

MOST, TOPK_CAP, TOKENS = 64, 8, 128
FIXED = (4, 8, 12, 16, 24, 32, 48, 64)
OFF = {"ddtree_budget": MOST, "ddtree_adaptive": 0, "ddtree_record": 0}
SETTINGS = {
    "adaptive": {
        **{f"budget {budget}": {"ddtree_budget": budget} for budget in FIXED},
        "adaptive": {"ddtree_adaptive": 1},
    },
    "trace": {"off": {"ddtree_budget": 16}, "trace": {"ddtree_budget": 16, "ddtree_record": 1}},
}


def switch(server: engine.Server, values: dict[str, int]) -> None:
    """Put a setting in force."""
    reply = requests.post(
        f"{server.url}/set_internal_state", json={"server_args": {**OFF, **values}}, timeout=60
    )
    if reply.json() != [True]:
        raise SystemExit(f"the server refused {values}: {reply.text[:300]}")


def measure(server: engine.Server, prompt: str) -> tuple[float, int]:
    """Seconds and verify steps of one answer."""
    start = time.perf_counter()
    meta: dict[str, Any] = server.generate(prompt, TOKENS)["meta_info"]
    return time.perf_counter() - start, int(meta["spec_verify_ct"])


def interval(ratios: Sequence[float]) -> tuple[float, float, float]:
    """Median and its 95 % interval, from 2,000 resamplings."""
    draw = random.Random(1)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(2000))
    return statistics.median(ratios), medians[49], medians[-50]


def main() -> None:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(description="What a running server's switches gain and cost.")
    parser.add_argument("what", choices=SETTINGS)
    parser.add_argument(
        "--rounds", type=int, default=4, help="rounds over all prompts (default: %(default)s)"
    )
    given = parser.parse_args()
    settings = SETTINGS[given.what]
    names = list(settings)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    steps: dict[str, list[int]] = {name: [] for name in names}
    with (
        tempfile.TemporaryDirectory(prefix="switches-") as folder,
        engine.serve(
            engine.tree_flags(MOST, TOPK_CAP), Path(folder) / "log", {"SGLANG_DDTREE_RECORD_DIR": folder}
        ) as server,
    ):
        for number in range(-1, given.rounds):  # the first warms up
            for place, prompt in enumerate(PROMPTS):
                first = (place + number) % len(names)
                for name in names[first:] + names[:first]:
                    switch(server, settings[name])
                    taken, count = measure(server, prompt)
                    if number >= 0:
                        seconds[name].append(taken)
                        steps[name].append(count)
            print(f"round {number + 1} of {given.rounds}", file=sys.stderr, flush=True)
    best = min(names, key=lambda name: sum(seconds[name]) if name != given.what else float("inf"))
    total = len(PROMPTS) * TOKENS * given.rounds
    print(
        f"\nBudget at most {MOST}, topk cap {TOPK_CAP}, {len(PROMPTS)} prompts of {TOKENS} tokens, "
        f"{given.rounds} rounds; ratios to {best}.\n"
    )
    print("| setting | tok/s | accept length | ms a step | speed | 95 % | time of a step | 95 % |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for name in names:
        faster = [b / s for s, b in zip(seconds[name], seconds[best], strict=True)]
        step = [
            (s / n) / (b / m)
            for s, n, b, m in zip(seconds[name], steps[name], seconds[best], steps[best], strict=True)
        ]
        (speed, *speeds), (cost, *costs) = interval(faster), interval(step)
        whole, count = sum(seconds[name]), sum(steps[name])
        print(
            f"| {name} | {total / whole:.1f} | {total / count:.2f} | {whole / count * 1e3:.2f} "
            f"| {speed:.3f} | {speeds[0]:.3f}-{speeds[1]:.3f} | {cost:.3f} | {costs[0]:.3f}-{costs[1]:.3f} |"
        )


if __name__ == "__main__":
    main()
