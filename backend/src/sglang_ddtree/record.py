"""Records of decode steps for replay: what the draft said, what was committed, what a step cost.

Switched while the server runs, through ``/set_internal_state`` with
``{"server_args": {"ddtree_record": MODE}}``:

0. off
1. trace: each step's marginals and the tokens it committed
2. probe: the same, and every step commits one token, so that every position is recorded. To replay N tokens
   ask for N and the draft's depth more.
3. cost: the budget goes round from step to step, and each step's width and times are recorded

Files go to the folder named by ``SGLANG_DDTREE_RECORD_DIR`` and hold users' texts: only the service's user
may read them. The format is little-endian:

``DDTR``, version (u16), length of the header (u32), header (JSON: mode, depth, ranks, budget, topk_cap), then
records, each a kind (u8) and

1. request: number (u32), tokens of the prompt (u32), length of its id (u16), id
2. step: number of the request (u32), tokens before the root (u32), committed (u8), the committed tokens (u32
   each), tokens (u32) and log-probabilities (f32) of ``depth * ranks`` candidates, best first per depth
3. cost: verify width (u16), requests (u16), tokens before the roots in all (u32), seconds of draft, build,
   verify and commit (f32 each)
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from torch import Tensor

from sglang_ddtree.metrics import STAGES
from sglang_ddtree.options import Options

logger = logging.getLogger(__name__)

KEY = "ddtree_record"
DIR_ENV = "SGLANG_DDTREE_RECORD_DIR"
LIMIT_ENV = "SGLANG_DDTREE_RECORD_MB"
OFF, TRACE, PROBE, COST = range(4)
#: Candidates recorded per depth, whatever the topk cap: replay can try any cap up to it.
RANKS = 16
VERSION = 1
MAGIC = b"DDTR"
DEFAULT_LIMIT_MB = 256
_LONGEST_ID = 1000


@dataclass
class Step:
    """One scheduler step's tensors on the host, or on their way there."""

    tokens: Tensor
    """int32 ``[batch, depth, ranks]``."""
    log_probs: Tensor
    """float32 of the same shape."""
    before: Tensor
    """int64 ``[batch]``: tokens before the root."""
    committed: Tensor
    """int64 ``[batch, width]``."""
    lengths: Tensor
    """int32 ``[batch]``."""


class Recorder:
    """Writes one file from each switch on to the next switch. Held by the process whose rank reports."""

    def __init__(self, options: Options, depth: int, environ: Mapping[str, str] | None = None) -> None:
        """Start switched off."""
        environ = os.environ if environ is None else environ
        self._options = options
        self._depth = depth
        self._folder = environ.get(DIR_ENV) or None
        self._limit = int(environ.get(LIMIT_ENV) or DEFAULT_LIMIT_MB) * 1_000_000
        self._numbers = itertools.count()
        self._file: BinaryIO | None = None
        self._written = 0
        self._requests: dict[str, int] = {}
        self._found = itertools.count()
        self.mode = OFF
        self.path: Path | None = None
        #: Budgets of the cost mode, small and large in turn.
        self._budgets = itertools.cycle(_round(options.budget))

    def refusal(self, value: Any) -> str | None:
        """Why the mode can't be switched to ``value``, or None."""
        if value not in (OFF, TRACE, PROBE, COST) or isinstance(value, bool):
            return f"{KEY} is {value!r}, expected 0 (off), 1 (trace), 2 (probe) or 3 (cost)"
        if value != OFF and self._folder is None:
            return f"{KEY} {value} needs a folder: start the server with {DIR_ENV} set to one"
        if value != OFF and not os.access(str(self._folder), os.W_OK | os.X_OK):
            return f"{DIR_ENV} is {self._folder}, expected a folder that the service's user can write to"
        return None

    def switch(self, value: float, writes: bool = True) -> None:
        """Go to a mode that :meth:`refusal` has nothing against; ranks that do not report write nothing."""
        self._close()
        self.mode = int(value)
        if self.mode == OFF or not writes:
            return
        names = (Path(str(self._folder)) / f"{os.getpid()}-{n}.ddtr" for n in self._numbers)
        self.path = next(name for name in names if not name.exists())
        try:
            self._file = os.fdopen(os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")
        except OSError as error:
            self._stop(str(error))
            return
        header = {
            "mode": self.mode,
            "depth": self._depth,
            "ranks": RANKS,
            "budget": self._options.budget,
            "topk_cap": self._options.topk_cap,
        }
        text = json.dumps(header).encode()
        self._write(MAGIC + struct.pack("<HI", VERSION, len(text)) + text)
        if self._file is not None:
            logger.info("DDTREE records to %s (mode %d)", self.path, self.mode)

    @property
    def keeps_steps(self) -> bool:
        """Whether steps' marginals are wanted."""
        return self.mode in (TRACE, PROBE)

    def budget(self) -> int | None:
        """The budget of the next step where the mode decides it."""
        if self.mode == PROBE:
            return 1
        return next(self._budgets) if self.mode == COST else None

    def add(self, reqs: Sequence[Any], running: Sequence[bool], step: Step) -> None:
        """Write a step whose results the host has, of the requests that were still running."""
        if self._file is None:
            return
        before, lengths = step.before.tolist(), step.lengths.tolist()
        for row, (req, counts) in enumerate(zip(reqs, running, strict=True)):
            if counts:
                self._add_row(req, row, step, before[row], lengths[row])

    def _add_row(self, req: Any, row: int, step: Step, before: int, count: int) -> None:
        prompt = len(req.origin_input_ids)
        number = self._requests.get(req.rid)
        # Clients may choose ids, and the same again; a request's first step is right after its prompt.
        if number is None or before == prompt:
            number = self._requests[req.rid] = next(self._found)
            rid = req.rid.encode(errors="replace")[:_LONGEST_ID]
            self._write(struct.pack("<BIIH", 1, number, prompt, len(rid)) + rid)
        committed = step.committed[row, :count].tolist()
        self._write(
            struct.pack(f"<BIIB{count}I", 2, number, before, count, *committed)
            + step.tokens[row].numpy().tobytes()
            + step.log_probs[row].numpy().tobytes()
        )

    def cost(self, size: tuple[int, int, int], seconds: Mapping[str, float]) -> None:
        """Write what a step cost; ``size``: verify width, requests, tokens before the roots in all."""
        if self._file is not None and self.mode == COST:
            times = [seconds[stage] for stage in STAGES]
            self._write(struct.pack("<BHHI4f", 3, *size, *times))

    def _write(self, data: bytes) -> None:
        """Write, or stop recording: a server does not end because a disk is full."""
        if self._file is None:
            return
        if self._written + len(data) > self._limit:
            self._stop(f"it is full ({LIMIT_ENV})")
            return
        try:
            self._file.write(data)
        except OSError as error:
            self._stop(str(error))
        self._written += len(data)

    def _stop(self, reason: str) -> None:
        logger.warning("DDTREE stopped recording to %s: %s", self.path, reason)
        self._close()
        self.mode = OFF

    def _close(self) -> None:
        if self._file is not None:
            try:
                self._file.close()
            except OSError as error:
                logger.warning("DDTREE's record %s is not whole: %s", self.path, error)
        self._file = None
        self._written = 0
        self._requests = {}
        self._found = itertools.count()


def _round(budget: int) -> list[int]:
    """1, the largest, 2, half of it, ..: neighbours in time differ much."""
    rising = [b for b in (2**i for i in range(12)) if b < budget] + [budget]
    return [b for pair in zip(rising, reversed(rising), strict=True) for b in pair]


_current: Recorder | None = None


def current() -> Recorder | None:
    """The recorder of this process, None where no steps are run."""
    return _current


def install(recorder: Recorder) -> Recorder:
    """Make ``recorder`` this process's."""
    global _current
    _current = recorder
    return recorder
