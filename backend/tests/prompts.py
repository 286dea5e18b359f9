"""Prompts from what the demo pair was trained on: the sources of Python's standard library."""

from __future__ import annotations

import bisect
import calendar
import configparser
import csv
import difflib
import fnmatch
import heapq
import inspect
import queue
import shlex
import string
import textwrap
import zipfile
from types import ModuleType

_PIECES: list[tuple[ModuleType, int, int]] = [
    # module, first character, characters
    (textwrap, 900, 40),
    (shlex, 2000, 80),
    (queue, 1500, 120),
    (heapq, 9000, 160),
    (fnmatch, 600, 200),
    (bisect, 300, 260),
    (string, 2500, 320),
    (csv, 4000, 400),
    (calendar, 5000, 480),
    (difflib, 12000, 560),
    (configparser, 20000, 640),
    (zipfile, 15000, 760),
]

PROMPTS = [inspect.getsource(module)[start : start + length] for module, start, length in _PIECES]
