"""What a running server's switches gain and cost: fixed budgets, the adaptive one, recording.

    .venv-engine/bin/python benchmarks/switches.py adaptive     (make benchmark does the set-up)
    .venv-engine/bin/python benchmarks/switches.py trace

One server with the demo pair, one prompt at a time. In every round each prompt runs once under each setting,
the settings in an order that moves on from prompt to prompt, so that a ratio compares neighbours in time.
Ratios are of sums over all prompts, with a 95 % interval from resampling the prompts: the same prompt says
the same again in every round, so that rounds alone would not tell how far other prompts would agree.
"""

from __future__ import annotations

import argparse
import inspect
import json
import random
import sys
import tempfile
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "backend/tests"))

import engine
import requests
from prompts import PROMPTS as FEW

MOST, TOPK_CAP, TOKENS = 64, 8, 128
SOURCE = inspect.getsource(textwrap) + inspect.getsource(json)
PROMPTS = [*FEW, *(SOURCE[start : start + 200] for start in range(0, 24 * 900, 900))]
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


def interval(above: Sequence[float], below: Sequence[float]) -> tuple[float, float, float]:
    """Ratio of two sums over prompts and its 95 % interval, from 2,000 resamplings of the prompts."""
    draw = random.Random(1)
    places = range(len(above))

    def ratio(chosen: Sequence[int]) -> float:
        return sum(above[i] for i in chosen) / sum(below[i] for i in chosen)

    ratios = sorted(ratio(draw.choices(places, k=len(places))) for _ in range(2000))
    return ratio(places), ratios[49], ratios[-50]


def main() -> None:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(description="What a running server's switches gain and cost.")
    parser.add_argument("what", choices=SETTINGS)
    parser.add_argument(
        "--rounds", type=int, default=2, help="rounds over all prompts (default: %(default)s)"
    )
    given = parser.parse_args()
    if given.rounds < 1:
        parser.error(f"--rounds is {given.rounds}, expected at least 1")
    settings = SETTINGS[given.what]
    names = list(settings)
    # Sums over the rounds, by prompt.
    seconds = {name: [0.0] * len(PROMPTS) for name in names}
    steps = {name: [0] * len(PROMPTS) for name in names}
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
                        seconds[name][place] += taken
                        steps[name][place] += count
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
        speed, *speeds = interval(seconds[best], seconds[name])
        ours, theirs = (
            [t / n for t, n in zip(seconds[arm], steps[arm], strict=True)] for arm in (name, best)
        )
        cost, *costs = interval(ours, theirs)
        whole, count = sum(seconds[name]), sum(steps[name])
        print(
            f"| {name} | {total / whole:.1f} | {total / count:.2f} | {whole / count * 1e3:.2f} "
            f"| {speed:.3f} | {speeds[0]:.3f}-{speeds[1]:.3f} | {cost:.3f} | {costs[0]:.3f}-{costs[1]:.3f} |"
        )


if __name__ == "__main__":
    main()
