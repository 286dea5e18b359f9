"""Why a service did not start or died: its journal and its unit's state as one class."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from tuning.models import Failure, FailureKind
from tuning.units import UnitState

TAIL_LINES = 40
#: A line of argparse's usage: its first, or one that goes on with flags.
_USAGE = re.compile(r"usage: |\s{8,}\[--")
TAIL_WIDTH = 400

#: SIGKILL; SGLang also kills its own process tree with it after a failure, so it says little alone.
_SIGKILL = 9

# SGLang prints its settings (one line of 15,000 characters) and systemd the command: no causes there.
_NOISE = re.compile(r"server_args=|ServerArgs\(|^usage: |^\s+\[-")
_STAMP = re.compile(r"^\[?\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[^\]]*\]\s*")
_EXCEPTION = re.compile(r"^(?:[\w.]+\.)?\w*(?:Error|Exception|Exit|Interrupt)\b(?::|$)")
_PATH_OF_DRAFT = re.compile(r"speculative|draft|dflash|ddtree", re.IGNORECASE)


@dataclass(frozen=True)
class _Rule:
    kind: FailureKind
    pattern: re.Pattern[str]
    hint: str


def _rule(kind: FailureKind, hint: str, *patterns: str) -> _Rule:
    return _Rule(kind, re.compile("|".join(patterns)), hint)


#: First rule that matches any line wins: precise causes before the general ones they end in.
_RULES: tuple[_Rule, ...] = (
    _rule(
        "unsupported_version",
        "install an SGLang release the backend was tested with",
        r"sglang-ddtree: .*(tested with|could not be registered)",
        r"this SGLang is not one this package was tested with",
    ),
    _rule(
        "unknown_algorithm",
        "the DDTREE plugin isn't installed in the engine's environment; run deploy.yml again",
        r"Unknown speculative algorithm name",
    ),
    _rule(
        "context_too_small",
        "lower the budget, or raise context-length in sglang_engine_args",
        r"tokens per verify, but the context length is",
        r"context_length \(\d+\) is greater than the derived context_length",
        r"(?:input|prompt).* (?:is longer than|exceeds) the model's context length",
    ),
    _rule(
        "bad_argument",
        "correct sglang_engine_args or the configuration's extra flags",
        r"error: (?:unrecognized arguments|argument |the following arguments are required|ambiguous option)",
        r"was given with --speculative-algorithm",
        r"DDTREE does not support",
        r"DDTREE needs an attention backend",
        r"DDTREE verifies trees, and found a target with",
        r"expected at least \d",
        r"expected a whole number",
    ),
    _rule(
        "draft_mismatch",
        "sglang_draft_model_path must hold a DFlash draft trained for this target; "
        "set sglang_block_size to its block",
        r"(?:Error|Exception): .*block size mismatch",
        r"fc\.weight shape mismatch",
        r"DDTREE found no block size",
        r"DDTREE found a draft block of",
        r"expected a plain DFlash draft",
    ),
    _rule(
        "draft_missing",
        "set sglang_draft_model_path to a DFlash draft",
        r"DDTREE needs a draft model and found none",
    ),
    _rule(
        "port_in_use",
        "stop what holds the port, or set sglang_port",
        r"\[Errno 98\]",
        r"[Aa]ddress already in use",
        r"[Pp]ort (?:\d+ )?is already in use",
    ),
    _rule(
        "model_missing",  # or the draft: decided by what was loading
        "set sglang_model_path to a directory that exists on the host and that the service's user can read",
        r"Repo id must",
        r"does not appear to have a file named",
        r"is not a local folder and is not a valid model identifier",
        r"[Cc]an't load the configuration of",
        r"couldn't find (?:it|them) in the cached files",
        r"Cannot find any model weights with",
        r"No such file or directory: '[^']*(?:config\.json|\.safetensors|tokenizer[^']*)'",
        r"Unrecognized model in",
    ),
    _rule(
        "shared_memory",
        "a kernel needs more shared memory than the GPU has, or /dev/shm is full; lower the budget, or "
        "free /dev/shm",
        r"OutOfResources: shared memory",
        r"out of resource: shared memory",
        r"No space left on device: '?/dev/shm",
        r"[Uu]nable to (?:open|mmap|allocate).* shared memory",
        r"/dev/shm.*No space left on device",
    ),
    _rule(
        "graph_capture",
        "lower the captured batch size (cuda-graph-max-bs) or mem-fraction-static in sglang_engine_args",
        r"Capture (?:cuda|CUDA|cpu)[ _-]?graph failed",
        r"Capturing .*graph.* failed",
        r"cudaErrorStreamCapture",
    ),
    _rule(
        "out_of_memory",
        "lower the budget, mem-fraction-static, max-running-requests or context-length in sglang_engine_args",
        r"OutOfMemoryError",
        r"CUDA out of memory",
        r"Not enough memory",
        r"(?:can't|cannot|unable to) allocate memory",
        r"Cannot allocate memory",
        r"^MemoryError",
        r"Out of memory even after retracting",
        r"killed by the OOM killer",
        r"Failed with result 'oom-kill'",
    ),
    _rule(
        "nccl",
        "check NCCL_* in sglang_environment; a wrong NCCL_P2P_LEVEL can fail or hang",
        r"NCCL.*(?:unhandled|error|Error|timed? ?out|failure)",
        r"nccl(?:Unhandled|Internal|System|InvalidUsage|Remote)\w*",
        r"Watchdog caught collective operation timeout",
    ),
    _rule(
        "watchdog",
        "a step took longer than watchdog-timeout; raise it in sglang_engine_args if the load is real",
        r"[Ww]atchdog timeout",
    ),
    _rule(
        "health",
        "the engine came up but could not generate; the journal's lines above say why",
        r"Initialization failed\. warmup error",
        r"Health check failed",
        r"couldn't get a response from detokenizer",
    ),
)

#: Ends that systemd names itself.
_BY_RESULT: dict[str, tuple[FailureKind, str, str]] = {
    "oom-kill": (
        "out_of_memory",
        "the kernel killed the service: the machine or the unit's memory limit ran out",
        "lower max-total-tokens in sglang_engine_args, or raise the unit's MemoryMax",
    ),
    "timeout": (
        "timeout",
        "systemd gave up waiting for the service to start or stop",
        "raise the unit's TimeoutStartSec or TimeoutStopSec",
    ),
    "watchdog": ("watchdog", "systemd's watchdog ended the service", "raise the unit's WatchdogSec"),
}


def classify(journal_lines: Sequence[str], unit_state: UnitState | None = None) -> Failure:
    """The failure that the lines (oldest first) and the unit's end tell of.

    The cause is the first rule, in order of precision, that any line matches; without one, how the
    unit ended decides. ``journal_tail`` keeps the last 40 lines, each at most 400 characters.
    """
    lines = [line for text in journal_lines for line in text.splitlines() if line.strip()]
    failure = _cause(lines) or _by_state(lines, unit_state)
    return failure.model_copy(update={"journal_tail": _tail(lines)})


def stuck(journal_lines: Sequence[str]) -> Failure | None:
    """A failure after which the engine lives on without ever serving, or None.

    SGLang 0.5.23 that can't bind its port says so and keeps its processes, so the unit stays active.
    """
    lines = [line for text in journal_lines for line in text.splitlines() if line.strip()]
    found = _cause(lines)
    if found is None or found.kind != "port_in_use":
        return None
    return found.model_copy(update={"journal_tail": _tail(lines)})


def _tail(lines: Sequence[str]) -> list[str]:
    """The last lines, without the hundreds of a parser's list of all flags."""
    return [_cut(line) for line in lines if not _USAGE.match(line)][-TAIL_LINES:]


def _cause(lines: Sequence[str]) -> Failure | None:
    for rule in _RULES:
        found = [n for n, line in enumerate(lines) if rule.pattern.search(line) and not _NOISE.search(line)]
        if not found:
            continue
        number = found[-1]  # of chained exceptions the one that ended it
        kind, hint = rule.kind, rule.hint
        if kind == "model_missing" and _loading_draft(lines, number):
            kind, hint = "draft_missing", hint.replace("sglang_model_path", "sglang_draft_model_path")
        return Failure(kind=kind, summary=_summary(lines[number]), hint=hint)
    return None


def _loading_draft(lines: Sequence[str], number: int) -> bool:
    """Whether the traceback that ends at line ``number`` went through code that loads the draft."""
    start = number
    while start > 0 and not lines[start].startswith("Traceback ("):
        start -= 1
    frames = [line for line in lines[start : number + 1] if _is_frame(line)]
    return any(_PATH_OF_DRAFT.search(_STAMP.sub("", line)) for line in [*frames, lines[number]])


def _is_frame(line: str) -> bool:
    return line.lstrip().startswith('File "')


def _by_state(lines: Sequence[str], state: UnitState | None) -> Failure:
    if state is not None and state.result in _BY_RESULT:
        kind, summary, hint = _BY_RESULT[state.result]
        return Failure(kind=kind, summary=summary, hint=hint)
    ended = state.ended() if state is not None else "the service ended"
    exceptions = [line for line in lines if _EXCEPTION.match(_STAMP.sub("", line))]
    if exceptions:
        return Failure(
            kind="crashed", summary=_summary(exceptions[-1]), hint=f"{ended}; read the journal's tail"
        )
    died = any(re.search(r"exit code: -9\b", line) for line in lines)
    if died or (state is not None and state.exec_main_code == 2 and state.exec_main_status == _SIGKILL):
        return Failure(
            kind="killed",
            summary=f"{ended}, and the journal gives no cause",
            hint="look for the kernel's OOM killer (journalctl -k) and for who sent the signal",
        )
    said = f"last line: {_summary(lines[-1])}" if lines else "the journal has no line of it"
    return Failure(kind="crashed", summary=f"{ended}; {said}", hint="read the journal's tail")


def _summary(line: str) -> str:
    text = _STAMP.sub("", line.strip())
    return text if len(text) <= 300 else text[:297] + "..."


def _cut(line: str) -> str:
    return line if len(line) <= TAIL_WIDTH else line[: TAIL_WIDTH - 3] + "..."
