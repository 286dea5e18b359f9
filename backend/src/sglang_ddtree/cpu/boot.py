"""A faster start and a quiet rest of the CPU engine: a demonstration restarts it for every configuration.

Measured on two cores: most of a start is importing, done three times over; then SGLang imports all of its 250
model files to find one class, and sleeps a second before it looks whether it is up.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import multiprocessing
import os
import re
import time
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

#: Set, a CPU engine schedules with overlap, as accelerators do: for tests of it.
OVERLAP_ENV = "SGLANG_DDTREE_CPU_OVERLAP"
#: SGLang's own variable: names of model files it shall not import.
DISABLED_MODELS = "SGLANG_DISABLED_MODEL_ARCHS"


def choose_flags(cls: type, args: argparse.Namespace) -> None:
    """Flags of SGLang's own that a CPU wants. Hook before the flags become a record.

    ``--sleep-on-idle``: an idle scheduler waits for requests instead of spinning on one of the cores it
    shares. ``--disable-overlap-schedule``: a CPU does one thing after the other, so that overlap hides
    nothing there, and it runs one more step for every request that has ended, a twentieth of the speed.
    """
    args.sleep_on_idle = True
    if not os.environ.get(OVERLAP_ENV):
        args.disable_overlap_schedule = True


def after_environment(result: Any, server_args: Any) -> None:
    """Prepare for the start of SGLang's processes. Hook after its own preparation.

    They are forked instead of spawned, and so inherit the imports. SGLang spawns because CUDA does not
    survive a fork; on a CPU engine there is none. The garbage collector, paused at interpreter start, runs
    again.
    """
    multiprocessing.set_start_method("fork", force=True)
    if DISABLED_MODELS not in os.environ:
        os.environ[DISABLED_MODELS] = ",".join(unused_models(_architectures(server_args)))
    gc.freeze()
    gc.enable()


def unused_models(architectures: Iterable[str]) -> list[str]:
    """SGLang's model files that define none of the architectures; empty when one is defined nowhere."""
    spec = find_spec("sglang.srt.models")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    sources = {
        path.stem: path.read_text(errors="replace")
        for directory in spec.submodule_search_locations
        for path in Path(directory).glob("*.py")
        if path.stem != "__init__"
    }
    used: set[str] = set()
    for name in architectures:
        defining = {
            stem for stem, text in sources.items() if re.search(rf"^class {re.escape(name)}\b", text, re.M)
        }
        if not defining:
            return []
        used |= defining
    return sorted(set(sources) - used) if used else []


def _architectures(server_args: Any) -> list[str]:
    """Architectures of the local target and draft; empty when one is not a local directory."""
    names: list[str] = []
    for path in (server_args.model_path, server_args.speculative_draft_model_path):
        if path is None:
            continue
        config = Path(path) / "config.json"
        if not config.is_file():
            return []
        names += json.loads(config.read_text()).get("architectures") or []
    return names


def warm_up_without_delay(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Look whether the server is up ten times a second at first. Hook around SGLang's warm-up."""
    from sglang.srt.entrypoints import http_server

    waits = iter([0.1] * 10)
    module = http_server.time
    patched = SimpleNamespace(**vars(module))
    patched.sleep = lambda seconds: time.sleep(next(waits, seconds))
    http_server.time = patched
    try:
        return original(*args, **kwargs)
    finally:
        http_server.time = module


async def stop_without_delay(original: Callable[..., Any], manager: Any) -> None:
    """Look for a SIGTERM ten times a second instead of every five seconds. Hook around SGLang's own watch."""
    while not manager.gracefully_exit:
        await asyncio.sleep(0.1)
    await original(manager)
