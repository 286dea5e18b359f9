"""See gpu_check.sh. Prints one line a check, a Markdown table, and exits with 1 when outputs differ."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "backend/tests"))

import engine  # noqa: E402
from prompts import PROMPTS  # noqa: E402

BUDGETS = [(8, 4), (16, 4), (16, 8), (24, 6), (32, 8), (48, 8)]
TOKENS = 128
GPU_FLAGS = ["--dtype", "float32", "--attention-backend", "triton", "--mem-fraction-static", "0.7"]


def run(flags: list[str], target: Path, cpu: bool, log: Path) -> tuple[list[list[int]], float, float]:
    """Outputs of all prompts one by one, tok/s of a second pass, and the accept length."""
    base = engine.CPU_FLAGS if cpu else GPU_FLAGS
    device = {} if cpu else {"SGLANG_USE_CPU_ENGINE": "0"}
    with engine.serve(flags, log, device, target, base) as server:
        answers: list[Any] = [server.generate(prompt, TOKENS) for prompt in PROMPTS]
        start = time.perf_counter()
        again: list[Any] = [server.generate(prompt, TOKENS) for prompt in PROMPTS]
        rate = len(PROMPTS) * TOKENS / (time.perf_counter() - start)
    steps = sum(answer["meta_info"].get("spec_verify_ct") or 0 for answer in again)
    accepted = sum(answer["meta_info"].get("spec_num_correct_drafts") or 0 for answer in again)
    outputs = [answer["output_ids"] for answer in answers]
    return outputs, rate, (accepted + steps) / steps if steps else 1.0


def rows(draft: Path, cpu: bool) -> dict[str, list[str]]:
    """Flags of every row."""
    drafted = ["--speculative-draft-model-path", str(draft)]
    made: dict[str, list[str]] = {"ar": [], "chain": ["--speculative-algorithm", "DFLASH", *drafted]}
    for budget, topk in BUDGETS:
        tree = ["--speculative-ddtree-budget", str(budget), "--speculative-ddtree-topk-cap", str(topk)]
        made[f"{budget}:{topk}"] = ["--speculative-algorithm", "DDTREE", *drafted, *tree]
    if not cpu:
        made["16:4 eager"] = [*made["16:4"], "--disable-cuda-graph"]
    return made


def main() -> int:
    """Run all rows, one server each."""
    words = sys.argv[1:]
    cpu = words[0] == "--cpu"
    given = [Path(word) for word in words[2 if cpu else 1 :]]
    target, draft = given or (engine.MODELS / "target", engine.MODELS / "draft")
    wrong = 0
    made = {}
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        for name, flags in rows(draft, cpu).items():
            made[name] = run(flags, target, cpu, Path(folder) / name.replace(":", "-"))
            same = sum(a == b for a, b in zip(made[name][0], made["ar"][0], strict=True))
            wrong += same < len(PROMPTS)
            print(f"{name}: same as ar {same}/{len(PROMPTS)}", flush=True)
    print("\n| row | tok/s | x AR | accept length |\n|---|---:|---:|---:|")
    for name, (_, rate, accept) in made.items():
        print(f"| {name} | {rate:.1f} | {rate / made['ar'][1]:.2f} | {accept:.2f} |")
    print("\nall rows say what plain decoding says" if not wrong else f"\n{wrong} rows differ")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
