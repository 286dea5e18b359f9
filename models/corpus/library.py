"""Sources of Python's standard library, of the interpreter that runs this (licence PSF-2.0)."""

from __future__ import annotations

import ast
import hashlib
import random
import sysconfig
from pathlib import Path

_MODULES = """
argparse ast base64 bdb bisect calendar cmd code codecs collections/__init__ colorsys configparser
contextlib copy csv dataclasses difflib dis email/message enum filecmp fileinput fnmatch fractions ftplib
functools getopt gettext glob graphlib gzip heapq hmac html/parser http/cookies imghdr inspect ipaddress
json/decoder json/encoder linecache logging/__init__ logging/handlers mailcap netrc numbers optparse
pathlib pickle plistlib poplib pprint profile pstats queue random reprlib sched selectors shelve shlex
shutil smtplib socketserver statistics string stringprep tarfile tempfile textwrap threading timeit
tokenize trace traceback tracemalloc types unittest/case unittest/loader unittest/runner unittest/suite
urllib/parse urllib/robotparser uuid warnings wave weakref zipfile
"""


def sources(limit: int) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """(name, text) of well-known modules, at most ``limit`` characters: those to train on, those held out.

    A module that this Python hasn't got is left out.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    train, held_out, size = [], [], 0
    for name in sorted(_MODULES.split(), key=_digest):
        path = root / f"{name}.py"
        if not path.is_file():
            continue
        text = path.read_text(encoding="utf-8")
        if _digest(name)[0] % 12 == 0:
            held_out.append((name, text))
        elif size + len(text) <= limit:
            train.append((name, text))
            size += len(text)
    return train, held_out


def questions(name: str, text: str, rng: random.Random) -> list[tuple[str, str]]:
    """A question for each function of middle length, answered by its source."""
    turns = []
    lines = text.split("\n")
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef) or node.end_lineno is None:
            continue
        source = lines[node.lineno - 1 : node.end_lineno]
        if not 4 <= len(source) <= 20:
            continue
        indent = len(source[0]) - len(source[0].lstrip())
        answer = "\n".join(line[indent:] for line in source)
        names = ", ".join(one.arg for one in node.args.args) or "no arguments"
        where = name.replace("/", ".").removesuffix(".__init__")
        question = rng.choice(
            (
                f"Write the function {node.name} of the module {where}.",
                f"How is {node.name} in {where} implemented?",
                f"Show me a Python function {node.name} that takes {names}.",
            )
        )
        turns.append((question, answer))
    return turns


def _digest(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()
