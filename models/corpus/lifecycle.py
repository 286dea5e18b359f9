"""Documents that walk through the life of some things, stage after stage, and so never go round in circles.

What comes next always follows from what was just written: the stages have one order, their headings are
numbered, and every name is taken from the text before.
"""

from __future__ import annotations

import hashlib
import random
import re
from dataclasses import dataclass
from pathlib import Path

from models.corpus.grammar import remark, render, sections, vary, with_remarks

_PLURALS = """
orders parcels trees tickets books letters rooms flights songs recipes lessons invoices machines bridges
boats stations farms gardens films stamps coins maps engines lamps bottles boxes buttons cables cameras
candles cards chairs clocks clouds coats contracts courses customers desks doctors dogs drivers events
exams fields flowers forests games guests hotels houses islands jobs keys kitchens knives lakes libraries
loans markets meals meetings members models monitors motors mountains museums notes offices orchards
paintings papers passengers patients payments pens phones photos pictures pipes planets plants players
plates pumps questions radios reports rivers roads robots routes samples schools screens seats sensors
sheep shelves ships shoes shops signals stars stores streets students tables tasks teachers teams tools
towers towns toys trains trips trucks valves vans villages visits walls wells wheels windows workers
workshops
"""
_IRREGULAR = {"libraries": "library", "knives": "knife", "shelves": "shelf", "sheep": "lamb", "boxes": "box"}
_FIELDS = "name title label place owner code city colour kind address author maker"
_NUMBERS = "amount weight size price age count length height level score distance rank"
_STATES = "state status phase stage mood condition"
_STATE_VALUES = (
    ("open", "done"),
    ("new", "old"),
    ("waiting", "sent"),
    ("active", "retired"),
    ("free", "taken"),
    ("planned", "finished"),
)
_LOCALS = {
    "item": "item entry one element row current",
    "result": "result kept found output chosen selection",
}
_PATHS = "path source place filename location"


@dataclass(frozen=True)
class Subject:
    """What a document is about, and the names it uses throughout."""

    slots: dict[str, str]
    style: int
    """Which of the alternative bodies come in turn."""
    others: dict[str, str]
    """Slots of local names, and what half of the functions have in their place: nothing tells which."""


@dataclass(frozen=True)
class Stage:
    """One step of the life-cycle: a heading, a request, and ways to write it."""

    title: str
    verb: str
    code: tuple[str, ...]
    prose: tuple[str, ...]
    test: str


def load_stages(path: Path) -> list[Stage]:
    """The stages in their fixed order, from the template file."""
    stages = []
    for _, header, parts in sections(path, ("stage",)):
        _, title, verb = (piece.strip() for piece in header.split("|"))
        texts = {name: [text.rstrip("\n") for part, text in parts if part == name] for name, _ in parts}
        stages.append(
            Stage(title, verb, tuple(texts["code"]), tuple(texts["prose"][0].splitlines()), texts["test"][0])
        )
    return stages


def is_held_out(plural: str) -> bool:
    """Whether documents about these things are kept out of training (one in twelve, by hash)."""
    return hashlib.sha256(plural.encode()).digest()[0] % 12 == 0


def nouns(held_out: bool) -> list[str]:
    """The things there are, of training or of the held-out part."""
    return [plural for plural in _PLURALS.split() if is_held_out(plural) == held_out]


def make_subject(plural: str, rng: random.Random) -> Subject:
    """Choose the names of one document."""
    singular = _IRREGULAR.get(plural, plural.removesuffix("s"))
    opened, done = rng.choice(_STATE_VALUES)
    number = rng.choice(_NUMBERS.split())
    slots = {
        "plural": plural,
        "Plural": plural.title(),
        "singular": singular,
        "Singular": singular.title(),
        "field": rng.choice(_FIELDS.split()),
        "number": number,
        "state": rng.choice(_STATES.split()),
        "open": opened,
        "done": done,
        "path": rng.choice(_PATHS.split()),
    }
    pairs = {name: rng.sample(words.split(), 2) for name, words in _LOCALS.items()}
    slots |= {name: word for name, (word, _) in pairs.items()}
    return Subject(slots, rng.randrange(2), {name: other for name, (_, other) in pairs.items()})


def stage_code(stage: Stage, number: int, subject: Subject, rng: random.Random) -> str:
    """The stage's function. Which body comes follows from the document's style, so it can be learnt."""
    body = stage.code[(subject.style + number) % len(stage.code)]
    local = {name: rng.choice((subject.slots[name], other)) for name, other in subject.others.items()}
    return with_remarks(render(body, {**subject.slots, **local}, rng), rng)


def stage_prose(stage: Stage, subject: Subject, rng: random.Random) -> str:
    """The stage in one or two sentences and a remark."""
    some = stage.prose if len(stage.prose) == 1 or rng.random() < 0.5 else stage.prose[:1]
    said = [vary(render(sentence, subject.slots, rng), rng) for sentence in some]
    return " ".join([*said, remark(rng).capitalize() + "."])


def record(subject: Subject, rng: random.Random) -> str:
    """The class that holds one thing."""
    text = """STATES = ("$open", "$done")


@dataclass
class $Singular:
    \"\"\"[[One $singular|A $singular]] with its $field, $number and $state.\"\"\"

    $field: str
    $number: int
    $state: str = "$open"
"""
    return render(text, subject.slots, rng)


def module(stages: list[Stage], subject: Subject, rng: random.Random) -> str:
    """A module of functions, with a numbered heading above each."""
    head = '"""[[Read, check and report|Work with|Keep a list of|Functions for]] $plural."""\n\n'
    head += 'import logging\n\nlog = logging.getLogger("$plural")\n'
    parts = [render(head, subject.slots, rng), record(subject, rng)]
    for number, stage in enumerate(stages, start=1):
        heading = f"# {number}. {stage.title} the {subject.slots['plural']}"
        parts.append(f"{heading}\n{stage_code(stage, number, subject, rng)}\n")
    return "\n\n".join(parts)


def _method(code: str, plural: str) -> str:
    """A function of the life-cycle as a method of the class that keeps the things."""
    head, _, body = code.partition("\n")
    head = re.sub(rf"\({plural}(, )?", r"(self\1", head)
    if "(self" not in head:
        head = head.replace("(", "(self, ", 1)
    head = head.replace(f"_{plural}(", "(").replace(f"_of_{plural}(", "(")
    lines = []
    for line in body.splitlines():
        plain = '"""' in line or line.lstrip().startswith("#") or "log." in line
        lines.append(line if plain else re.sub(rf"(?<![\w.\"-]){plural}(?!\w)", f"self.{plural}", line))
    calls = rf"(?<![.\w])(\w+?_\w+?)(?:_of)?(?:_{plural})?\(self\.{plural}(?:, )?"
    lines = [re.sub(calls, r"self.\1(", line) for line in lines]
    return "\n".join("    " + line if line else line for line in [head, *lines])


def book(stages: list[Stage], subject: Subject, rng: random.Random) -> str:
    """A class whose methods go through the life-cycle."""
    head = """class $SingularBook:
    \"\"\"[[Keeps|Holds|Looks after]] [[all|the]] $plural [[of a place|in one list|and their $state]].\"\"\"

    def __init__(self, $plural):
        self.$plural = list($plural)
"""
    slots = {
        **subject.slots,
        "SingularBook": subject.slots["Singular"] + rng.choice(["Book", "List", "Store"]),
    }
    parts = [record(subject, rng) + "\n\n" + render(head, slots, rng)]
    for number, stage in enumerate(stages[:-1], start=1):
        method = _method(stage_code(stage, number, subject, rng), subject.slots["plural"])
        parts.append(f"    # {number}. {stage.title}\n{method}\n")
    return "\n".join(parts)


def unit_tests(stages: list[Stage], subject: Subject, rng: random.Random) -> str:
    """The test file, one test a stage."""
    head = """import unittest
from pathlib import Path

from $plural import *


class Test$Plural(unittest.TestCase):
    \"\"\"[[Tests of|Checks]] every step [[with|from reading to closing]] the $plural.\"\"\"

    def setUp(self):
        self.path = Path("$plural.txt")
        self.$plural = [
            $Singular("north", 10, "$open"),
            $Singular("south", 12, "$open"),
            $Singular("west", 20, "$done"),
        ]
"""
    head = head.replace(" with|from reading to closing", "with|of")
    parts = [render(head, subject.slots, rng)]
    for number, stage in enumerate(stages, start=1):
        name = stage.title.lower().replace(" ", "_")
        lines = [f"# {remark(rng)}", *render(stage.test, subject.slots, rng).splitlines()]
        body = "\n".join("        " + line for line in lines)
        parts.append(f"    def test_{number:02d}_{name}_{subject.slots['plural']}(self):\n{body}\n")
    return "\n".join(parts)


def guide(stages: list[Stage], subject: Subject, rng: random.Random) -> str:
    """A numbered explanation in prose."""
    head = "How a program works with $plural\n\n"
    head += "A program that [[keeps|manages]] $plural goes through [[many steps|a number of steps]]. "
    tail = "Every $singular has a $field, a $number and a $state, which is $open or $done.\n"
    parts = [render(head + tail, subject.slots, rng)]
    for number, stage in enumerate(stages, start=1):
        parts.append(f"{number}. {stage.title}. {stage_prose(stage, subject, rng)}\n")
    return "\n".join(parts)


def conversation(stages: list[Stage], subject: Subject, rng: random.Random) -> list[tuple[str, str]]:
    """Questions and answers, each about the stage after the one before."""
    turns = []
    plural = subject.slots["plural"]
    for number, stage in enumerate(stages, start=1):
        ask = rng.choice(("Write", "Now write", "Please write", "Show me", "Next, write", "I need"))
        thing = rng.choice(("a function", "the function", "Python code", "a Python function"))
        question = f"{ask} {thing} to {stage.verb} the {plural}."
        if rng.random() < 0.4:
            fields = (subject.slots[name] for name in ("field", "number", "state"))
            question += " Each has a {}, a {} and a {}.".format(*fields)
        code = stage_code(stage, number, subject, rng)
        answer = f"{code}\n\n{stage_prose(stage, subject, rng)}"
        if rng.random() < 0.3:
            question = f"How do I {stage.verb} the {plural}?"
            answer = f"{stage_prose(stage, subject, rng)}\n\n{code}"
        turns.append((question, answer))
    return turns
