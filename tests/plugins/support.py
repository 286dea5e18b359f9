"""The modules as Ansible loads them, and stand-ins for what they ask."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import ansible.module_utils

ROOT = Path(__file__).resolve().parents[2]
UTILS = str(ROOT / "plugins" / "module_utils")
if UTILS not in ansible.module_utils.__path__:
    ansible.module_utils.__path__.append(UTILS)


def load(name: str) -> ModuleType:
    """The module ``plugins/modules/<name>.py``."""
    path = ROOT / "plugins" / "modules" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"arborist_module_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Systemctl:
    """Answers ``run_command`` calls from a table and keeps the argv of each."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []
        self.answers: dict[str, str | Callable[[], str]] = {}
        self.failures: dict[str, str] = {}

    def __call__(self, argv: list[str]) -> tuple[int, str, str]:
        self.calls.append(argv)
        line = " ".join(argv)
        if line in self.failures:
            return 1, "", self.failures[line]
        answer = self.answers.get(line, "")
        return 0, answer() if callable(answer) else answer, ""

    def done(self, program: str = "systemctl") -> list[str]:
        """The calls that change something, as lines."""
        asks = ("show", "get-property", "--json=short")
        return [" ".join(c) for c in self.calls if c[0] == program and c[1] not in asks]


def measurement(tok_s: float, arm: str = "tree", invocation: str = "i1") -> dict[str, Any]:
    """A measurement of one prompt at one level."""
    steps = 128 if arm == "ar" else 32
    acceptance = {"tokens": 128, "steps": steps, "source": "responses"}
    record = {
        "prompt_id": "p1",
        "category": "code",
        "ok": True,
        "completion_tokens": 128,
        "e2e_s": 128 / tok_s,
        "output_sha256": "d1",
    }
    level = {
        "concurrency": 1,
        "requests": 1,
        "failed": 0,
        "wall_s": 128 / tok_s,
        "prompt_tokens": 9,
        "completion_tokens": 128,
        "cached_tokens": 0,
        "tok_s": tok_s,
        "request_tok_s": None,
        "ttft_ms": None,
        "itl_ms": None,
        "e2e_ms": None,
        "acceptance": acceptance,
        "records": [record],
    }
    return {
        "workload": {
            "digest": "w1",
            "prompts": ["p1"],
            "levels": [1],
            "max_tokens": 128,
            "ignore_eos": False,
            "prompt_mode": "raw",
        },
        "invocation_id": invocation,
        "warmup": {"passes": 1, "tok_s": [tok_s], "stable": True, "seconds": 1.0},
        "levels": [level],
        "acceptance": {"responses": acceptance},
        "outputs": {"p1": "d1"},
        "seconds": 3.0,
    }
