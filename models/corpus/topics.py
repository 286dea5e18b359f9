"""Questions about algorithms, data structures, sums and everyday things, with answers that end."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

from models.corpus.grammar import remark, render, sections, vary, with_remarks


@dataclass(frozen=True)
class Topic:
    """Something that can be explained and, if it has code, be written."""

    name: str
    task: str
    text: tuple[str, ...]
    code: tuple[str, ...]


def load_topics(path: Path) -> list[Topic]:
    """The topics of the template file."""
    topics = []
    for _, header, parts in sections(path, ("topic",)):
        name, task = (piece.strip() for piece in header.split("|"))
        text = next(text for part, text in parts if part == "text")
        code = tuple(text.rstrip("\n") for part, text in parts if part == "code")
        topics.append(Topic(name, task, tuple(text.splitlines()), code))
    return topics


def explanation(topic: Topic, rng: random.Random) -> str:
    """The topic's sentences, a remark after every other one; those with ``?`` come twice in three."""
    chosen = [line for line in topic.text if not line.startswith("?") or rng.random() < 0.67]
    said = []
    for number, line in enumerate(chosen):
        said.append(vary(render(line.removeprefix("? "), {}, rng), rng))
        if number % 2:
            said.append(remark(rng).capitalize() + ".")
    return " ".join(said)


def ask_to_explain(topic: Topic, rng: random.Random) -> tuple[str, str]:
    """A question that is answered in prose."""
    name = topic.name
    forms = [
        f"Explain {name}.",
        f"Describe {name}.",
        f"Describe {name} to a ten-year-old.",
        f"What can you say about {name}?",
    ]
    if topic.code:
        forms += [
            f"Explain how {name} works.",
            f"How does {name} work?",
            f"What is {name}?",
            f"Explain {name} in a few words.",
        ]
    elif not name.startswith("how"):
        forms += [
            f"Summarise in three sentences what {name} does.",
            f"Explain {name} to a child.",
            f"Summarise {name}.",
        ]
    return rng.choice(forms), explanation(topic, rng)


def ask_to_write(topic: Topic, rng: random.Random) -> tuple[str, str]:
    """A question that is answered in code."""
    bare = topic.name.removeprefix("a ").removeprefix("an ").removeprefix("the ")
    forms = (
        f"Write a Python {bare} with detailed comments.",
        f"Write a Python {bare}.",
        f"Write a function to {topic.task}.",
        f"Write a Python function to {topic.task}.",
        f"Write a function to {topic.task} with comments.",
        f"Show me how to {topic.task} in Python.",
        f"Implement {topic.name} in Python.",
    )
    code = with_remarks(render(rng.choice(topic.code), {}, rng), rng)
    if rng.random() < 0.6:
        code += "\n\n" + explanation(topic, rng)
    return rng.choice(forms), code


def ask_to_complete(code: str, rng: random.Random) -> tuple[str, str]:
    """The first lines of some code, answered with the others."""
    lines = code.splitlines()
    cut = rng.randint(1, min(6, len(lines) - 1))
    ask = rng.choice(("Complete this Python code:", "Complete this code:", "Finish this Python function:"))
    return f"{ask}\n\n" + "\n".join(lines[:cut]) + "\n", "\n".join(lines[cut:])


def speed(rng: random.Random) -> tuple[str, str]:
    """Distance and minutes to km/h."""
    thing = rng.choice(("train", "car", "bus", "cyclist", "ship", "truck"))
    minutes = rng.choice((15, 30, 45, 60, 90))
    kmh = 4 * rng.randint(5, 40)
    km = kmh * minutes // 60
    start = rng.choice(("Solve step by step: a", "Reason step by step: a", "A"))
    end = rng.choice(("What is its speed in km/h?", "How fast is it in km/h?"))
    answer = render(
        f"[[Step 1|First]]: the {thing} travels {km} km in {minutes} minutes. [[Step 2|Second]]: one "
        f"hour has 60 minutes, "
        f"[[so|and so]] {minutes} minutes are {minutes / 60:.2f} hours. [[Step 3|Third]]: the speed "
        f"is the distance divided "
        f"by the time, {km} / {minutes / 60:.2f} = {kmh}. The speed is {kmh} km/h.",
        {},
        rng,
    )
    return f"{start} {thing} travels {km} km in {minutes} minutes. {end}", answer


def odd_sum(rng: random.Random) -> tuple[str, str]:
    """A proof by induction of a sum."""
    name, last, total = rng.choice(
        (
            ("odd numbers", "2 n - 1", "n squared"),
            ("even numbers", "2 n", "n (n + 1)"),
            ("whole numbers", "n", "n (n + 1) / 2"),
        )
    )
    answer = render(
        f"The proof [[is by|uses]] induction. For n = 1 the sum is the first number alone, and the formula "
        f"[[holds|is true]]. Now [[suppose|assume]] that it holds for n - 1. The n-th of the {name} "
        f"is {last}. Adding it to the "
        f"sum of the others gives {total}. [[So|Therefore]] the formula holds for n as well, and [[by "
        f"induction|so]] for "
        f"every n. This [[proves|shows]] that the sum of the first n {name} is {total}.",
        {},
        rng,
    )
    ask = rng.choice(("Prove", "Show", "Prove step by step"))
    return f"{ask} that the sum of the first n {name} is {total}.", answer


def schedule(rng: random.Random) -> tuple[str, str]:
    """Three people, three days: each day suits two of them."""
    days = rng.sample(("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"), 3)
    a, b, c = days
    question = (
        f"Three people can meet on {a} or {b}, {b} or {c}, and {a} or {c}. On which days can two of "
        f"them meet? "
        "Reason step by step."
    )
    answer = render(
        f"[[Step 1|First]]: the first person can come on {a} and {b}, the second on {b} and {c}, the "
        f"third on {a} and {c}. "
        f"[[Step 2|Second]]: on {a} the first and the third can meet. [[Step 3|Third]]: on {b} the "
        f"first and the second "
        f"can meet. [[Step 4|Fourth]]: on {c} the second and the third can meet. So two of them can "
        f"meet on {a}, on {b} "
        f"and on {c}, [[but there is no day for all three|and never all three]].",
        {},
        rng,
    )
    return question, answer


def letter(rng: random.Random) -> tuple[str, str]:
    """A polite letter about a date."""
    kind, first = rng.choice(
        (
            ("declines a meeting politely", "Unfortunately I can't come to the meeting on $day"),
            ("moves a lesson politely", "I am sorry, but the lesson on $day has to be moved"),
            ("declines an invitation politely", "Thank you for the invitation, but I am not free on $day"),
        )
    )
    day, other = rng.sample(("Monday", "Tuesday", "Wednesday", "Thursday", "Friday"), 2)
    name, sender = rng.sample(("Anna", "Peter", "Maria", "John", "Clara", "Paul", "Lucy", "Martin"), 2)
    text = render(
        f"Dear {name},\n\n[[thank you for your message|thank you for writing]]. {first}, as [[I am "
        f"travelling|I have another "
        f"appointment|I am needed elsewhere]] that day. Would {other} at [[nine|ten|two|three]] "
        f"o'clock [[suit you|be "
        "possible]] instead? [[If not, please tell me a day that suits you better|I am free for the "
        "whole day]].\n\n[[With "
        f"kind regards|Best wishes|Yours sincerely]],\n{sender}",
        {"day": day},
        rng,
    )
    size = rng.choice(("short letter", "letter", "short message"))
    return f"Write a {size} that {kind} and proposes another date.", text


PUZZLES = (speed, odd_sum, schedule, letter)
