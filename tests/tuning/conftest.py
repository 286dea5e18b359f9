"""Fixtures of the tuning tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tuning.standin import Host, Service


@pytest.fixture
def service() -> Iterator[Service]:
    with Service().running() as running:
        yield running


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    folder = tmp_path / "host"
    folder.mkdir()
    return Host(folder, monkeypatch)
