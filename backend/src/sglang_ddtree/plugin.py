"""Entry point of the plugin: SGLang calls :func:`activate` in every process of a server.

SGLang only logs an exception raised here and carries on without the plugin. A server that was asked for
DDTREE must not come up as something else, so for such a server a failure ends the process instead.
"""

from __future__ import annotations

import logging
import os
import sys

from sglang_ddtree import versions

logger = logging.getLogger(__name__)


def activate() -> None:
    """Register DDTREE and the hooks it needs; on a CPU engine those of the CPU as well.

    Raises:
        SystemExit: DDTREE or the CPU engine was asked for and cannot be had.
    """
    wanted = _wanted()
    message = versions.refusal()
    if message is not None:
        if wanted:
            raise SystemExit(message)
        logger.warning("%s DDTREE is not available.", message)
        return
    try:
        _register()
    except Exception as error:
        if wanted:
            raise SystemExit(f"sglang-ddtree: DDTREE could not be registered: {error!r}") from error
        raise


def _register() -> None:
    from sglang_ddtree import algorithm, hooks

    algorithm.register()
    hooks.register()
    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
        from sglang_ddtree.cpu.hooks import activate as activate_cpu

        activate_cpu()


def _wanted() -> bool:
    """Whether this process is part of a server that cannot do without the plugin."""
    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
        return True
    return any("ddtree" in argument.lower() for argument in sys.argv[1:])
