"""Fixtures of the modules' tests."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from ansible.module_utils.testing import patch_module_args

from tests.plugins.support import Systemctl, measurement
from tuning.grid import parse_grid
from tuning.models import TrialFact
from tuning.store import Study


@pytest.fixture
def run_module(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., dict[str, Any]]:
    """Run a module's ``main`` with arguments; returns what it printed as its result."""

    def run(module: ModuleType, check: bool = False, **arguments: Any) -> dict[str, Any]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(""))
        with patch_module_args({**arguments, "_ansible_check_mode": check}), pytest.raises(SystemExit):
            module.main()
        result: dict[str, Any] = json.loads(capsys.readouterr().out)
        return result

    return run


@pytest.fixture
def systemctl() -> Systemctl:
    return Systemctl()


@pytest.fixture
def measured(tmp_path: Path) -> Callable[..., Any]:
    """Write a measured (or, with ``kind``, a failed) row into ``results/<study>`` and make it the latest."""

    def write(
        study: str, host: str, spec: str, tok_s: float, seconds: float = 30.0, kind: str = ""
    ) -> dict[str, Any]:
        configuration = parse_grid([spec], [])[0]
        made = {
            "study": study,
            "trial": f"01-{configuration.id}",
            "host": host,
            "started_at": "2026-03-01T12:00:00Z",
            "finished_at": (datetime(2026, 3, 1, 12, tzinfo=UTC) + timedelta(seconds=seconds)).isoformat(),
            "configuration": configuration.model_dump(mode="json"),
            "status": "failed" if kind else "ok",
            "failure": {"kind": kind, "summary": "s"} if kind else None,
            "measurement": None if kind else measurement(tok_s, configuration.arm),
        }
        store = Study(tmp_path / "results" / study).create()
        store.append(TrialFact.model_validate(made))
        store.link_latest()
        return made

    return write
