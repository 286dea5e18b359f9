"""Templates: ``[[a|b]]`` is a choice, ``$name`` a slot, and prose words have synonyms.

Each choice is a place where several continuations are right. They keep the text varied, and they are
where a tree of drafts finds more than a chain does: the more so where what follows stands at the same place
after each, so that synonyms are single words and as likely as each other. Remarks are nothing but choices.
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
    ("finds", "locates"),
    ("needs", "takes"),
    ("usually", "mostly"),
    ("many", "several"),
    ("because", "since"),
    ("therefore", "so"),
    ("large", "big"),
    ("larger", "bigger"),
    ("goes", "moves"),
    ("remembers", "notes"),
    ("compares", "checks"),
    ("only", "just"),
    ("small", "little"),
    ("returns", "gives"),
    ("when", "once"),
    ("When", "Once"),
    ("Each", "Every"),
    ("gets", "receives"),
    ("shows", "tells"),
    ("whole", "entire"),
    ("last", "final"),
    ("next", "following"),
    ("way", "manner"),
    ("place", "spot"),
    ("until", "till"),
    ("into", "to"),
    ("wrong", "bad"),
    ("seen", "met"),
)
_OTHERS = {word: group for group in _SYNONYMS for word in group}

#: Words of a remark, in their order; either of two, whatever the others are.
_REMARK = (
    ("now", "here"),
    ("we", "you"),
    ("take", "use"),
    ("the", "this"),
    ("next", "same"),
    ("part", "piece"),
)


def remark(rng: random.Random) -> str:
    """Six words that say little, each as likely as another in its place."""
    return " ".join(rng.choice(pair) for pair in _REMARK)


def with_remarks(code: str, rng: random.Random) -> str:
    """The code with a remark above the first statement of its body and every third line after it."""
    lines, count, inside = [], 0, False
    for number, line in enumerate(code.splitlines()):
        quoted = '"""' in line
        plain = number and line.strip() and not inside and not quoted and not line.lstrip().startswith("#")
        if plain:
            if count % 3 == 0:
                lines.append(line[: len(line) - len(line.lstrip())] + f"# {remark(rng)}")
            count += 1
        inside ^= line.count('"""') % 2 == 1
        lines.append(line)
    return "\n".join(lines)


def render(template: str, slots: Mapping[str, str], rng: random.Random) -> str:
    """The text of a template. Raises KeyError for a slot without a value."""
    while _CHOICE.search(template):
        template = _CHOICE.sub(lambda found: rng.choice(found[1].split("|")), template)
    return _SLOT.sub(lambda found: slots[found[1]], template)


def vary(sentence: str, rng: random.Random) -> str:
    """The sentence with some words exchanged for their synonyms."""

    def swap(found: re.Match[str]) -> str:
        word = found[0]
        return rng.choice(_OTHERS[word]) if word in _OTHERS else word

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
