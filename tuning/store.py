"""The study on disk: every finished trial survives whatever happens next.

Layout of ``results/<study>/``::

    study.json                  what the sweep set out to do (written whole, atomically)
    trials.jsonl                one trial fact a line, append-only, synced before ``append`` returns
    facts/<host>/<trial>.json   the same fact, pretty, for people and tools
    report.md  report.csv

``results/latest`` is a link to the newest study, replaced in one step.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import JsonValue, TypeAdapter, ValidationError

from tuning.models import FileName, TrialFact

LATEST = "latest"
_NAME: TypeAdapter[str] = TypeAdapter(FileName)


class StoreError(RuntimeError):
    """The study can't be used as asked; the message says why."""


class ConcurrentWriter(StoreError):
    """Another process holds this study."""


@dataclass(frozen=True)
class Contents:
    """What a study holds: its facts in the order written, and lines that could not be read."""

    facts: list[TrialFact] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


class Study:
    """One study's folder. Making the object touches nothing; ``create`` makes the folder."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.trials = self.path / "trials.jsonl"

    @property
    def name(self) -> str:
        """The study's own name, with a ``latest`` link resolved."""
        return self.path.resolve().name

    def create(self) -> Study:
        """Make the folder (it may exist). Raises StoreError for a name that can't be one."""
        try:
            name = _NAME.validate_python(self.path.name)
        except ValidationError as error:
            raise StoreError(f"study name: {error.errors()[0]['msg']}") from error
        if name == LATEST:
            raise StoreError("a study can't be called 'latest'; that is the link to the newest one")
        self.path.mkdir(parents=True, exist_ok=True)
        _sync_dir(self.path.parent)
        return self

    def append(self, fact: TrialFact, lock_timeout_s: float = 10.0) -> Path:
        """Write the fact's file, then its line, each synced to disk; returns the fact's file.

        Hosts of one sweep may append side by side (each waits for the other's write). Raises
        ConcurrentWriter when the file stays locked for ``lock_timeout_s``, and StoreError when
        this host already has a trial of this name.
        """
        if fact.study != self.name:
            raise StoreError(f"the fact belongs to study {fact.study!r}, this one is {self.name!r}")
        line = fact.model_dump_json().encode() + b"\n"
        new = not self.trials.exists()
        with self.trials.open("a+b") as journal:
            _lock(journal.fileno(), self.trials, lock_timeout_s)
            if any(f.host == fact.host and f.trial == fact.trial for f in self.read().facts):
                raise StoreError(
                    f"study {self.name} already has trial {fact.trial} of host {fact.host}; "
                    "is another sweep writing to it? give this one its own sweep_study"
                )
            target = self._write_fact(fact)
            journal.seek(0, os.SEEK_END)
            if journal.tell() and _last_byte(journal.fileno(), journal.tell()) != b"\n":
                line = b"\n" + line  # a power loss tore the line before; leave it to be reported
            journal.write(line)
            journal.flush()
            os.fsync(journal.fileno())
        if new:
            _sync_dir(self.path)
        return target

    def _write_fact(self, fact: TrialFact) -> Path:
        folder = self.path / "facts" / fact.host
        if not folder.is_dir():
            folder.mkdir(parents=True, exist_ok=True)
            _sync_dir(folder.parent)
            _sync_dir(self.path)
        target = folder / f"{fact.trial}.json"
        _write_atomic(target, fact.model_dump_json(indent=2).encode() + b"\n")
        return target

    def read(self) -> Contents:
        """Facts and problems; a torn or foreign line is reported, never fatal, never silent."""
        try:
            raw = self.trials.read_bytes()
        except FileNotFoundError:
            return Contents()
        facts: list[TrialFact] = []
        problems: list[str] = []
        for number, line in enumerate(raw.split(b"\n"), 1):
            if not line.strip():
                continue
            try:
                facts.append(TrialFact.model_validate_json(line))
            except ValidationError as error:
                problems.append(f"{self.trials} line {number}: {_explain(error, line)}; the line is ignored")
        return Contents(facts, problems)

    def facts(self) -> list[TrialFact]:
        """The facts alone; use ``read`` to see problems too."""
        return self.read().facts

    def write_meta(self, meta: Mapping[str, JsonValue]) -> None:
        """Write ``study.json`` (grid, workload, hosts, versions) atomically."""
        text = json.dumps(dict(meta), indent=2, sort_keys=True, allow_nan=False)
        _write_atomic(self.path / "study.json", text.encode() + b"\n")

    def meta(self) -> dict[str, JsonValue]:
        """``study.json``, or an empty dict when there is none."""
        try:
            text = (self.path / "study.json").read_text(encoding="utf-8")
        except FileNotFoundError:
            return {}
        try:
            data = json.loads(text)
        except ValueError as error:
            raise StoreError(f"{self.path / 'study.json'} isn't JSON: {error}") from error
        if not isinstance(data, dict):
            raise StoreError(f"{self.path / 'study.json'} holds no JSON object")
        return data

    def write_text(self, name: str, text: str) -> Path:
        """Write a report file of the study atomically; returns its path."""
        target = self.path / name
        _write_atomic(target, text.encode())
        return target

    def link_latest(self) -> None:
        """Point ``latest`` beside the study at it, in one step."""
        link = self.path.parent / LATEST
        if link.exists() and not link.is_symlink():
            raise StoreError(f"{link} isn't a link; move it away, Arborist keeps the newest study there")
        with tempfile.TemporaryDirectory(prefix=".latest-", dir=self.path.parent) as folder:
            fresh = Path(folder) / LATEST
            fresh.symlink_to(self.path.name)
            fresh.replace(link)
        _sync_dir(self.path.parent)

    @contextlib.contextmanager
    def hold(self) -> Iterator[Study]:
        """Hold the study for a whole sweep. Raises ConcurrentWriter at once if another does."""
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / ".lock").open("a+b") as lock:
            _lock(lock.fileno(), self.path, 0.0)
            yield self


def open_study(results: Path | str, name: str = LATEST) -> Study:
    """The named study of a results folder (``latest`` follows the link).

    Raises StoreError naming what is there when it doesn't exist.
    """
    folder = Path(results)
    if name != LATEST:
        try:
            _NAME.validate_python(name)
        except ValidationError as error:
            raise StoreError(f"study: {error.errors()[0]['msg']}") from error
    path = folder / name
    if not path.is_dir():
        there = (
            sorted(p.name for p in folder.iterdir() if p.is_dir() and not p.is_symlink())
            if folder.is_dir()
            else []
        )
        known = ", ".join(n for n in there if not n.startswith("."))
        raise StoreError(f"no study {name!r} in {folder}; found: {known or 'none'} (run a sweep first)")
    return Study(path.resolve())


def _lock(descriptor: int, path: Path, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError as error:
            if time.monotonic() >= deadline:
                raise ConcurrentWriter(
                    f"{path} is being written by another process; one sweep per study"
                ) from error
            time.sleep(0.02)


def _last_byte(descriptor: int, size: int) -> bytes:
    return os.pread(descriptor, 1, size - 1)


def _explain(error: ValidationError, line: bytes) -> str:
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return f"not whole JSON ({len(line)} bytes, torn by a crash?)"
    where = ".".join(str(part) for part in first["loc"]) or "fact"
    return f"not a trial fact this version knows: {where}: {first['msg']}"


def _write_atomic(target: Path, data: bytes) -> None:
    """All of ``data`` or the old file, even over a power loss."""
    descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fchmod(file.fileno(), 0o644)
            os.fsync(file.fileno())
        Path(name).replace(target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    _sync_dir(target.parent)


def _sync_dir(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
