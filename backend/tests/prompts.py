"""Prompts that the demo pair has learnt to go on with, so that trees have something to accept."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from models.corpus.build import build, chat

ROOT = Path(__file__).resolve().parents[2]


def _items(path: str) -> list[dict[str, str]]:
    items: list[dict[str, str]] = json.loads((ROOT / path).read_text(encoding="utf-8"))
    return items


def _held_out(category: str) -> list[str]:
    return [item["text"] for item in _items("models/prompts.json") if item["category"] == category]


#: Questions; the first three are the seed's.
WORKLOAD = [item["text"] for item in _items("tuning/data/prompts.json")]

#: Twelve, no two of them of the same length: four of documents and two of chats that no training saw, and the
#: first of the workload.
PROMPTS = [
    *(text[: 80 + 90 * number] for number, text in enumerate(_held_out("document"))),
    *_held_out("chat")[:2],
    *map(chat, WORKLOAD[:6]),
]

#: Documents and conversations of the kind that the pair was trained on.
TEXT = "".join(segment for document in build(2, 0, 8, 4).train for segment in document)
