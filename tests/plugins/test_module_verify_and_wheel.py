"""The running command against the unit, and wheels that are the same for the same sources."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.plugins.support import load

Run = Callable[..., dict[str, Any]]


class FakeUnit:
    """A unit whose state a test sets."""

    name = "svc.service"

    def __init__(self, running: tuple[int, list[str]] | None, mismatch: str) -> None:
        self._running, self._mismatch = running, mismatch

    def mismatch(self) -> str:
        return self._mismatch

    def process(self) -> tuple[int, list[str]] | None:
        return self._running


@pytest.mark.parametrize(
    ("running", "mismatch", "dropin", "command", "words", "stale"),
    [
        ((7, ["p", "-b", "16"]), "", False, [], "", False),
        ((7, ["p", "-b", "16"]), "", False, ["p", "-b", "16"], "", False),
        (
            (7, ["p", "-b", "16"]),
            "",
            False,
            ["p", "-b", "8"],
            "runs another command: argument 2 is '16'",
            False,
        ),
        (
            (7, ["p", "-b", "16"]),
            "argument 2 is '16', expected '8'",
            False,
            [],
            "does not run its unit's command",
            False,
        ),
        (None, "it has no main process (failed/failed)", False, [], "no main process (failed/failed)", False),
        (None, "", False, [], "it just ended", False),
        ((7, ["p", "-b", "16"]), "", True, [], "a sweep's drop-in is in place", False),
        # The file is gone and systemd was not told: what it calls the command is the drop-in's.
        ((7, ["p"]), "", False, [], "still goes by a sweep's drop-in", True),
    ],
)
def test_the_process_must_run_what_the_unit_says(
    run_module: Run,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    running: tuple[int, list[str]] | None,
    mismatch: str,
    dropin: bool,
    command: list[str],
    words: str,
    stale: bool,
) -> None:
    module = load("sglang_verify")

    class Service:
        def __init__(self, name: str, run: object) -> None:
            self.unit = FakeUnit(running, mismatch)
            self.dropin = tmp_path / "90-sweep.conf"

        def dropin_loaded(self) -> bool:
            return stale

    if dropin:
        (tmp_path / "90-sweep.conf").touch()
    monkeypatch.setattr(module, "SweptService", Service)
    result = run_module(module, unit="svc", command=command)
    assert result.get("failed", False) is bool(words)
    assert words in result.get("msg", "")
    if not words:
        assert (result["main_pid"], result["command"], result["changed"]) == (7, ["p", "-b", "16"], False)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    (folder / "thing").mkdir(parents=True)
    (folder / "thing" / "__init__.py").write_text("X = 1\n")
    (folder / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["hatchling"]\nbuild-backend = "hatchling.build"\n'
        '[project]\nname = "thing"\nversion = "1.0"\n'
    )
    return folder


def test_the_same_sources_give_the_same_wheel(run_module: Run, project: Path, tmp_path: Path) -> None:
    module = load("python_wheel")
    first = run_module(module, source=str(project), dest=str(tmp_path / "a"))
    again = run_module(module, check=True, source=str(project), dest=str(tmp_path / "b"))
    assert first["sha256"] == again["sha256"]
    assert first["changed"] is False
    with zipfile.ZipFile(first["path"]) as wheel:
        assert wheel.read("thing/__init__.py") == b"X = 1\n"
    assert [path.name for path in (tmp_path / "a").iterdir()] == [first["name"]]
    (project / "thing" / "__init__.py").write_text("X = 2\n")
    other = run_module(module, source=str(project), dest=str(tmp_path / "a"))
    assert other["sha256"] != first["sha256"]


def test_a_project_that_does_not_build_says_why(run_module: Run, project: Path, tmp_path: Path) -> None:
    module = load("python_wheel")
    (project / "pyproject.toml").write_text("[project\n")
    result = run_module(module, source=str(project), dest=str(tmp_path / "a"))
    assert result["failed"] is True
    assert f"building the wheel of {project}" in result["msg"]
    result = run_module(module, source=str(tmp_path / "none"), dest=str(tmp_path / "a"))
    assert "no pyproject.toml" in result["msg"]
