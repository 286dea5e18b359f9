"""What a running server's switches gain and cost: fixed budgets, the adaptive one, recording.

    .venv-engine/bin/python benchmarks/switches.py adaptive     (make benchmark does the set-up)
    .venv-engine/bin/python benchmarks/switches.py trace

One server with the demo pair, one prompt at a time. In every round each prompt runs once under each setting,
the settings in an order that moves on from prompt to prompt, so that a ratio compares neighbours in time.
Ratios are of sums over all prompts, with a 95 % interval from resampling the prompts: the same prompt says
the same again in every round, so that rounds alone would not tell how far other prompts would agree. The
best fixed budget that a round is compared with is the best of other rounds, if there are any.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "backend/tests"))

import engine
import requests
from prompts import PROMPTS as FEW
from prompts import TEXT

MOST, TOPK_CAP, TOKENS = 64, 8, 128
PROMPTS = [*FEW, *(TEXT[start : start + 200] for start in range(0, 24 * 900, 900))]
FIXED = (4, 8, 12, 15, 24, 32, 64)
OFF = {"ddtree_budget": MOST, "ddtree_adaptive": 0, "ddtree_record": 0}
#: Figures by setting, round and prompt.
Figures = dict[str, list[list[float]]]
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


def best_elsewhere(seconds: Figures) -> list[str]:
    """For each round the setting that took least in those that are odd where it is even, and the other way.

    The best of a round's own would be partly the luckiest, and nothing would come up to it.
    """
    rounds = range(len(next(iter(seconds.values()))))

    def best(others: Sequence[int]) -> str:
        return min(seconds, key=lambda name: sum(sum(seconds[name][other]) for other in others))

    return [best([other for other in rounds if (other - own) % 2] or [own]) for own in rounds]


def by_prompt(rounds: Sequence[Sequence[float]]) -> list[float]:
    """Sums over the rounds of figures ``[rounds][prompts]``."""
    return [sum(column) for column in zip(*rounds, strict=True)]


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
    # By setting, round and prompt.
    seconds: Figures = {name: [] for name in names}
    steps: Figures = {name: [] for name in names}
    with (
        tempfile.TemporaryDirectory(prefix="switches-") as folder,
        engine.serve(
            engine.tree_flags(MOST, TOPK_CAP), Path(folder) / "log", {"SGLANG_DDTREE_RECORD_DIR": folder}
        ) as server,
    ):
        for number in range(-1, given.rounds):  # the first warms up
            own: dict[str, list[tuple[float, int]]] = {name: [] for name in names}
            for place, prompt in enumerate(PROMPTS):
                first = (place + number) % len(names)
                for name in names[first:] + names[:first]:
                    switch(server, settings[name])
                    own[name].append(measure(server, prompt))
            for name in names if number >= 0 else []:
                seconds[name].append([taken for taken, _ in own[name]])
                steps[name].append([count for _, count in own[name]])
            print(f"round {number + 1} of {given.rounds}", file=sys.stderr, flush=True)
    fixed = [name for name in names if name != given.what]
    best = best_elsewhere({name: seconds[name] for name in fixed})
    compared = ", ".join(dict.fromkeys(best))
    if len(fixed) > 1 and given.rounds > 1:
        compared += ", the best of the other rounds"
    total = len(PROMPTS) * TOKENS * given.rounds
    print(
        f"\nBudget at most {MOST}, topk cap {TOPK_CAP}, {len(PROMPTS)} prompts of {TOKENS} tokens, "
        f"{given.rounds} rounds; ratios to {compared}.\n"
    )
    print("| setting | tok/s | accept length | ms a step | speed | 95 % | time of a step | 95 % |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    best_seconds = by_prompt([seconds[name][number] for number, name in enumerate(best)])
    best_steps = by_prompt([steps[name][number] for number, name in enumerate(best)])
    best_ms = [taken / count for taken, count in zip(best_seconds, best_steps, strict=True)]
    for name in names:
        own_seconds, own_steps = by_prompt(seconds[name]), by_prompt(steps[name])
        speed, *speeds = interval(best_seconds, own_seconds)
        own_ms = [taken / count for taken, count in zip(own_seconds, own_steps, strict=True)]
        cost, *costs = interval(own_ms, best_ms)
        whole, count = sum(own_seconds), sum(own_steps)
        print(
            f"| {name} | {total / whole:.1f} | {total / count:.2f} | {whole / count * 1e3:.2f} "
            f"| {speed:.3f} | {speeds[0]:.3f}-{speeds[1]:.3f} | {cost:.3f} | {costs[0]:.3f}-{costs[1]:.3f} |"
        )


if __name__ == "__main__":
    main()
