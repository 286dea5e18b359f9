"""Real failures of SGLang 0.5.23 with the backend, and how each is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from tuning import failures
from tuning.units import UnitState

JOURNALS = Path(__file__).parent / "journals"


def state(result: str = "exit-code", code: int = 1, status: int = 1) -> UnitState:
    return UnitState("failed", "failed", result, 0, "i", 0, code, status, "/x", 0.0, 0.0)


SIGKILLED = state("signal", 2, 9)


def captured(name: str) -> list[str]:
    return (JOURNALS / f"{name}.txt").read_text().splitlines()


@pytest.mark.parametrize(
    ("name", "kind", "said"),
    [
        ("bad_argument", "bad_argument", "unrecognized arguments: --no-such-flag 3"),
        ("bad_value", "bad_argument", "argument --max-running-requests: invalid int value: 'abc'"),
        ("budget_zero", "bad_argument", "is 0, expected at least 1"),
        ("budget_beyond_context", "context_too_small", "budget 5000 needs 5001 tokens per verify"),
        ("context_length", "context_too_small", "context_length (100000) is greater than"),
        ("draft_mismatch", "draft_mismatch", "fc.weight shape mismatch"),
        ("draft_missing", "draft_missing", "'/nope'"),
        ("draft_not_given", "draft_missing", "DDTREE needs a draft model and found none"),
        ("model_missing", "model_missing", "'/nope/model'"),
        ("port_in_use", "port_in_use", "address already in use"),
        ("unknown_algorithm", "unknown_algorithm", "Unknown speculative algorithm name: DDTREEX"),
        ("kv_pool_too_small", "out_of_memory", "Out of memory even after retracting"),
    ],
)
def test_captured_failures(name: str, kind: str, said: str) -> None:
    # SGLang kills its own process tree, so the unit's end is the same whatever the cause
    failure = failures.classify(captured(name), SIGKILLED)
    assert failure.kind == kind
    assert said in failure.summary
    assert not failure.summary.startswith(("raise ", "[2026"))
    assert failure.hint
    assert 0 < len(failure.journal_tail) <= 40
    assert max(map(len, failure.journal_tail)) <= 400


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", "out_of_memory"),
        ("RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.", "out_of_memory"),
        (
            "RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: you tried",
            "out_of_memory",
        ),
        ("OSError: [Errno 12] Cannot allocate memory", "out_of_memory"),
        ("sglang.service: A process of this unit has been killed by the OOM killer.", "out_of_memory"),
        ("Exception: Capture cuda graph failed: CUDA out of memory. Possible solutions:", "graph_capture"),
        (
            "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 1",
            "shared_memory",
        ),
        ("OutOfResources: shared memory, Required: 106496, Hardware limit: 101376", "shared_memory"),
        ("OSError: [Errno 28] No space left on device: '/dev/shm/psm_1'", "shared_memory"),
        ("[2026-01-01 00:00:00] Scheduler watchdog timeout (self.watchdog_last_forward_ct=1)", "watchdog"),
        ("torch.distributed.DistBackendError: NCCL error in: x.cpp:1, unhandled system error", "nccl"),
        ("ncclSystemError: System call (e.g. socket, malloc) or external library call failed", "nccl"),
        ("Initialization failed. warmup error: Traceback (most recent call last):", "health"),
        ("Health check failed. Server couldn't get a response from detokenizer for last 20 s", "health"),
        (
            "ERROR: [Errno 98] error while attempting to bind on address: address already in use",
            "port_in_use",
        ),
        ("OSError: Port 30000 is already in use", "port_in_use"),
        ("ValueError: Unknown speculative algorithm name: DDTREE", "unknown_algorithm"),
        ("ValueError: DFLASH block size mismatch: 8 vs 16", "draft_mismatch"),
        (
            "sglang-ddtree: found SGLang 0.5.1, tested with 0.5.23. Install one of these",
            "unsupported_version",
        ),
        ("OSError: /m does not appear to have a file named config.json.", "model_missing"),
        ("FileNotFoundError: [Errno 2] No such file or directory: '/m/config.json'", "model_missing"),
        ("ValueError: DDTREE does not support --page-size 16: expected --page-size 1", "bad_argument"),
    ],
)
def test_documented_texts(line: str, kind: str) -> None:
    assert (
        failures.classify(["Booting", line, "Received sigquit from a child process."], SIGKILLED).kind == kind
    )


@pytest.mark.parametrize(
    "line",
    [
        "server_args=ServerArgs(watchdog_timeout=300, note='watchdog timeout', x='[Errno 98]')",
        "[2026-01-01 00:00:00] server_args={'x': 'Unknown speculative algorithm name'}",
        "init_cpu_threads_env and shared memory based AllReduce is disabled, only intel amx backend",
        "[2026-01-01 00:00:00] NCCL version 2.27.3+cuda12.9",
        "[2026-01-01 00:00:00] DFLASH block size mismatch between the config and the flag; using 8",
        "  [--watchdog-timeout WATCHDOG_TIMEOUT] watchdog timeout",
    ],
)
def test_harmless_lines_are_no_cause(line: str) -> None:
    assert failures.classify([line], state()).kind == "crashed"


def test_a_precise_cause_wins_over_what_it_leads_to() -> None:
    lines = [
        "torch.OutOfMemoryError: CUDA out of memory.",
        "Scheduler hit an exception: Traceback (most recent call last):",
        "Initialization failed. warmup error: Connection refused",
        "Health check failed.",
    ]
    assert failures.classify(lines, SIGKILLED).kind == "out_of_memory"


def test_missing_path_is_the_drafts_only_when_the_draft_was_loading() -> None:
    error = "OSError: Repo id must be in the form 'repo_name' or 'namespace/repo_name': '/m/x'."
    earlier = ["Traceback (most recent call last):", '  File "/s/speculative/worker.py", line 1, in f']
    model = ["Traceback (most recent call last):", '  File "/s/model_config.py", line 1, in g', error]
    draft = [
        "Traceback (most recent call last):",
        '  File "/s/arg_groups/speculative_hook.py", line 1',
        error,
    ]
    assert failures.classify([*earlier, *model]).kind == "model_missing"
    assert failures.classify([*earlier, *draft]).kind == "draft_missing"


@pytest.mark.parametrize(
    ("unit", "lines", "kind", "said"),
    [
        (SIGKILLED, ["Loading weights"], "killed", "was killed by signal 9"),
        (None, ["Rank 0 scheduler died during initialization (exit code: -9)."], "killed", "gives no cause"),
        (state("oom-kill", 2, 9), ["Loading"], "out_of_memory", "the kernel killed the service"),
        (state("timeout", 2, 15), ["Loading"], "timeout", "systemd gave up waiting"),
        (state("watchdog", 3, 6), ["Loading"], "watchdog", "systemd's watchdog"),
        (state(), ["Traceback:", "[2026-01-01 00:00:00] KeyError: 'x'"], "crashed", "KeyError: 'x'"),
        (state(), ["just", "words"], "crashed", "exited with status 1 (Result=exit-code); last line: words"),
        (state(), [], "crashed", "the journal has no line of it"),
        (state("core-dump", 3, 11), [], "crashed", "dumped core on signal 11"),
    ],
)
def test_without_a_known_text_the_units_end_decides(
    unit: UnitState | None, lines: list[str], kind: str, said: str
) -> None:
    failure = failures.classify(lines, unit)
    assert failure.kind == kind
    assert said in failure.summary


def test_only_a_port_that_could_not_be_bound_leaves_the_engine_stuck() -> None:
    stuck = failures.stuck(captured("port_in_use"))
    assert stuck is not None
    assert stuck.kind == "port_in_use"
    assert stuck.journal_tail
    assert failures.stuck(captured("draft_mismatch")) is None
    assert failures.stuck(["all is well"]) is None


def test_long_summaries_are_cut() -> None:
    failure = failures.classify(["ValueError: Unknown speculative algorithm name: " + "x" * 900])
    assert len(failure.summary) == 300


def test_the_tail_leaves_a_parsers_list_of_flags_out() -> None:
    usage = ["usage: launch_server.py [-h]", *[" " * 22 + f"[--flag-{i} X]" for i in range(900)]]
    said = ["loading", *usage, "launch_server.py: error: argument --page-size: invalid int value: 'xyz'"]
    assert failures.classify(said).journal_tail == ["loading", said[-1]]
