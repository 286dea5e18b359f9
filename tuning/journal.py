"""The service's journal: entries by cursor and InvocationID, and the metrics lines in them."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
_METRICS = re.compile(r"\b([A-Z][A-Z0-9_]*) metrics: (?=\w+=)(.*)")
_DECODE = re.compile(r"Decode batch(?: \[(\d+)\])?, (#running-req: .*)")
_RANK = re.compile(r"\b(?:DP|PP|TP|EP|MOE_DP|ATTN_CP)\d+\b")


class JournalError(RuntimeError):
    """The journal can't be read, or a line in it isn't what it must be."""


@dataclass(frozen=True)
class Entry:
    """One journal entry. ``message`` is plain text: no colour codes, undecodable bytes replaced."""

    cursor: str
    timestamp_us: int
    pid: int
    message: str
    invocation_id: str


@dataclass(frozen=True)
class DdtreeLine:
    """One metrics line of the backend: what was accepted since the line before.

    ``steps`` are verify steps summed over requests, ``tokens`` what they committed, bonus included;
    ``histogram[i]`` counts steps that accepted i draft tokens. ``budget`` and ``topk`` are None on a
    line of the chain (``DFLASH metrics:``). Times are milliseconds per scheduler step.
    """

    algorithm: str
    budget: int | None
    topk: int | None
    steps: int
    tokens: int
    avg_commit_len: float
    histogram: tuple[int, ...]
    draft_ms: float | None
    build_ms: float | None
    verify_ms: float | None
    commit_ms: float | None = None


@dataclass(frozen=True)
class DecodeLine:
    """One ``Decode batch`` line of SGLang: a window of ``--decode-log-interval`` scheduler steps.

    ``accept_len`` (two decimals, over the window) is None when the engine doesn't speculate;
    ``running`` is the batch size of the window's last step only.
    """

    timestamp_us: int
    rank: str
    iteration: int | None
    running: int
    queued: int
    accept_len: float | None
    tok_s: float
    graph: bool


def sync() -> bool:
    """Ask journald to take in everything already written to it; False when that isn't allowed."""
    try:
        _journalctl(["--sync"])
    except JournalError:
        return False
    return True


def cursor(unit: str) -> str:
    """The position after the journal's newest entry; "" for an empty journal.

    It is a position in the whole journal, of whatever unit; ``unit`` only names it in errors.
    """
    lines = _journalctl(["-n", "1", "-o", "json", "--output-fields=_PID"], unit).splitlines()
    if not lines:
        return ""
    value = json.loads(lines[-1]).get("__CURSOR")
    if not isinstance(value, str):
        raise JournalError(f"journalctl gave no cursor for {unit}: {lines[-1][:200]}")
    return value


def entries(
    unit: str, after_cursor: str | None = None, invocation_id: str | None = None, last: int | None = None
) -> list[Entry]:
    """The unit's entries, oldest first, with what systemd itself said about the unit.

    ``after_cursor`` leaves out everything up to that position, ``invocation_id`` everything of other starts
    of the unit, and ``last`` all but that many entries. Raises JournalError.
    """
    fields = "MESSAGE,_PID,_SYSTEMD_INVOCATION_ID,INVOCATION_ID"
    argv = ["-o", "json", f"--output-fields={fields}"]
    if after_cursor:
        argv += ["--after-cursor", after_cursor]
    if last is not None:
        argv += ["-n", str(last)]
    if invocation_id:
        # what the unit's processes wrote, or ("+") what systemd wrote about this start
        argv += [f"_SYSTEMD_INVOCATION_ID={invocation_id}", "+", f"INVOCATION_ID={invocation_id}"]
    else:
        argv += ["-u", unit]
    return parse_json(_journalctl(argv, unit))


def _journalctl(arguments: Sequence[str], unit: str = "") -> str:
    argv = ["journalctl", "--no-pager", "-q", *arguments]
    try:
        done = subprocess.run(argv, capture_output=True, timeout=60, check=False)
    except FileNotFoundError as error:
        raise JournalError("journalctl isn't on this machine; run where the unit runs") from error
    except subprocess.TimeoutExpired as error:
        raise JournalError(f"journalctl gave no answer in 60 s{f' for {unit}' if unit else ''}") from error
    if done.returncode and not done.stdout:
        said = done.stderr.decode(errors="replace").strip()[:300]
        if said:  # status 1 without a word means "no entries"
            raise JournalError(f"journalctl {' '.join(arguments)[:200]} failed: {said}")
    return done.stdout.decode(errors="replace")


def parse_json(text: str) -> list[Entry]:
    """Parse ``journalctl -o json``: one object a line."""
    found = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            data = json.loads(line)
        except ValueError as error:
            raise JournalError(f"journalctl line {number} isn't JSON: {line[:120]!r}") from error
        found.append(
            Entry(
                cursor=str(data.get("__CURSOR", "")),
                timestamp_us=int(data.get("__REALTIME_TIMESTAMP", 0)),
                pid=int(_text(data.get("_PID")) or 0),
                message=_ANSI.sub("", _text(data.get("MESSAGE"))),
                invocation_id=_text(data.get("_SYSTEMD_INVOCATION_ID")) or _text(data.get("INVOCATION_ID")),
            )
        )
    return found


def _text(value: object) -> str:
    """A field as text: journald gives bytes as a list of numbers, a field that occurs twice as a
    list of values, and null for what is too long to show."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        if value and all(isinstance(one, int) for one in value):
            return bytes(value).decode(errors="replace")
        return "\n".join(_text(one) for one in value)
    return ""


def tail(found: Sequence[Entry], lines: int = 40, width: int = 400) -> list[str]:
    """The last lines of the entries, each cut to ``width`` characters."""
    texts = [line for entry in found for line in entry.message.splitlines() if line.strip()]
    return [line if len(line) <= width else line[: width - 3] + "..." for line in texts[-lines:]]


def parse_metrics(found: Iterable[Entry]) -> list[DdtreeLine]:
    """The backend's metrics lines. Raises JournalError for one whose figures contradict each other."""
    return [
        _metrics_line(match[1], match[2], line)
        for entry in found
        for line in entry.message.splitlines()
        if (match := _METRICS.search(line))
    ]


def _metrics_line(algorithm: str, text: str, line: str) -> DdtreeLine:
    values = dict(pair.split("=", 1) for pair in text.split() if "=" in pair)
    try:
        counts = tuple(int(count) for count in values["hist"].split(","))
        made = DdtreeLine(
            algorithm=algorithm,
            budget=int(values["budget"]) if "budget" in values else None,
            topk=int(values["topk"]) if "topk" in values else None,
            steps=int(values["steps"]),
            tokens=int(values["tokens"]),
            avg_commit_len=float(values["avg_commit_len"]),
            histogram=counts,
            draft_ms=_optional(values, "draft_ms"),
            build_ms=_optional(values, "build_ms"),
            verify_ms=_optional(values, "verify_ms"),
            commit_ms=_optional(values, "commit_ms"),
        )
    except (KeyError, ValueError) as error:
        raise JournalError(
            f"metrics line can't be read ({error}): {line[:200]!r}; expected budget= topk= steps= tokens= "
            "avg_commit_len= hist="
        ) from error
    tokens = sum(count * (accepted + 1) for accepted, count in enumerate(counts))
    if sum(counts) != made.steps or tokens != made.tokens:
        raise JournalError(
            f"metrics line contradicts itself: its histogram holds {sum(counts)} steps and {tokens} tokens, "
            f"it says steps={made.steps} tokens={made.tokens}: {line[:200]!r}"
        )
    return made


def _optional(values: dict[str, str], key: str) -> float | None:
    return float(values[key]) if key in values else None


def parse_decode(found: Iterable[Entry]) -> list[DecodeLine]:
    """SGLang's ``Decode batch`` lines, of a speculating engine or not, on any device and rank."""
    lines = []
    for entry in found:
        for line in entry.message.splitlines():
            if match := _DECODE.search(line):
                lines.append(_decode_line(entry.timestamp_us, match, line))
    return lines


def _decode_line(timestamp_us: int, match: re.Match[str], line: str) -> DecodeLine:
    values = dict(part.split(": ", 1) for part in match[2].split(", ") if ": " in part)
    graph = next((value for key, value in values.items() if key.endswith(" graph")), "False")
    try:
        return DecodeLine(
            timestamp_us=timestamp_us,
            rank=" ".join(_RANK.findall(line[: match.start()])),
            iteration=int(match[1]) if match[1] else None,
            running=int(values["#running-req"]),
            queued=int(values["#queue-req"]),
            accept_len=float(values["accept len"]) if "accept len" in values else None,
            tok_s=float(values["gen throughput (token/s)"]),
            graph=graph == "True",
        )
    except (KeyError, ValueError) as error:
        raise JournalError(f"'Decode batch' line can't be read ({error}): {line[:200]!r}") from error
