"""Which SGLang this package was tested with, and what happens on another one."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version

#: Releases that make test runs: the newest wholly, older ones where they differ.
TESTED = ("0.5.21", "0.5.22", "0.5.23")
#: Set to 1 to start on another release all the same.
ALLOW_UNTESTED = "SGLANG_DDTREE_ALLOW_UNTESTED"


def installed() -> str | None:
    """The SGLang release in this environment, without importing it; None when there is none."""
    try:
        return version("sglang")
    except PackageNotFoundError:
        return None


def refusal() -> str | None:
    """Why this environment's SGLang is not served, or None when it is."""
    found = installed()
    if found in TESTED or (found is not None and os.environ.get(ALLOW_UNTESTED) == "1"):
        return None
    what = "no sglang is installed" if found is None else f"sglang {found} is installed"
    return (
        f"sglang-ddtree: {what}, tested with {', '.join(TESTED)}. Install one of these, "
        f"or set {ALLOW_UNTESTED}=1 to try this one."
    )
