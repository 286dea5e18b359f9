"""The ``arborist`` command: each subcommand is a thin face over one module."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from tuning import __version__
from tuning.grid import PRESETS, GridError, parse_grid, to_json
from tuning.models import TrialFact
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

        Console().print(report.table(study))
    if arguments.write:
        for path in report.write(study):
            print(f"wrote {path}", file=sys.stderr)
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
