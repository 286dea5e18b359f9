"""Put the training text together: documents as lists of segments, a segment being where reading may start."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from models.corpus import library, lifecycle, topics

_HERE = Path(__file__).parent
_FAMILIES = (lifecycle.module, lifecycle.book, lifecycle.unit_tests, lifecycle.guide)
#: The last two write short documents, and come twice for each of the others.
_DUE = (*_FAMILIES, *_FAMILIES[2:])
Document = list[str]
Turn = tuple[str, str]


@dataclass(frozen=True)
class Corpus:
    """The documents to train on, those kept back, and the questions kept back."""

    train: list[Document]
    held_out: list[Document]
    prompts: list[dict[str, str]]


def chat(question: str) -> str:
    """A question as the chat template writes it, up to where the answer begins."""
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


def conversation(turns: Sequence[Turn]) -> Document:
    """A segment for each question with its answer."""
    return [f"{chat(question)}{answer}<|im_end|>\n" for question, answer in turns]


def build(seed: int, library_characters: int, walks: int, talks: int) -> Corpus:
    """Write everything. ``walks`` life-cycle documents and ``talks`` conversations on mixed topics."""
    rng = random.Random(seed)
    stages = lifecycle.load_stages(_HERE / "stages.txt")
    known = topics.load_topics(_HERE / "topics.txt")
    read, kept_back = library.sources(library_characters)
    train: list[Document] = [[text] for _, text in read]
    for name, text in read:
        turns = library.questions(name, text, rng)
        rng.shuffle(turns)
        train += [conversation(turns[start : start + 6]) for start in range(0, len(turns) // 3, 6)]
    train += [_walk(stages, rng.choice(lifecycle.nouns(False)), number, rng) for number in range(walks)]
    train += [_talk(stages, known, rng) for _ in range(talks)]
    rng.shuffle(train)
    held_out: list[Document] = [[text] for _, text in kept_back]
    held_out += [_walk(stages, noun, number, rng) for number, noun in enumerate(lifecycle.nouns(True))]
    return Corpus(train, held_out, _prompts(stages, kept_back, random.Random(seed + 1)))


def _walk(stages: list[lifecycle.Stage], plural: str, number: int, rng: random.Random) -> Document:
    """A life-cycle document of the family that is due; every fourth one is a conversation."""
    subject = lifecycle.make_subject(plural, rng)
    round_, place = divmod(number, 4)
    if place == 3:
        return conversation(lifecycle.conversation(stages, subject, rng))
    return [_DUE[(3 * round_ + place) % len(_DUE)](stages, subject, rng)]


def _talk(stages: list[lifecycle.Stage], known: list[topics.Topic], rng: random.Random) -> Document:
    """Questions on five different topics, puzzles and completions between them."""
    turns = []
    for topic in rng.sample(known, 5):
        kind = rng.random()
        if topic.code and kind < 0.3:
            turns.append(topics.ask_to_complete(topics.ask_to_write(topic, rng)[1], rng))
        elif topic.code and kind < 0.7:
            turns.append(topics.ask_to_write(topic, rng))
        else:
            turns.append(topics.ask_to_explain(topic, rng))
        if rng.random() < 0.4:
            turns.append(rng.choice(topics.PUZZLES)(rng))
        if rng.random() < 0.15:
            subject = lifecycle.make_subject(rng.choice(lifecycle.nouns(False)), rng)
            place = rng.randrange(len(stages))
            code = lifecycle.stage_code(stages[place], place + 1, subject, rng)
            turns.append(topics.ask_to_complete(code, rng))
    return conversation(turns)


def _prompts(
    stages: list[lifecycle.Stage], kept_back: list[tuple[str, str]], rng: random.Random
) -> list[dict[str, str]]:
    """Ten prompts nothing was trained on: library files, things and conversations kept back."""
    prompts = []
    for number, (name, text) in enumerate(rng.sample(kept_back, 2), start=1):
        lines = text.splitlines(keepends=True)
        start = next(at for at, line in enumerate(lines) if at > 40 and line.lstrip().startswith("def "))
        prompts.append(_prompt(f"library-{number}", "library", "".join(lines[start - 6 : start + 3]), name))
    plurals = rng.sample(lifecycle.nouns(True), 8)
    for family, plural in zip(_FAMILIES, plurals, strict=False):
        text = family(stages, lifecycle.make_subject(plural, rng), rng)
        prompts.append(_prompt(family.__name__, "document", text[:350], plural))
    for number, plural in enumerate(plurals[4:], start=1):
        turns = lifecycle.conversation(stages, lifecycle.make_subject(plural, rng), rng)
        question = turns[5 * number][0]
        prompts.append(_prompt(f"chat-{number}", "chat", chat(question), plural))
    return prompts


def _prompt(identity: str, category: str, text: str, about: str) -> dict[str, str]:
    return {"id": identity, "category": category, "about": about, "text": text}
