"""Copy a study to one whose winner can't start: `bad_study.py RESULTS FROM TO`."""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main() -> None:
    """Keep the first tree that is ok, with a flag that the engine refuses."""
    results, name, made = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    rows = [json.loads(line) for line in (results / name / "trials.jsonl").read_text().splitlines()]
    row = next(row for row in rows if row["status"] == "ok" and row["configuration"]["arm"] == "tree")
    budget, topk = row["configuration"]["budget"], row["configuration"]["topk"]
    row["configuration"] = {"arm": "tree", "budget": budget, "topk": topk, "extra": {"page-size": "none"}}
    row["study"] = made
    (results / made).mkdir(exist_ok=True)
    (results / made / "trials.jsonl").write_text(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
