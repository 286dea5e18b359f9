"""The real Triton tree-mask kernel: right at the announced width, wrong at a forced one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from engine import environment

BLOCK = 8
NODES = (6, 8, 13, 49)


@pytest.fixture(scope="module")
def cases() -> dict[tuple[int, bool], dict[str, Any]]:
    wanted = [f"{nodes}:{BLOCK}:{kind}" for nodes in NODES for kind in ("announced", "forced")]
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("triton_tree.py")), *wanted],
        env=environment({"TRITON_INTERPRET": "1"}),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {(result["nodes"], result["forced"]): result for result in results}


@pytest.mark.parametrize("nodes", NODES)
def test_right_at_the_announced_width(cases: dict[tuple[int, bool], dict[str, Any]], nodes: int) -> None:
    result = cases[nodes, False]
    assert result["qo_stride"] == nodes
    assert result["max_error"] < 1e-5
    assert result["wrong_rows"] == result["rows_written_beyond"] == 0


@pytest.mark.parametrize("nodes", [nodes for nodes in NODES if nodes != BLOCK])
def test_wrong_at_a_forced_width(cases: dict[tuple[int, bool], dict[str, Any]], nodes: int) -> None:
    """The bug this backend exists to exclude: all but a few rows are wrong, and silently."""
    result = cases[nodes, True]
    assert result["qo_stride"] == BLOCK
    assert result["wrong_rows"] > result["rows"] * 2 // 3
    # A tree narrower than the block is written past the end of the output.
    assert (result["rows_written_beyond"] > 0) == (nodes < BLOCK)


def test_forcing_the_block_on_a_tree_of_its_width_changes_nothing(
    cases: dict[tuple[int, bool], dict[str, Any]],
) -> None:
    assert cases[BLOCK, True]["max_error"] < 1e-5
