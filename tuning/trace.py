"""Reader of the backend's records of decode steps; its ``sglang_ddtree/record.py`` has the format."""

from __future__ import annotations

import json
import struct
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

MAGIC = b"DDTR"
VERSION = 1


class TraceError(ValueError):
    """Not a record, of another version, or cut in the middle of its header."""


@dataclass(frozen=True)
class Header:
    """What was recorded."""

    mode: int
    """1 trace, 2 probe, 3 cost."""
    depth: int
    """Drafted positions of a step."""
    ranks: int
    """Candidates recorded per position."""
    budget: int
    """Of the server, as are the topk cap."""
    topk_cap: int


@dataclass(frozen=True)
class Step:
    """A step of one request."""

    before: int
    """Tokens before the root, prompt included."""
    committed: tuple[int, ...]
    tokens: array[int]
    """``depth * ranks``, best first per depth."""
    log_probs: array[float]
    """Of the same tokens."""


@dataclass
class Request:
    """All recorded steps of one request, in order."""

    rid: str
    prompt_tokens: int
    steps: list[Step] = field(default_factory=list)

    @property
    def output(self) -> list[int]:
        """The committed tokens, without the first of the answer, which the prefill gave."""
        return [token for step in self.steps for token in step.committed]


@dataclass(frozen=True)
class Cost:
    """What a step cost; times in seconds."""

    width: int
    requests: int
    before: int
    draft: float
    build: float
    verify: float
    commit: float


@dataclass
class Trace:
    """A whole file."""

    header: Header
    requests: list[Request] = field(default_factory=list)
    costs: list[Cost] = field(default_factory=list)
    whole: bool = True
    """False when the file ends in the middle of a record, as that of a killed server may."""

    def accept_length(self) -> float:
        """Committed tokens over steps, sum over sum. Raises ZeroDivisionError without a step."""
        steps = [step for request in self.requests for step in request.steps]
        return sum(len(step.committed) for step in steps) / len(steps)


def read(path: Path | str) -> Trace:
    """Read a file. Raises TraceError, OSError."""
    with Path(path).open("rb") as stream:
        magic = stream.read(4)
        if magic != MAGIC:
            raise TraceError(f"{path} starts with {magic!r}, expected {MAGIC!r}: not a record of DDTREE")
        try:
            version, length = struct.unpack("<HI", stream.read(6))
            if version != VERSION:
                raise TraceError(f"{path} has version {version}, expected {VERSION}")
            header = Header(**json.loads(stream.read(length)))
        except (struct.error, ValueError, TypeError) as error:
            if isinstance(error, TraceError):
                raise
            raise TraceError(f"{path} has no whole header: {error}") from error
        trace = Trace(header)
        try:
            for _ in _records(stream, trace):
                pass
        except (struct.error, EOFError):
            trace.whole = False
    return trace


def _records(stream: BinaryIO, trace: Trace) -> Iterator[None]:
    cells = trace.header.depth * trace.header.ranks
    while kind := stream.read(1):
        if kind == b"\1":
            _, prompt, length = struct.unpack("<IIH", stream.read(10))
            rid = _exactly(stream, length).decode(errors="replace")
            trace.requests.append(Request(rid, prompt))
        elif kind == b"\2":
            number, before, count = struct.unpack("<IIB", stream.read(9))
            committed = struct.unpack(f"<{count}I", stream.read(4 * count))
            tokens, log_probs = array("I"), array("f")
            tokens.frombytes(_exactly(stream, 4 * cells))
            log_probs.frombytes(_exactly(stream, 4 * cells))
            trace.requests[number].steps.append(Step(before, committed, tokens, log_probs))
        elif kind == b"\3":
            trace.costs.append(Cost(*struct.unpack("<HHI4f", stream.read(24))))
        else:
            raise TraceError(f"record of unknown kind {kind!r}")
        yield


def _exactly(stream: BinaryIO, length: int) -> bytes:
    data = stream.read(length)
    if len(data) < length:
        raise EOFError
    return data
