"""Check what a short sweep with two rows that cannot start has written, and print how soon they were noticed.

usage: python check_study.py STUDY-FOLDER DEATHS.json
DEATHS.json: what journald says of the unit, one JSON object a line, systemd's own entries included.
"""

from __future__ import annotations

import json
import sys
from datetime import datetime
from pathlib import Path

from tuning.models import TrialFact
from tuning.report import rows
from tuning.store import Study

WRONG_DRAFT = "8:4+speculative-draft-model-path=/srv/models/nowhere"


def died_at(journal: list[dict[str, object]], invocation: str | None) -> float:
    """Unix time at which systemd saw the invocation's main process end."""
    ends = [
        int(str(entry["__REALTIME_TIMESTAMP"])) / 1e6
        for entry in journal
        if entry.get("INVOCATION_ID") == invocation and "Main process exited" in str(entry.get("MESSAGE"))
    ]
    assert ends, f"journald knows no end of invocation {invocation}"
    return ends[0]


def check(facts: list[TrialFact], journal: list[dict[str, object]]) -> None:
    """Raise AssertionError, naming the row, where the study is not what the grid must give."""
    by_label = {fact.configuration.label: fact for fact in facts}
    assert list(by_label) == ["ar", "chain", "8:4", WRONG_DRAFT, "5000:4", "16:4"], list(by_label)

    for label, kind in ((WRONG_DRAFT, "draft_missing"), ("5000:4", "context_too_small")):
        fact = by_label.pop(label)
        assert fact.status == "failed", f"{label}: {fact.status}"
        assert fact.failure is not None
        assert fact.failure.kind == kind, f"{label}: {fact.failure.kind}: {fact.failure.summary}"
        assert fact.failure.journal_tail, f"{label}: no journal tail"
        noticed = datetime.fromisoformat(fact.finished_at).timestamp() - died_at(journal, fact.invocation_id)
        print(f"{label}: {kind}, recorded {noticed:.2f} s after the unit died")

    for label, fact in by_label.items():
        assert fact.status == "ok", f"{label}: {fact.status}: {fact.failure}"
        assert fact.measurement is not None
        sources = fact.measurement.acceptance
        tau = sources.responses.tau or 0.0
        print(f"{label}: accept length {tau:.3f}, journal differs by {sources.agreement}")
        if label != "ar":
            assert tau > 1.05, f"{label}: accept length {tau}"
            assert sources.agreement is not None, f"{label}: the journal says nothing"
            assert sources.agreement <= 0.01, f"{label}: journal and responses differ by {sources.agreement}"
    for row in rows(facts):
        if row.label in by_label and row.label != "ar":
            assert row.same_as_ar is not None, f"{row.label}: not compared with ar"
            same, of = row.same_as_ar
            assert same == of, f"{row.label}: {same} of {of} outputs are ar's"


if __name__ == "__main__":
    lines = Path(sys.argv[2]).read_text(encoding="utf-8").splitlines()
    check(Study(sys.argv[1]).facts(), [json.loads(line) for line in lines if line])
