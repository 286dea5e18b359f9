"""The ``arborist`` command: each subcommand is a thin face over one module."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from tuning import __version__
from tuning.grid import PRESETS, GridError, parse_grid, to_json
from tuning.models import Measurement, TrialFact
from tuning.store import LATEST, StoreError, open_study

_GRID_EPILOG = """\
SPEC is one of
  a preset          {presets}
  items             "8:4, 16:4" (budget:topk) or "8 4;16 4"
  a list            '["8:4", {{"budget": 16, "topk": 4, "extra": {{"page-size": 1}}}}]'
  a product         '{{"budget": [8, 16], "topk": [4, 8]}}'
  a file            grid.yml or grid.json holding any of these
examples
  arborist grid seed
  arborist grid "8:4, 16:4" --json
  arborist grid '{{"budget": [8, 16, 24], "topk": [4, 8]}}' --arms ar
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``arborist``; returns the exit status (0 done, 1 it failed, 2 the input was wrong)."""
    arguments = _parser().parse_args(argv)
    command: Callable[[argparse.Namespace], int] = arguments.command
    try:
        return command(arguments)
    except (GridError, StoreError) as error:
        print(f"arborist: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `arborist ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="arborist",
        description="Measure SGLang with tree speculative decoding and read what a sweep found.",
    )
    parser.add_argument("--version", action="version", version=f"arborist {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_grid(commands)
    _add_report(commands)
    _add_bench(commands)
    _add_journal(commands)
    _add_schema(commands)
    return parser


def _add_grid(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "grid",
        help="show the configurations a grid expands to",
        description="Expand a grid into configurations, baselines first. Nothing is started.",
        epilog=_GRID_EPILOG.format(presets=", ".join(f"{k} ({v})" for k, v in PRESETS.items())),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("spec", metavar="SPEC", help="the grid; see below")
    parser.add_argument(
        "--arms",
        default="ar,chain",
        metavar="ARMS",
        help="baseline arms to add (default: ar,chain; '' for none)",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON list instead of lines")
    parser.set_defaults(command=_grid)


def _grid(arguments: argparse.Namespace) -> int:
    configurations = parse_grid(arguments.spec, arguments.arms)
    if arguments.json:
        print(json.dumps(to_json(configurations), indent=2))
    else:
        for one in configurations:
            print(f"{one.id}  {one.label}")
    return 0


def _add_report(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "report",
        help="show a study: one row a trial",
        description="Print a study: status, tok/s, accept length, verify steps, speed-up over the "
        "autoregressive arm, prompts with the same output as it, boot seconds.",
    )
    parser.add_argument(
        "study", nargs="?", default=LATEST, metavar="STUDY", help="a study's name or folder (default: latest)"
    )
    parser.add_argument(
        "--results", default="results", type=Path, metavar="DIR", help="folder of studies (default: results)"
    )
    parser.add_argument(
        "--format", choices=("table", "markdown", "csv", "json"), default="table", help="default: table"
    )
    parser.add_argument(
        "--write", action="store_true", help="also write report.md and report.csv into the study's folder"
    )
    parser.set_defaults(command=_report)


def _report(arguments: argparse.Namespace) -> int:
    from tuning import report

    named = Path(arguments.study)
    at = (named.parent, named.name) if len(named.parts) > 1 else (arguments.results, arguments.study)
    study = open_study(*at)
    contents = study.read()
    for problem in contents.problems:
        print(f"arborist: {problem}", file=sys.stderr)
    if arguments.format == "markdown":
        print(report.markdown(study), end="")
    elif arguments.format == "csv":
        print(report.csv(study), end="")
    elif arguments.format == "json":
        print(json.dumps([fact.model_dump(mode="json") for fact in contents.facts], indent=2))
    else:
        from rich.console import Console

        made, console = report.table(study), Console()
        # A narrow terminal breaks the lines; rich would leave columns out.
        console.width = max(console.width, report.least_width(made))
        console.print(made)
    if arguments.write:
        for path in report.write(study):
            print(f"wrote {path}", file=sys.stderr)
    return 0


def _add_bench(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "bench",
        help="measure a running service once",
        description="Warm a running service up and measure it: tok/s, latencies, accept length. With --unit "
        "the journal is read too (run it on the service's host, as root) and a restart in "
        "between is noticed.",
        epilog="The API key, if the service wants one, is read from the variable SGLANG_API_KEY.",
    )
    parser.add_argument("--url", default="http://127.0.0.1:30000", help="default: %(default)s")
    parser.add_argument("--unit", metavar="NAME", help="the systemd unit that serves the URL")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="default: the packaged prompts")
    parser.add_argument("--limit", type=int, default=0, metavar="N", help="use N of the prompts")
    parser.add_argument(
        "--levels", type=_levels, default=[1], metavar="C,C", help="concurrencies (default: 1)"
    )
    parser.add_argument("--tokens", type=int, default=128, metavar="N", help="per answer (default: 128)")
    parser.add_argument(
        "--natural-stop", action="store_true", help="let answers end where the model ends them"
    )
    parser.add_argument(
        "--prompt-mode",
        choices=("auto", "chat", "raw"),
        default="auto",
        help="through the model's chat template, as plain text, or the template if there is one (default)",
    )
    parser.add_argument("--json", action="store_true", help="print the whole measurement as JSON")
    parser.set_defaults(command=_bench)


def _levels(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r}: expected numbers parted by commas, such as 1,4"
        ) from error


def _bench(arguments: argparse.Namespace) -> int:
    from tuning.measure import MeasurementFailed, Workload, measure
    from tuning.prompts import PromptError, load_prompts

    try:
        workload = Workload(
            prompts=load_prompts(arguments.prompts, arguments.limit),
            levels=arguments.levels,
            max_tokens=arguments.tokens,
            ignore_eos=not arguments.natural_stop,
            prompt_mode=arguments.prompt_mode,
        )
    except (PromptError, ValueError) as error:
        print(f"arborist: {error}", file=sys.stderr)
        return 2
    try:
        made = measure(arguments.unit, arguments.url, workload, os.environ.get("SGLANG_API_KEY"))
    except MeasurementFailed as error:
        for line in error.failure.journal_tail:
            print(f"  {line}", file=sys.stderr)
        hint = f"; {error.failure.hint}" if error.failure.hint else ""
        print(f"arborist: {error}{hint}", file=sys.stderr)
        return 1
    print(made.model_dump_json(indent=2) if arguments.json else "\n".join(_bench_lines(made)))
    return 0


def _bench_lines(made: Measurement) -> list[str]:
    lines = [f"{len(made.workload.prompts)} prompts ({made.workload.prompt_mode}), {made.seconds:.1f} s"]
    for level in made.levels:
        ttft, itl = level.ttft_ms, level.itl_ms
        lines.append(
            f"concurrency {level.concurrency}: {level.tok_s:.1f} tok/s, "
            + (f"time to first token {ttft.p50:.0f} ms (p95 {ttft.p95:.0f}), " if ttft else "")
            + (f"inter-token {itl.p50:.1f} ms (p95 {itl.p95:.1f})" if itl else "")
        )
    sources = made.acceptance
    for one in (sources.responses, sources.journal):
        if one is not None and one.tau is not None:
            lines.append(f"accept length by {one.source}: {one.tau:.3f} = {one.tokens} / {one.steps} steps")
    return lines + [f"warning: {warning}" for warning in made.warnings]


def _add_journal(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "journal",
        help="read the accept length out of a unit's journal",
        description="Sum the metrics lines of a unit's journal: of its current start, or of everything "
        "after a cursor.",
    )
    parser.add_argument("unit", nargs="?", default="sglang-ddtree.service", help="default: %(default)s")
    parser.add_argument("--after-cursor", metavar="CURSOR", help="only what came after this position")
    parser.add_argument("--all", action="store_true", help="every start of the unit, not only the current")
    parser.add_argument(
        "--interval",
        type=int,
        default=40,
        metavar="N",
        help="the engine's --decode-log-interval (default: 40)",
    )
    parser.add_argument("--json", action="store_true", help="print every line parsed, as JSON")
    parser.set_defaults(command=_journal)


def _journal(arguments: argparse.Namespace) -> int:
    from tuning import acceptance, journal
    from tuning.units import UnitError, unit_state

    try:
        invocation = None if arguments.all else unit_state(arguments.unit).invocation_id or None
        found = journal.entries(arguments.unit, arguments.after_cursor, invocation)
        metrics, decode = journal.parse_metrics(found), journal.parse_decode(found)
    except (UnitError, journal.JournalError) as error:
        print(f"arborist: {error}", file=sys.stderr)
        return 1
    made = acceptance.from_journal(metrics, decode, arguments.interval)
    if arguments.json:
        shown = {
            "acceptance": made.model_dump(mode="json") if made else None,
            "metrics": [asdict(line) for line in metrics],
            "decode": [asdict(line) for line in decode],
        }
        print(json.dumps(shown, indent=2))
    elif made is None:
        print(f"no metrics line in {len(found)} entries of {arguments.unit}")
    else:
        tau = "none" if made.tau is None else f"{made.tau:.3f}"
        print(f"accept length {tau} = {made.tokens} tokens / {made.steps} steps, from {made.source}")
        if made.histogram:
            print("accepted drafts a step: " + ",".join(map(str, made.histogram)))
    return 0


def _add_schema(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "schema",
        help="print the JSON Schema of a trial fact",
        description="Print the JSON Schema of one line of trials.jsonl (and of facts/HOST/TRIAL.json).",
    )
    parser.set_defaults(command=_schema)


def _schema(arguments: argparse.Namespace) -> int:
    del arguments
    print(json.dumps(TrialFact.model_json_schema(mode="serialization"), indent=2))
    return 0
