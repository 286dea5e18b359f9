"""Prompts that the demo pair has learnt to go on with, so that trees have something to accept."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from models.corpus.build import build, chat

ROOT = Path(__file__).resolve().parents[2]


def _texts(path: str) -> list[str]:
    return [item["text"] for item in json.loads((ROOT / path).read_text(encoding="utf-8"))]


_HELD_OUT = json.loads((ROOT / "models/prompts.json").read_text(encoding="utf-8"))
_DOCUMENTS, _CHATS = (
    [one["text"] for one in _HELD_OUT if one["category"] == c] for c in ("document", "chat")
)

#: Twelve, no two of them of the same length: four of documents and two of chats that no training saw, and the
#: first of the workload.
PROMPTS = [
    *(text[: 80 + 90 * number] for number, text in enumerate(_DOCUMENTS)),
    *_CHATS[:2],
    *(chat(text) for text in _texts("tuning/data/prompts.json")[:6]),
]

#: Documents and conversations of the kind that the pair was trained on.
TEXT = "".join(segment for document in build(2, 0, 8, 4).train for segment in document)
