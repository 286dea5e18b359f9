"""What a decode step costs besides the models' passes, at budget 32, topk cap 8, one request.

    .venv-engine/bin/python benchmarks/host_cost.py                      (make benchmark does the set-up)
    .venv-engine/bin/python benchmarks/host_cost.py --against COMMIT     an earlier backend of this repository

A real server with the demo pair. In its scheduler this file, as a plugin, times each decode step from its
start to the next one's: ``models`` are the passes of target and draft, with the draft's embedding and head
and its KV of accepted tokens; ``worker`` is the rest of the backend's step, ``scheduler`` what lies between
steps. Medians over all steps, of servers that take turns. ``host`` is worker and scheduler together, ``of the
step`` its share, ``worker to first`` the worker's time over that of the table's first row.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

BUDGET, TOPK_CAP, TOKENS, WARM_UP = 32, 8, 128, 50
FILE_ENV = "DDTREE_HOST_COST"
ROOT = Path(__file__).resolve().parents[1]


class _Times:
    """Of the scheduler's process: seconds of each step, and of what is the models' in it."""

    def __init__(self) -> None:
        self.models = 0.0
        self.inside = 0
        self.last: tuple[float, float, float] | None = None

    def of_models(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        start, self.inside = time.perf_counter(), self.inside + 1
        try:
            return original(*args, **kwargs)
        finally:
            self.inside -= 1
            if not self.inside:
                self.models += time.perf_counter() - start

    def of_step(self, original: Any, worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        decodes = not (batch.forward_mode.is_extend() or batch.spec_info is None)
        start, models = time.perf_counter(), self.models
        if decodes and self.last is not None:
            began, step, of_models = self.last
            with Path(os.environ[FILE_ENV]).open("a") as file:
                file.write(json.dumps([start - began, step, of_models]) + "\n")
            # The record is not the server's work.
            start = time.perf_counter()
        result = original(worker, batch, *args, **kwargs)
        self.last = (start, time.perf_counter() - start, self.models - models) if decodes else None
        return result


def activate() -> None:
    """Entry point of the plugin."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    times = _Times()
    dflash = "sglang.srt.speculative.dflash_worker_v2.DFlashWorkerV2"
    for target in (
        "sglang.srt.model_executor.model_runner.ModelRunner.forward",
        "sglang.srt.layers.vocab_parallel_embedding.VocabParallelEmbedding.forward",
        f"{dflash}._append_target_hidden_to_draft_kv_by_loc",
    ):
        HookRegistry.register(target, times.of_models, HookType.AROUND)
    # The draft's head is the one product that the worker itself calls.
    product = torch.Tensor.__matmul__
    torch.Tensor.__matmul__ = lambda left, right: times.of_models(product, left, right)
    step = "sglang_ddtree.worker.DDTreeWorker.forward_batch_generation"
    HookRegistry.register(step, times.of_step, HookType.AROUND)


def measure(source: Path, folder: Path) -> list[list[float]]:
    """Milliseconds of the models, the worker and the scheduler, step by step, on a server of its own."""
    sys.path.insert(0, str(ROOT / "backend/tests"))
    import engine
    from prompts import PROMPTS

    package = folder / "host_cost-0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: host_cost\nVersion: 0\n")
    (package / "entry_points.txt").write_text("[sglang.srt.plugins]\nhost_cost = host_cost:activate\n")
    environment = {
        "PYTHONPATH": os.pathsep.join([str(source), str(folder), str(Path(__file__).parent)]),
        FILE_ENV: str(folder / "steps"),
    }
    with engine.serve(engine.tree_flags(BUDGET, TOPK_CAP), folder / "log", environment) as server:
        for prompt in PROMPTS:
            server.generate(prompt, TOKENS)
    lines = (folder / "steps").read_text().splitlines()[WARM_UP:]
    steps = [[value * 1e3 for value in json.loads(line)] for line in lines]
    return [[models, step - models, period - step] for period, step, models in steps]


def main() -> None:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(description="What a decode step costs besides the models' passes.")
    parser.add_argument("--against", metavar="COMMIT", help="an earlier backend to compare with")
    parser.add_argument("--rounds", type=int, default=3, help="servers of each (default: %(default)s)")
    given = parser.parse_args()
    if given.rounds < 1:
        parser.error(f"--rounds is {given.rounds}, expected at least 1")
    with tempfile.TemporaryDirectory(prefix="host-cost-") as folder:
        sources = {"now": ROOT / "backend/src"}
        if given.against:
            command = ["git", "archive", given.against, "backend/src"]
            archive = subprocess.run(command, cwd=ROOT, capture_output=True)
            if archive.returncode:
                parser.error(
                    f"--against {given.against}: {archive.stderr.decode().strip()}; expected a commit"
                )
            with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as members:
                members.extractall(folder, filter="data")
            sources = {given.against: Path(folder) / "backend/src", **sources}
        parts: dict[str, list[list[float]]] = {name: [] for name in sources}
        for number in range(given.rounds):
            # In turns the first: what drifts hits both alike.
            for name, source in list(sources.items())[:: -1 if number % 2 else 1]:
                with tempfile.TemporaryDirectory(dir=folder) as own:
                    parts[name] += measure(source, Path(own))
            print(f"round {number + 1} of {given.rounds}", file=sys.stderr, flush=True)
    print(f"\nBudget {BUDGET}, topk cap {TOPK_CAP}, one request; ms a step, medians.\n")
    print("| backend | steps | models | worker | scheduler | host | of the step | worker to first |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    first = statistics.median(worker for _, worker, _ in next(iter(parts.values())))
    for name, steps in parts.items():
        models, worker, scheduler = (statistics.median(column) for column in zip(*steps, strict=True))
        host = statistics.median(worker + scheduler for _, worker, scheduler in steps)
        share = host / statistics.median(sum(step) for step in steps)
        print(
            f"| {name} | {len(steps)} | {models:.2f} | {worker:.2f} | {scheduler:.2f} | {host:.2f} "
            f"| {share:.1%} | {worker / first:.2f} |"
        )


if __name__ == "__main__":
    main()
