"""A faster start of the CPU engine."""

from __future__ import annotations

import multiprocessing
from typing import Any


def prepare() -> None:
    """Nothing yet."""


def after_environment(result: Any, *args: Any) -> None:
    """Fork the scheduler and the detokenizer instead of spawning them: they inherit the parent's imports.

    SGLang spawns because CUDA does not survive a fork; on a CPU engine there is none.
    """
    multiprocessing.set_start_method("fork", force=True)
