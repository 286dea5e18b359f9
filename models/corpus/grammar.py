"""Templates: ``[[a|b]]`` is a choice, ``$name`` a slot, and prose words have synonyms.

Each choice is a place where several continuations are right. They keep the text varied, and they are
where a tree of drafts finds more than a chain does.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

_CHOICE = re.compile(r"\[\[((?:(?!\[\[|\]\]).)*?)\]\]", re.DOTALL)
_SLOT = re.compile(r"\$([A-Za-z]+)")
_WORD = re.compile(r"[A-Za-z]+")
_SYNONYMS = (
    ("each", "every"),
    ("keeps", "holds"),
    ("makes", "builds"),
    ("finds", "looks up"),
    ("needs", "takes"),
    ("usually", "mostly", "as a rule"),
    ("again", "once more"),
    ("many", "a lot of"),
    ("because", "since"),
    ("therefore", "so"),
    ("large", "big"),
    ("also", "in addition"),
    ("goes", "moves"),
    ("remembers", "notes"),
    ("compares", "checks"),
    ("first", "at the start"),
    ("then", "after that"),
    ("only", "just"),
    ("small", "little"),
    ("always", "in every case"),
    ("returns", "gives back"),
    ("when", "once"),
    ("gets", "receives"),
    ("shows", "tells"),
    ("whole", "entire"),
    ("last", "final"),
    ("next", "following"),
    ("way", "manner"),
    ("without", "with no"),
    ("different", "other"),
    ("place", "spot"),
)
_OTHERS = {word: group for group in _SYNONYMS for word in group if " " not in word}


def render(template: str, slots: Mapping[str, str], rng: random.Random) -> str:
    """The text of a template. Raises KeyError for a slot without a value."""
    while _CHOICE.search(template):
        template = _CHOICE.sub(lambda found: rng.choice(found[1].split("|")), template)
    return _SLOT.sub(lambda found: slots[found[1]], template)


def vary(sentence: str, rng: random.Random) -> str:
    """The sentence with some words exchanged for their synonyms."""

    def swap(found: re.Match[str]) -> str:
        word = found[0]
        if word not in _OTHERS or rng.random() < 0.5:
            return word
        return rng.choice(_OTHERS[word])

    return _WORD.sub(swap, sentence)


def sections(path: Path, marks: tuple[str, ...]) -> Iterator[tuple[str, str, list[tuple[str, str]]]]:
    """Read a template file: ``@mark header``, then ``@part`` blocks.

    ``marks`` are what begins a section. Yields (mark, header, [(part, text), ...]).
    """
    mark, header, parts = "", "", list[tuple[str, str]]()
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("@") or line.startswith("@contextmanager"):
            if parts:
                parts[-1] = (parts[-1][0], parts[-1][1] + line + "\n")
            continue
        name, _, rest = line[1:].partition(" ")
        if name in marks:
            if mark:
                yield mark, header, parts
            mark, header, parts = name, rest, []
        else:
            parts.append((name, ""))
    if mark:
        yield mark, header, parts
