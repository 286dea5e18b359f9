"""Which rows of a study still stand when it is gone on with."""

from __future__ import annotations

from typing import Any

import pytest

from tests.tuning.facts import fact
from tuning.models import Configuration, Failure
from tuning.resume import current, same_workload, standing

TREE = Configuration(arm="tree", budget=8, topk=4)
ENGINE: dict[str, Any] = {"release": "r1", "versions": {"sglang": "0.5.23"}, "environment_sha256": "e1"}
COMMAND = ["python", "--speculative-ddtree-budget", "8"]
COMMANDS: dict[str, list[str]] = {TREE.id: COMMAND}


def made(trial: str = "01", **values: Any) -> Any:
    return fact(TREE, trial, **({"engine": ENGINE, "command": COMMAND} | values))


def test_an_unchanged_row_stands() -> None:
    found = standing([made()], "h1", COMMANDS, ENGINE)
    assert [kept.trial for kept in found.kept] == ["01"]
    assert found.superseded == {}


@pytest.mark.parametrize(
    "change",
    [
        {"command": [*COMMAND, "--page-size", "1"]},
        {"engine": ENGINE | {"release": "r2"}},
        {"engine": ENGINE | {"versions": {"sglang": "0.5.22"}}},
        {"engine": ENGINE | {"environment_sha256": "e2"}},
        {"engine": {}},
        {"status": "failed", "failure": Failure(kind="timeout", summary="s"), "measurement": None},
    ],
)
def test_a_row_of_anything_else_is_measured_again(change: dict[str, Any]) -> None:
    found = standing([made(**change)], "h1", COMMANDS, ENGINE)
    assert found.kept == []
    assert found.superseded == {TREE.id: ["01"]}


def test_an_engine_that_says_nothing_of_itself_keeps_nothing() -> None:
    assert standing([made(engine={})], "h1", COMMANDS, {}).kept == []


def test_rows_of_other_hosts_and_configurations_are_left_alone() -> None:
    assert standing([made()], "h2", COMMANDS, ENGINE).superseded == {}
    assert standing([made()], "h1", {"other": COMMAND}, ENGINE).superseded == {}


def test_a_replaced_row_neither_stands_nor_counts() -> None:
    """Trial 03 replaced 01 and 02, of which 02 had another engine; then that engine comes back."""
    old = ENGINE | {"release": "r0"}
    facts = [made("01"), made("02", engine=old, supersedes=["01"]), made("03", supersedes=["01", "02"])]
    assert [one.trial for one in current(facts)] == ["03"]
    assert [one.trial for one in standing(facts, "h1", COMMANDS, ENGINE).kept] == ["03"]
    again = standing(facts, "h1", COMMANDS, old)
    assert again.kept == []
    assert again.superseded == {TREE.id: ["01", "02", "03"]}


def test_another_workload_is_named_by_what_differs() -> None:
    had: dict[str, Any] = {"levels": [1], "max_tokens": 64, "prompts_sha256": "a"}
    assert same_workload({"workload": had}, had) == []
    assert same_workload({"workload": had}, had | {"max_tokens": 128}) == [
        "max_tokens: the study has 64, this sweep 128"
    ]
    assert same_workload({}, had) == ["workload: the study's study.json has none"]
