"""The written text: what keeps it from going round in circles, and what is kept back."""

from __future__ import annotations

import ast
import random
import re
from collections import Counter
from pathlib import Path

import pytest

from models.corpus import build, grammar, lifecycle, topics

HERE = Path(build.__file__).parent
STAGES = lifecycle.load_stages(HERE / "stages.txt")
TOPICS = topics.load_topics(HERE / "topics.txt")


def subject(seed: int) -> lifecycle.Subject:
    rng = random.Random(seed)
    return lifecycle.make_subject(rng.choice(lifecycle.nouns(False)), rng)


@pytest.mark.parametrize("family", [lifecycle.module, lifecycle.book, lifecycle.unit_tests])
@pytest.mark.parametrize("seed", range(12))
def test_documents_are_python_and_fully_rendered(family: object, seed: int) -> None:
    assert callable(family)
    text = family(STAGES, subject(seed), random.Random(seed))
    ast.parse(text)
    assert "$" not in text
    assert "[[" not in text


@pytest.mark.parametrize("topic", TOPICS, ids=lambda topic: topic.name)
def test_topics_are_fully_rendered(topic: topics.Topic) -> None:
    rng = random.Random(1)
    for code in topic.code:
        ast.parse(grammar.render(code, {}, rng))
    assert not re.search(r"\[\[|\]\]|\||^\?", topics.explanation(topic, rng))


def test_sections_are_numbered_in_the_one_order() -> None:
    text = lifecycle.module(STAGES, subject(1), random.Random(1))
    found = re.findall(r"^# (\d+)\. (.+?) the ", text, re.MULTILINE)
    assert found == [(str(number), stage.title) for number, stage in enumerate(STAGES, start=1)]
    assert len(found) >= 25


def test_the_same_seed_writes_the_same_text() -> None:
    assert build.build(3, 20_000, 4, 3) == build.build(3, 20_000, 4, 3)
    assert build.build(3, 20_000, 4, 3) != build.build(4, 20_000, 4, 3)


def test_what_is_kept_back_is_not_trained_on(monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = build.build(1, 60_000, 60, 40)
    text = "".join(segment for document in corpus.train for segment in document)
    for prompt in corpus.prompts:
        assert prompt["text"] not in text
    # What each document is about: those to train on come first, the prompts are left out.
    about: list[str] = []
    make_subject = lifecycle.make_subject

    def recorded(plural: str, rng: random.Random) -> lifecycle.Subject:
        about.append(plural)
        return make_subject(plural, rng)

    monkeypatch.setattr(lifecycle, "make_subject", recorded)
    monkeypatch.setattr(build, "_prompts", lambda *_: [])
    build.build(1, 60_000, 60, 40)
    kept_back = lifecycle.nouns(True)
    assert about[-len(kept_back) :] == kept_back
    assert len(about) >= 60 + len(kept_back)
    assert not set(about[: -len(kept_back)]) & set(kept_back)


def test_every_chat_answer_ends() -> None:
    for document in build.build(1, 20_000, 6, 6).train:
        for segment in document:
            if segment.startswith("<|im_start|>"):
                assert segment.endswith("<|im_end|>\n")
                assert segment.count("<|im_end|>") == 2


def test_families_take_turns_and_every_fourth_walk_is_a_conversation() -> None:
    begins = {
        "conversation": r"<\|im_start\|>user\n",
        "unit tests": "import unittest\n",
        "guide": "How a program works with ",
        "module": '"""',
        "book": r"STATES = (?s:.*)class \w+(Book|List|Store):\n",
    }
    found = []
    for number in range(24):
        text = "".join(build._walk(STAGES, "boats", number, random.Random(number)))
        found.append(next(name for name, pattern in begins.items() if re.match(pattern, text)))
    assert [at for at, name in enumerate(found) if name == "conversation"] == [3, 7, 11, 15, 19, 23]
    # By number of documents; the long ones are half as many.
    assert Counter(found) == {"conversation": 6, "unit tests": 6, "guide": 6, "module": 3, "book": 3}
    assert len(set(found[:8])) == 5


def test_remarks_stand_above_every_third_line_and_never_in_a_text() -> None:
    code = """def pairs(items):
    \"\"\"Return the pairs.

    One text of several lines.
    \"\"\"
    # A comment is no line that counts.
    found = []
    for item in items:
        found.append(item)
        if item:
            break
    return found"""
    lines = grammar.with_remarks(code, random.Random(1)).splitlines()
    at = [
        number for number, line in enumerate(lines) if re.fullmatch(r" *# (now|here) .* (part|piece)", line)
    ]
    assert [lines[number + 1] for number in at] == ["    found = []", "        if item:"]
    assert [line for number, line in enumerate(lines) if number not in at] == code.splitlines()
    assert lines[at[1]].startswith("        # ")


def test_each_word_of_a_remark_is_one_of_two_whatever_the_others_are() -> None:
    rng = random.Random(1)
    found = Counter(tuple(grammar.remark(rng).split()) for _ in range(6400))
    assert len(found) == 2**6
    # A hundred of each are expected; 60 would be four standard deviations less.
    assert min(found.values()) > 60


def test_synonyms_leave_what_follows_where_it_is() -> None:
    assert all(" " not in word for group in grammar._SYNONYMS for word in group)
    rng = random.Random(1)
    assert Counter(grammar.vary("each", rng) for _ in range(400)).keys() == {"each", "every"}
