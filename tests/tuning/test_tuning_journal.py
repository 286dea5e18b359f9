"""The journal as journald gives it, and the lines in it as SGLang 0.5.23 and the backend write them."""

from __future__ import annotations

import json

import pytest

from tests.tuning.standin import INVOCATION, Host
from tuning import journal
from tuning.journal import DecodeLine, Entry, JournalError


def entry(message: str) -> Entry:
    return Entry(cursor="c", timestamp_us=7, pid=1, message=message, invocation_id="i")


METRICS = (
    "[2026-11-30 03:09:20] DDTREE metrics: budget=16 topk=4 steps=30 tokens=128 avg_commit_len=4.27 "
    "hist=0,5,7,7,3,3,4,1 draft_ms=7.452 build_ms=1.735 verify_ms=38.496"
)


def test_metrics_line() -> None:
    (line,) = journal.parse_metrics([entry("first\n" + METRICS + "\nlast"), entry("nothing")])
    assert (line.algorithm, line.budget, line.topk, line.steps, line.tokens) == ("DDTREE", 16, 4, 30, 128)
    assert line.avg_commit_len == 4.27
    assert line.histogram == (0, 5, 7, 7, 3, 3, 4, 1)
    assert (line.draft_ms, line.build_ms, line.verify_ms) == (7.452, 1.735, 38.496)


def test_metrics_line_of_the_chain_and_with_a_rank() -> None:
    text = "[2026-11-30 03:09:20 TP0] DFLASH metrics: steps=2 tokens=5 avg_commit_len=2.50 hist=1,0,0,1"
    (line,) = journal.parse_metrics([entry(text)])
    assert (line.algorithm, line.budget, line.topk, line.draft_ms) == ("DFLASH", None, None, None)


@pytest.mark.parametrize(
    "text",
    [
        METRICS.replace("tokens=128", "tokens=129"),
        METRICS.replace("steps=30", "steps=31"),
        METRICS.replace(" steps=30", ""),
        METRICS.replace("hist=0,5", "hist=0,x"),
        METRICS[:80],
        "DDTREE metrics: avg_commit_len=4.00",
    ],
)
def test_metrics_line_that_contradicts_itself_or_is_cut(text: str) -> None:
    with pytest.raises(JournalError, match="metrics line"):
        journal.parse_metrics([entry(text)])


@pytest.mark.parametrize(
    "text", ["see the DDTREE metrics: they are in the journal", "/metrics: 200", "no metrics here"]
)
def test_prose_about_metrics_is_no_metrics_line(text: str) -> None:
    assert journal.parse_metrics([entry(text)]) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (  # autoregressive on a CPU, captured
            "[2026-11-30 03:05:46] Decode batch, #running-req: 1, #token: 153, token usage: 0.02, cpu graph: "
            "False, gen throughput (token/s): 34.63, #queue-req: 0",
            DecodeLine(7, "", None, 1, 0, None, 34.63, False),
        ),
        (  # chain on a CPU, captured
            "[2026-11-30 02:45:42] Decode batch, #running-req: 1, #token: 0, token usage: 0.00, accept len: "
            "3.25, accept rate: 0.32, cpu graph: False, gen throughput (token/s): 8.09, #queue-req: 0",
            DecodeLine(7, "", None, 1, 0, 3.25, 8.09, False),
        ),
        (  # a GPU, ranks, forward iterations
            "[2026-11-30 02:45:42 DP0 TP0] Decode batch [1234], #running-req: 4, #token: 243, token usage: "
            "0.06, accept len: 1.00, accept rate: 0.00, cap len: 7.00, block accept len: 1.00, cuda graph: "
            "True, gen throughput (token/s): 149.93, #queue-req: 2",
            DecodeLine(7, "DP0 TP0", 1234, 4, 2, 1.0, 149.93, True),
        ),
        (  # a hybrid model's token fields, utilisation appended
            "Decode batch, #running-req: 2, #full token: 9, full token usage: 0.01, mamba num: 2, mamba usage"
            ": 0.50, accept len: 2.50, accept rate: 0.21, cuda graph: True, gen throughput (token/s): 10.00, "
            "#queue-req: 0, est. decode TFLOPS/s (per GPU): 1.20, est. read BW (GB/s per GPU): 3.00",
            DecodeLine(7, "", None, 2, 0, 2.5, 10.0, True),
        ),
        (  # a sliding window and disaggregation
            "Decode batch, #running-req: 3, #full token: 9, full token usage: 0.01, #swa token: 4, swa token "
            "usage: 0.02, pre-allocated usage: 0.00, #prealloc-req: 0, #transfer-req: 1, #retracted-req: 0, "
            "cuda graph: False, gen throughput (token/s): 12.50, #queue-req: 5",
            DecodeLine(7, "", None, 3, 5, None, 12.5, False),
        ),
    ],
)
def test_decode_lines(text: str, expected: DecodeLine) -> None:
    assert journal.parse_decode([entry("other"), entry(text)]) == [expected]


def test_decode_line_that_is_cut() -> None:
    with pytest.raises(JournalError, match="'Decode batch' line can't be read"):
        journal.parse_decode([entry("Decode batch, #running-req: 1, #token: 153, token us")])


def test_json_messages_of_every_kind() -> None:
    rows = [
        {
            "__CURSOR": "s=1",
            "__REALTIME_TIMESTAMP": "12",
            "_PID": "5",
            "MESSAGE": "plain",
            "INVOCATION_ID": "x",
        },
        {"MESSAGE": list(b"\x1b[1;33mwarning\x1b[0m: \xff"), "_SYSTEMD_INVOCATION_ID": "y"},
        {"MESSAGE": None},
        {"MESSAGE": ["twice", list(b"given")], "_PID": ["6", "7"][0]},
        {},
    ]
    text = "\n".join(json.dumps(row) for row in rows) + "\n\n"
    found = journal.parse_json(text)
    assert found[0] == Entry("s=1", 12, 5, "plain", "x")
    assert [one.message for one in found[1:]] == ["warning: \ufffd", "", "twice\ngiven", ""]
    assert found[1].invocation_id == "y"


def test_json_that_is_cut() -> None:
    with pytest.raises(JournalError, match="journalctl line 2 isn't JSON"):
        journal.parse_json('{"MESSAGE": "a"}\n{"MESS')


def test_tail_is_cut_in_both_directions() -> None:
    found = [entry(f"line {number}\n\n") for number in range(50)] + [entry("x" * 15_000)]
    kept = journal.tail(found)
    assert len(kept) == 40
    assert kept[0] == "line 11"
    assert len(kept[-1]) == 400
    assert kept[-1].endswith("...")


def test_entries_by_cursor_and_invocation(host: Host) -> None:
    host.log("before")
    position = journal.cursor("x.service")
    host.log("mine", invocation=INVOCATION)
    host.log("another start's", invocation="f" * 32)
    found = journal.entries("x.service", position, INVOCATION)
    assert [one.message for one in found] == ["mine"]
    asked = host.asked()[-1]
    assert asked[asked.index("--after-cursor") + 1] == position
    # what systemd itself says about that start is asked for too
    assert asked[-3:] == [f"_SYSTEMD_INVOCATION_ID={INVOCATION}", "+", f"INVOCATION_ID={INVOCATION}"]
    assert [one.message for one in journal.entries("x.service")] == ["before", "mine", "another start's"]
    assert host.asked()[-1][-2:] == ["-u", "x.service"]


def test_cursor_of_an_empty_journal_means_everything(host: Host) -> None:
    position = journal.cursor("x.service")
    host.log("first")
    assert position == ""
    assert [one.message for one in journal.entries("x.service", position)] == ["first"]


def test_no_journalctl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(JournalError, match="journalctl isn't on this machine"):
        journal.entries("x.service")
    assert journal.sync() is False


def test_a_refusal_is_an_error_and_no_entries_is_not(host: Host) -> None:
    journalctl = host.folder / "bin" / "journalctl"
    journalctl.write_text("#!/bin/sh\nexit 1\n")
    assert journal.entries("x.service") == []
    journalctl.write_text("#!/bin/sh\necho 'Failed to seek to cursor: Invalid argument' >&2\nexit 1\n")
    with pytest.raises(JournalError, match="Failed to seek to cursor"):
        journal.entries("x.service", "bad")
