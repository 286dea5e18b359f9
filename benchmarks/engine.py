"""Plain decoding, DFLASH's chain and DDTREE's trees on the demo pair: speed, accept length, times of a step.

    .venv-engine/bin/python benchmarks/engine.py                              (a quiet machine)
    .venv-engine/bin/python benchmarks/engine.py --models build/models/demo --check
    .venv-engine/bin/python benchmarks/engine.py --block16 --drafts weak,mismatched --concurrency 1,4

One server each for plain decoding and the chain, and one for all trees of a draft: it is started for the
largest budget and topk cap and switched while it runs. Without CUDA graphs a verify is as wide as the budget
in force, so that only the KV reservation is that of the largest. All servers are up all the time, and one at
a time has work: in every round each arm answers all prompts once, the arms in an order shuffled for the
round, with an empty prefix cache. A ratio is of the seconds that the same prompts took in the same round,
summed, the median over the rounds; its 95 % interval comes from resampling rounds and prompts, and is too
narrow for what a few rounds have in common: take six or more. What is called the best tree is chosen in every
other round and measured in the rest.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "backend/tests"))

import engine
import requests

from models.corpus.build import chat

ROOT = Path(__file__).resolve().parents[1]
POINTS = (*((budget, 8) for budget in (4, 8, 12, 15, 24, 32, 64)), (16, 1), (16, 4))
#: What the CPU engine of the tests runs at once.
MOST_CONCURRENT = 8
WARM_UP_TOKENS, RESAMPLES = 64, 2000
AR, CHAIN, TREE = "plain", "chain", "tree"

Point = tuple[int, int]  # budget, topk cap


@dataclass(frozen=True)
class Arm:
    """What is measured: on which server, and for a tree with which values in force."""

    server: str
    kind: str
    draft: str = ""
    point: Point | None = None

    def __str__(self) -> str:
        """Name of the arm in the table."""
        draft = self.draft.removeprefix("draft").removeprefix("-")
        values = f" {self.point[0]}:{self.point[1]}" if self.point else ""
        return f"{self.kind}{values}{f', {draft}' if draft else ''}"


@dataclass(frozen=True)
class Answer:
    """One request: how long it took, its tokens, and in how many steps of its own they came."""

    seconds: float
    tokens: list[int]
    steps: int


@dataclass(frozen=True)
class Turn:
    """All prompts once under one arm, in one round."""

    seconds: float
    answers: list[Answer]
    stages: list[dict[str, float]]

    @property
    def speed(self) -> float:
        """Tokens a second."""
        return sum(len(answer.tokens) for answer in self.answers) / self.seconds


#: Turns by round, of each concurrency and arm.
Results = dict[int, dict[Arm, list[Turn]]]


# --- figures ------------------------------------------------------------------------------------------------
def ratio(above: Sequence[Sequence[float]], below: Sequence[Sequence[float]]) -> tuple[float, float, float]:
    """How many times as long ``above`` took, with a 95 % interval.

    Args:
        above: seconds ``[rounds][prompts]``.
        below: of the same shape; the same round and prompt belong together.

    Returns:
        the median over the rounds of the ratio of sums over the prompts, and the 2.5th and 97.5th percentile
        of that in 2,000 resamplings of the rounds and the prompts, with replacement.
    """
    draw = random.Random(1)
    rounds, prompts = range(len(above)), range(len(above[0]))

    def of(chosen_rounds: Sequence[int], chosen: Sequence[int]) -> float:
        return statistics.median(
            sum(above[number][i] for i in chosen) / sum(below[number][i] for i in chosen)
            for number in chosen_rounds
        )

    found = sorted(
        of(draw.choices(rounds, k=len(rounds)), draw.choices(prompts, k=len(prompts)))
        for _ in range(RESAMPLES)
    )
    tail = RESAMPLES // 40
    return of(rounds, prompts), found[tail - 1], found[-tail]


def compare(slower: Sequence[Turn], faster: Sequence[Turn]) -> tuple[float, float, float]:
    """How many times as fast the second is, with a 95 % interval."""
    above, below = ([[one.seconds for one in turn.answers] for turn in turns] for turns in (slower, faster))
    return ratio(above, below)


def speed(turns: Sequence[Turn]) -> float:
    """Tokens a second, median over the rounds."""
    return statistics.median(turn.speed for turn in turns)


def accept_length(turns: Sequence[Turn]) -> float:
    """Tokens of the answers over verify steps, summed before they are divided; the first is the prefill's."""
    answers = [answer for turn in turns for answer in turn.answers]
    return sum(len(answer.tokens) - 1 for answer in answers) / sum(answer.steps for answer in answers)


def step_ms(turns: Sequence[Turn]) -> float:
    """Milliseconds of a request over its steps, median over the rounds; its prefill is in them."""
    return statistics.median(
        sum(answer.seconds for answer in turn.answers) / sum(answer.steps for answer in turn.answers) * 1e3
        for turn in turns
    )


def stage_ms(turns: Sequence[Turn]) -> dict[str, float]:
    """Milliseconds a step, by stage, medians over the server's metrics lines; empty without stages."""
    lines = [stages for turn in turns for stages in turn.stages]
    return {stage: statistics.median(one[stage] for one in lines) for stage in engine.STAGES if lines}


def equal(turns: Sequence[Turn], plain: Sequence[Turn]) -> tuple[int, int]:
    """How many answers have the very tokens of plain decoding, and of how many."""
    pairs = [
        (ours.tokens, theirs.tokens)
        for one, other in zip(turns, plain, strict=True)
        for ours, theirs in zip(one.answers, other.answers, strict=True)
    ]
    return sum(ours == theirs for ours, theirs in pairs), len(pairs)


# --- measuring ----------------------------------------------------------------------------------------------
def prepare(server: engine.Server, arm: Arm, prompt: str) -> None:
    """Put the arm's values in force, warm up, and forget the prefixes."""
    if arm.point is not None:
        values = {"ddtree_budget": arm.point[0], "ddtree_topk_cap": arm.point[1]}
        reply = requests.post(f"{server.url}/set_internal_state", json={"server_args": values}, timeout=60)
        if reply.json() != [True]:
            raise SystemExit(f"the server refused {values}: {reply.text[:300]}")
    server.generate(prompt, WARM_UP_TOKENS)
    # It is refused as long as the scheduler is still putting the last request away.
    for _ in range(50):
        reply = requests.post(f"{server.url}/flush_cache", timeout=60)
        if reply.ok:
            return
        time.sleep(0.1)
    raise SystemExit(f"the server did not empty its prefix cache: {reply.text[:300]}")


def ask(server: engine.Server, tokens: int, prompt: str) -> Answer:
    """One greedy answer."""
    start = time.perf_counter()
    got = server.generate(prompt, tokens)
    seconds = time.perf_counter() - start
    made, steps = list(got["output_ids"]), got["meta_info"].get("spec_verify_ct")
    if len(made) != tokens:
        raise SystemExit(f"found an answer of {len(made)} tokens, expected {tokens}; lower --tokens")
    # Without speculation each step makes one token, and the prefill the first.
    return Answer(seconds, made, int(steps) if steps else tokens - 1)


def measure(server: engine.Server, arm: Arm, prompts: Sequence[str], tokens: int, concurrency: int) -> Turn:
    """All prompts once, ``concurrency`` at a time."""
    prepare(server, arm, prompts[0])
    before = len(server.metrics())
    start = time.perf_counter()
    with ThreadPoolExecutor(concurrency) as pool:
        answers = list(pool.map(partial(ask, server, tokens), prompts))
    seconds = time.perf_counter() - start
    lines = server.metrics()[before:]
    if arm.point is not None and (odd := [line for line in lines if (line.budget, line.topk) != arm.point]):
        raise SystemExit(f"found {odd[0].budget}:{odd[0].topk} in force, expected {arm}")
    # Every 16th step is timed: a short line may have none.
    return Turn(seconds, answers, [line.stage_ms for line in lines if line.stage_ms.get("verify")])


def measure_all(
    servers: Mapping[str, engine.Server],
    arms: Sequence[Arm],
    prompts: Sequence[str],
    given: argparse.Namespace,
) -> Results:
    """Every round: at each concurrency every arm once, in an order of its own."""
    results: Results = {concurrency: {arm: [] for arm in arms} for concurrency in given.concurrency}
    done, total = 0, given.rounds * len(given.concurrency) * len(arms)
    draw = random.Random(given.seed)
    for number in range(1, given.rounds + 1):
        for concurrency in given.concurrency:
            for arm in draw.sample(arms, len(arms)):
                turn = measure(servers[arm.server], arm, prompts, given.tokens, concurrency)
                results[concurrency][arm].append(turn)
                done += 1
                say(f"{done}/{total}: round {number}, concurrency {concurrency}, {arm}: {turn.speed:.1f}/s")
    return results


# --- what is run --------------------------------------------------------------------------------------------
def plan(given: argparse.Namespace) -> tuple[dict[str, list[str]], list[Arm]]:
    """Flags of the servers, and the arms on them."""
    flags: dict[str, list[str]] = {AR: []}
    arms = [Arm(AR, AR)]

    def add(kind: str, draft: str, points: Sequence[Point] = ()) -> None:
        server = f"{kind}-{draft}"
        common = ["--speculative-draft-model-path", str(given.models / draft)]
        if kind == CHAIN:
            flags[server] = ["--speculative-algorithm", "DFLASH", *common]
            arms.append(Arm(server, kind, draft))
            return
        budget, topk = (max(values) for values in zip(*points, strict=True))
        flags[server] = [
            *("--speculative-algorithm", "DDTREE", *common),
            *("--speculative-ddtree-budget", str(budget), "--speculative-ddtree-topk-cap", str(topk)),
        ]
        arms.extend(Arm(server, kind, draft, point) for point in points)

    add(CHAIN, "draft")
    add(TREE, "draft", given.points)
    curve = on_curve(given.points)
    if given.block16:
        if (given.models / "draft-block16").is_dir():
            add(CHAIN, "draft-block16")
            add(TREE, "draft-block16", curve)
        else:
            say(f"{given.models / 'draft-block16'} is not there: no arms with blocks of 16")
    for name in given.drafts:
        # One tree tells what a draft is worth; the curve over budgets is the good draft's.
        add(TREE, f"draft-{name}", [min(curve, key=lambda point: abs(point[0] - 16))])
    return flags, arms


def on_curve(points: Sequence[Point]) -> list[Point]:
    """The points of the topk cap that has the most budgets, by budget; the best one is looked for there."""
    caps = Counter(topk for _, topk in points)
    cap = max(caps, key=lambda topk: (caps[topk], topk))
    return sorted(point for point in points if point[1] == cap)


# --- what is told -------------------------------------------------------------------------------------------
def block_size(models: Path, draft: str) -> int:
    """Block of a draft, from its configuration."""
    return int(json.loads((models / draft / "config.json").read_text(encoding="utf-8"))["block_size"])


def table(models: Path, turns: Mapping[Arm, list[Turn]]) -> list[str]:
    """Lines of the Markdown table of one concurrency."""
    plain, chain = (next(arm for arm in turns if arm.kind == kind) for kind in (AR, CHAIN))
    lines = [
        "| arm | block | budget | topk | tok/s | x plain | 95 % | x chain | 95 % | accept length "
        f"| ms a step | {' | '.join(engine.STAGES)} | rest | equal |",
        f"|---|{'---:|' * (12 + len(engine.STAGES))}",
    ]
    for arm, own in turns.items():
        cells = [str(arm), str(block_size(models, arm.draft)) if arm.draft else ""]
        cells += [str(value) for value in arm.point] if arm.point else ["", ""]
        cells.append(f"{speed(own):.1f}")
        for base in (plain, chain):
            middle, low, high = compare(turns[base], own)
            cells += ["1", ""] if base == arm else [f"{middle:.2f}", f"{low:.2f}-{high:.2f}"]
        step, stages = step_ms(own), stage_ms(own)
        cells += [f"{accept_length(own):.2f}", f"{step:.2f}"]
        cells += [f"{value:.2f}" for value in stages.values()] or [""] * len(engine.STAGES)
        cells.append(f"{step - sum(stages.values()):.2f}" if stages else "")
        cells.append("" if arm == plain else "{}/{}".format(*equal(own, turns[plain])))
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def report(given: argparse.Namespace, results: Results, prompts: int) -> str:
    """The whole Markdown text."""
    lines = [
        f"{prompts} prompts ({given.prompts}) of {given.tokens} tokens, greedy, {given.rounds} rounds, "
        f"seed {given.seed}; "
        f"SGLang {importlib.metadata.version('sglang')} on the CPU, {os.cpu_count()} cores.",
        "`x plain` and `x chain`: how many times as fast as plain decoding and as the chain of `draft`, in "
        "the same run, with 95 % intervals over rounds and prompts. Accept length: tokens of the answers "
        "over verify steps; what a last step commits past the limit is not in it. "
        "`ms a step`: of a request from start to end; `rest` is what lies outside the stages: scheduler, "
        "prefill, HTTP. `equal`: answers with the very tokens of plain decoding.",
    ]
    text = f"{lines[0]}\n\n{lines[1]}\n"
    for concurrency, turns in results.items():
        text += f"\n### Concurrency {concurrency}\n\n" + "\n".join(table(given.models, turns)) + "\n"
    return text


@dataclass(frozen=True)
class Criterion:
    """Something that must hold of a run."""

    met: bool
    what: str
    found: str
    expected: str


def criteria(results: Results) -> list[Criterion]:
    """What must hold; of speed and accept length at the first concurrency, of outputs at all."""
    turns = next(iter(results.values()))
    plain, chain = (next(arm for arm in turns if arm.kind == kind) for kind in (AR, CHAIN))
    trees = {arm.point: arm for arm in turns if arm.draft == "draft" and arm.point is not None}
    # Chosen and measured in the same rounds, the best of equals would look better than it is.
    rounds = len(turns[plain])
    chosen_in, measured_in = (slice(0, None, 2), slice(1, None, 2)) if rounds > 1 else (slice(None),) * 2
    best = max(trees.values(), key=lambda arm: speed(turns[arm][chosen_in]))
    made = []
    for base, least in ((plain, 2.5), (chain, 1.12)):
        times, low, high = compare(turns[base][measured_in], turns[best][measured_in])
        made.append(
            Criterion(
                times >= least and low > 1,
                f"best tree against {base}",
                f"{best}: {times:.2f} times as fast, 95 % {low:.2f}-{high:.2f}",
                f"at least {least}, interval above 1",
            )
        )
    curve = on_curve(list(trees))
    budgets = [budget for budget, _ in curve]
    top = max(curve, key=lambda point: speed(turns[trees[point]][chosen_in]))
    last, first = (speed(turns[trees[point]][measured_in]) for point in (curve[-1], top))
    share = last / first
    between = f"more than {budgets[0]}, less than {budgets[-1]}"
    if len(budgets) < 3:
        between = "at least 3 budgets at one topk cap in --points"
    made += [
        Criterion(
            budgets[0] < top[0] < budgets[-1], f"best budget at topk cap {top[1]}", str(top[0]), between
        ),
        Criterion(
            share <= 0.85, f"speed of budget {budgets[-1]} over the best", f"{share:.2f}", "at most 0.85"
        ),
    ]
    one, four = (trees.get((16, topk)) for topk in (1, 4))
    what = "accept length at budget 16, topk cap 1 over 4"
    if one is None or four is None:
        made.append(Criterion(False, what, "not measured", "at most 0.95; have 16:1 and 16:4 in --points"))
    else:
        share = accept_length(turns[one]) / accept_length(turns[four])
        made.append(Criterion(share <= 0.95, what, f"{share:.3f}", "at most 0.95"))
    same = [equal(own, arms[plain]) for arms in results.values() for arm, own in arms.items() if arm != plain]
    found, total = (sum(counts) for counts in zip(*same, strict=True))
    made.append(Criterion(found == total, "answers equal to plain decoding", f"{found}/{total}", "all"))
    for draft, most in (("draft-weak", 1.5), ("draft-mismatched", 1.1)):
        for arm in (arm for arm in turns if arm.draft == draft):
            length = accept_length(turns[arm])
            made.append(Criterion(length < most, f"accept length, {arm}", f"{length:.2f}", f"below {most}"))
    return made


def say(text: str) -> None:
    """Tell of the progress."""
    print(text, file=sys.stderr, flush=True)


# --- the command line ---------------------------------------------------------------------------------------
def numbers(text: str) -> list[int]:
    """Comma-separated concurrencies."""
    values = [int(part) if part.strip().isdecimal() else 0 for part in text.split(",")]
    if not all(1 <= value <= MOST_CONCURRENT for value in values):
        raise argparse.ArgumentTypeError(
            f"found {text!r}, expected whole numbers from 1 to {MOST_CONCURRENT}, separated by commas"
        )
    return list(dict.fromkeys(values))


def positive(text: str) -> int:
    """A whole number above 0."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected a whole number, at least 1")
    return int(text)


def points(text: str) -> list[Point]:
    """Comma-separated ``budget:topk``."""
    found = []
    for part in text.split(","):
        budget, _, topk = part.strip().partition(":")
        if not (budget.isdecimal() and topk.isdecimal() and int(budget) and int(topk)):
            raise argparse.ArgumentTypeError(f"found {part!r}, expected BUDGET:TOPK, such as 16:8")
        found.append((int(budget), int(topk)))
    return list(dict.fromkeys(found))


def default_prompts(models: Path) -> tuple[str, list[str]]:
    """What they are, and the texts: the seed's as chats, and those that no training saw."""
    first = [chat(text) for text in load_prompts(ROOT / "tuning/data/prompts.json")[:3]]
    held_out = models.parent / "prompts.json"
    if held_out.exists():
        return (
            "the first three of tuning/data/prompts.json, and ten that no training saw",
            first + load_prompts(held_out),
        )
    return "the first three of tuning/data/prompts.json", first


def load_prompts(path: Path) -> list[str]:
    """Prompts of a JSON file: a list of texts, or of objects with a ``text``."""
    try:
        items = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(items, list):
            raise TypeError(f"found {type(items).__name__}")
        texts = [item["text"] if isinstance(item, dict) else item for item in items]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SystemExit(
            f"--prompts {path} can't be read ({error!r}): expected a JSON list of texts"
        ) from error
    if not texts or not all(isinstance(text, str) and text for text in texts):
        raise SystemExit(f"--prompts {path}: expected a JSON list of texts, none of them empty")
    return texts


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--models",
        type=Path,
        default=engine.MODELS,
        metavar="DIR",
        help="folder with target/, draft/ and for some options draft-*/ (default: models/demo)",
    )
    parser.add_argument(
        "--points",
        type=points,
        default=list(POINTS),
        metavar="B:K,...",
        help="budgets and topk caps of the trees "
        f"(default: {','.join(f'{budget}:{topk}' for budget, topk in POINTS)})",
    )
    parser.add_argument(
        "--concurrency",
        type=numbers,
        default=[1],
        metavar="N,...",
        help=f"requests at a time, 1 to {MOST_CONCURRENT}; a table for each (default: 1)",
    )
    parser.add_argument(
        "--block16",
        action="store_true",
        help="also the chain and the trees of draft-block16/, if it is there",
    )
    parser.add_argument(
        "--drafts",
        type=lambda text: list(dict.fromkeys(text.split(","))),
        default=[],
        metavar="NAME,...",
        help="also a tree each of draft-NAME/, at the budget nearest to 16: weak,mismatched",
    )
    parser.add_argument("--rounds", type=positive, default=6, help="turns of each arm (default: %(default)s)")
    parser.add_argument("--tokens", type=positive, default=128, help="of each answer (default: %(default)s)")
    parser.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="JSON list of texts, or of objects with a text "
        "(default: the first three of tuning/data/prompts.json as chats, and those of prompts.json beside "
        "the models' folder, if it is there, which no training saw)",
    )
    parser.add_argument("--seed", type=int, default=1, help="of the order of the arms (default: %(default)s)")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="where the Markdown goes too, besides stdout"
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="say what must hold (speed at the first concurrency, outputs at all); ends with 1 if not",
    )
    given = parser.parse_args()
    given.models = given.models.resolve()
    for folder in ("target", "draft", *(f"draft-{name}" for name in given.drafts)):
        if not (given.models / folder / "config.json").exists():
            parser.error(
                f"{given.models / folder} has no config.json: expected a model; see --models, --drafts "
                "(make models trains them)"
            )
    if given.output and not given.output.resolve().parent.is_dir():
        parser.error(
            f"--output {given.output}: found no folder {given.output.resolve().parent}, expected one"
        )
    return given


def main() -> None:
    """Measure, and print the Markdown."""
    given = arguments()
    if given.prompts:
        prompts = load_prompts(given.prompts)
    else:
        given.prompts, prompts = default_prompts(given.models)
    flags, arms = plan(given)
    # So that the servers end with this process if it is told to end.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="engine-")))
        servers = {}
        for name, own in flags.items():
            log = folder / f"{name}.log"
            servers[name] = stack.enter_context(engine.serve(own, log, target=given.models / "target"))
            say(f"server {name}: up after {servers[name].boot_seconds:.0f} s")
        results = measure_all(servers, arms, prompts, given)
    text = report(given, results, len(prompts))
    print(text)
    if given.output:
        given.output.write_text(text, encoding="utf-8")
    if given.check:
        made = criteria(results)
        for one in made:
            print(
                f"- {'met' if one.met else 'MISSED'}: {one.what}: found {one.found}; expected {one.expected}"
            )
        sys.exit(0 if all(one.met for one in made) else 1)


if __name__ == "__main__":
    main()
