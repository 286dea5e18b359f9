"""The options of DDTREE: flags of the server, carried to its processes in the environment."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass

BUDGET_FLAG = "--speculative-ddtree-budget"
TOPK_CAP_FLAG = "--speculative-ddtree-topk-cap"
ADAPTIVE_FLAG = "--speculative-ddtree-adaptive"
#: SGLang's record of arguments has no room for a plugin's, and its processes are started with that
#: record alone.
BUDGET_ENV = "SGLANG_DDTREE_BUDGET"
TOPK_CAP_ENV = "SGLANG_DDTREE_TOPK_CAP"
ADAPTIVE_ENV = "SGLANG_DDTREE_ADAPTIVE"
PLANT_ENV = "SGLANG_DDTREE_PLANT"
TEST_ENV = "SGLANG_DDTREE_TEST"

DEFAULT_BUDGET = 16
DEFAULT_TOPK_CAP = 4
#: Faults a test can plant to see whether it would notice them.
PLANTS = ("nomask", "nomove", "width", "bias")


@dataclass(frozen=True)
class Options:
    """What was asked for."""

    budget: int
    """Tree nodes besides the root."""
    topk_cap: int
    """Ranks tried at a depth."""
    adaptive: bool = False
    """Whether each step's tree stops growing where a node no longer pays; the budget is the most then."""
    plant: str | None = None
    """A planted fault: ``nomask`` verifies without the tree mask, ``nomove`` leaves accepted KV where it is,
    ``width`` announces the draft's block as the width of the verify, ``bias`` now and then takes a drafted
    token for the one that was drawn."""

    @property
    def width(self) -> int:
        """Nodes verified per request and step, the root included."""
        return self.budget + 1


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Declare the flags on SGLang's own parser."""
    group = parser.add_argument_group("DDTREE (sglang-ddtree)")
    group.add_argument(
        BUDGET_FLAG,
        type=int,
        default=None,
        metavar="N",
        help=f"DDTREE only. Nodes of the draft tree besides its root; the target verifies N+1 tokens per "
        f"request and step. Default {DEFAULT_BUDGET}.",
    )
    group.add_argument(
        TOPK_CAP_FLAG,
        type=int,
        default=None,
        metavar="N",
        help=f"DDTREE only. Most likely tokens tried at a depth of the tree. Default {DEFAULT_TOPK_CAP}.",
    )
    group.add_argument(
        ADAPTIVE_FLAG,
        action="store_true",
        default=None,
        help="DDTREE only, without CUDA graphs. Each step's tree, up to the budget, stops growing where the "
        "tokens that a node is likely to add no longer pay for its time; both are learned while serving. "
        "Default: every tree has the budget's nodes.",
    )


def store_flags(args: argparse.Namespace) -> None:
    """Put parsed flags where :func:`from_environment` finds them in every process of the server.

    Raises:
        ValueError: a DDTREE flag on a server with another algorithm, which would silently do nothing.
    """
    given = {
        BUDGET_ENV: (BUDGET_FLAG, getattr(args, "speculative_ddtree_budget", None)),
        TOPK_CAP_ENV: (TOPK_CAP_FLAG, getattr(args, "speculative_ddtree_topk_cap", None)),
        ADAPTIVE_ENV: (ADAPTIVE_FLAG, getattr(args, "speculative_ddtree_adaptive", None) or None),
    }
    algorithm = getattr(args, "speculative_algorithm", None)
    for name, (flag, value) in given.items():
        if value is None:
            continue
        if (algorithm or "").upper() != "DDTREE":
            shown = flag if value is True else f"{flag} {value}"
            raise ValueError(
                f"{shown} was given with --speculative-algorithm {algorithm or '(none)'}; "
                f"expected --speculative-algorithm DDTREE, or leave the flag out."
            )
        os.environ[name] = str(int(value))


def from_environment(environ: Mapping[str, str] | None = None) -> Options:
    """The options of this process.

    Raises:
        ValueError: not a whole number of at least 1, or a planted fault outside a test.
    """
    environ = os.environ if environ is None else environ
    plant = environ.get(PLANT_ENV) or None
    if plant is not None and plant not in PLANTS:
        raise ValueError(f"{PLANT_ENV} is {plant!r}, expected one of {', '.join(PLANTS)}")
    if plant is not None and environ.get(TEST_ENV) != "1":
        raise ValueError(
            f"{PLANT_ENV}={plant} makes the server answer wrongly and is for tests only; "
            f"unset it (a test sets {TEST_ENV}=1 as well)"
        )
    return Options(
        budget=_at_least_one(environ, BUDGET_ENV, BUDGET_FLAG, DEFAULT_BUDGET),
        topk_cap=_at_least_one(environ, TOPK_CAP_ENV, TOPK_CAP_FLAG, DEFAULT_TOPK_CAP),
        adaptive=_switch(environ, ADAPTIVE_ENV, ADAPTIVE_FLAG),
        plant=plant,
    )


def _at_least_one(environ: Mapping[str, str], name: str, flag: str, default: int) -> int:
    raw = environ.get(name, str(default))
    try:
        value = int(raw)
    except ValueError:
        raise ValueError(f"{flag} (environment {name}) is {raw!r}, expected a whole number") from None
    if value < 1:
        raise ValueError(f"{flag} (environment {name}) is {value}, expected at least 1")
    return value


def _switch(environ: Mapping[str, str], name: str, flag: str) -> bool:
    raw = environ.get(name) or "0"
    if raw not in ("0", "1"):
        raise ValueError(f"{flag} (environment {name}) is {raw!r}, expected 0 or 1")
    return raw == "1"
