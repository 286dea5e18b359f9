"""Everything a sweep is told is checked before it touches anything."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.plugins.support import load
from tuning.store import Study

NOW = datetime(2026, 3, 1, 12, 30, 5, tzinfo=UTC)


@pytest.fixture(scope="module")
def module() -> ModuleType:
    return load("sweep_plan")


@pytest.fixture
def told(tmp_path: Path) -> dict[str, Any]:
    return {
        "grid": "8:4, 16:4",
        "arms": ["ar", "chain"],
        "base": str(tmp_path),
        "study": "",
        "resume": False,
        "results_dir": str(tmp_path / "results"),
        "hosts": ["h1"],
        "levels": [1],
        "tokens": 128,
        "prompts": "",
        "prompt_limit": 0,
        "ready_timeout": 900,
        "stop_timeout": 120,
        "lease_seconds": 1800,
    }


def test_a_plan_says_all_that_the_sweep_needs(
    module: ModuleType, told: dict[str, Any], tmp_path: Path
) -> None:
    made, problems = module.plan(told, NOW)
    assert problems == []
    assert made["study"] == "20260301T123005Z"
    assert made["record"]["study_dir"] == str(tmp_path / "results" / "20260301T123005Z")
    assert [c["label"] for c in made["configurations"]] == ["ar", "chain", "8:4", "16:4"]
    assert (made["workload"]["levels"], made["workload"]["max_tokens"]) == ([1], 128)
    assert len(made["workload"]["prompts"]) >= 12
    assert {"id", "category", "text"} == set(made["workload"]["prompts"][0])
    assert made["lines"][0] == "Study 20260301T123005Z: 4 rows on 1 host (h1)"
    assert not (tmp_path / "results").exists(), "planning writes nothing"


def test_numbers_may_come_as_text(module: ModuleType, told: dict[str, Any]) -> None:
    told |= {
        "levels": "4,1",
        "tokens": "64",
        "prompt_limit": "3",
        "ready_timeout": "60",
        "lease_seconds": "195",
    }
    made, problems = module.plan(told, NOW)
    assert problems == []
    assert (made["workload"]["levels"], made["workload"]["max_tokens"]) == ([1, 4], 64)
    assert len(made["workload"]["prompts"]) == 3
    assert (made["ready_timeout"], made["lease_seconds"]) == (60, 195)


@pytest.mark.parametrize(
    ("value", "levels"), [("[1, 4]", [1, 4]), (2, [2]), ("8", [8]), ([4, 1, 4], [1, 4]), (["2"], [2])]
)
def test_spellings_of_levels(module: ModuleType, told: dict[str, Any], value: Any, levels: list[int]) -> None:
    made, problems = module.plan(told | {"levels": value}, NOW)
    assert problems == []
    assert made["workload"]["levels"] == levels


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"grid": "8:"}, ["grid item 1", "topk is missing"]),
        ({"grid": "0:4"}, ["grid item 1", "at least 1"]),
        ({"grid": "8:four"}, ["grid item 1", "four"]),
        ({"grid": "sead"}, ["'sead' is not a preset", "quick", "seed"]),
        ({"grid": ""}, ["the grid is empty"]),
        ({"arms": "ar,tree"}, ["'tree'", "sweep_arms"]),
        ({"levels": []}, ["sweep_levels is empty"]),
        ({"levels": "1,x"}, ["sweep_levels is 'x'", "whole number of at least 1"]),
        ({"levels": [0]}, ["sweep_levels is 0"]),
        ({"tokens": "many"}, ["sweep_tokens is 'many'"]),
        ({"tokens": True}, ["sweep_tokens is True"]),
        ({"tokens": 1.5}, ["sweep_tokens is 1.5"]),
        ({"prompt_limit": -1}, ["sweep_prompt_limit is -1"]),
        ({"prompts": "none.yml"}, ["none.yml", "can't be read", "sweep_prompts"]),
        ({"tokens": 1}, ["sweep_tokens is 1", "at least 2"]),
        ({"lease_seconds": 1034}, ["sweep_lease_seconds is 1034", "sglang_stop_timeout + 15 = 1035"]),
        ({"study": "a/b"}, ["sweep_study", "a/b"]),
        ({"study": "latest"}, ["sweep_study", "latest"]),
        ({"hosts": []}, ["no host to sweep"]),
    ],
)
def test_a_bad_value_is_named_with_what_was_expected(
    module: ModuleType, told: dict[str, Any], change: dict[str, Any], words: list[str]
) -> None:
    _, problems = module.plan(told | change, NOW)
    assert len(problems) == 1
    for word in words:
        assert word in problems[0]


def test_all_complaints_come_at_once(module: ModuleType, told: dict[str, Any], run_module: Any) -> None:
    result = run_module(module, **(told | {"grid": "8:", "tokens": "many"}))
    assert result["failed"] is True
    assert result["msg"].count("\n") == 1


def test_a_study_that_has_rows_of_the_host_is_refused(
    module: ModuleType, told: dict[str, Any], measured: Any
) -> None:
    measured("s1", "h1", "ar", 65.0, seconds=40)
    _, problems = module.plan(told | {"study": "s1"}, NOW)
    assert problems == [
        "sweep_study is 's1', which already has rows of h1; choose another name, or set sweep_resume to keep "
        "the rows that still stand"
    ]
    _, problems = module.plan(told | {"study": "s1", "hosts": ["h2"]}, NOW)
    assert problems == []


def test_a_study_is_gone_on_with_when_its_workload_is_the_planned_one(
    module: ModuleType, told: dict[str, Any], measured: Any
) -> None:
    measured("s1", "h1", "ar", 65.0)
    again = told | {"study": "s1", "resume": True}
    made, problems = module.plan(again, NOW)
    assert len(problems) == 1
    assert "study.json has none" in problems[0]
    Study(Path(told["results_dir"]) / "s1").write_meta(made["record"]["meta"])
    made, problems = module.plan(again, NOW)
    assert problems == []
    assert made["lines"][-1].endswith(", less the rows that are kept")
    assert "new study" not in "".join(made["lines"])
    other, problems = module.plan(again | {"study": "s2"}, NOW)
    assert problems == []
    assert other["lines"][1] == "  a new study: 's2' has no rows of these hosts to go on with"
    _, problems = module.plan(again | {"tokens": 77}, NOW)
    assert "another workload" in problems[0]
    assert "max_tokens: the study has 128, this sweep 77" in problems[0]


def test_going_on_needs_a_study_s_name(module: ModuleType, told: dict[str, Any]) -> None:
    _, problems = module.plan(told | {"resume": True}, NOW)
    assert len(problems) == 1
    assert "sweep_resume is set and sweep_study is not" in problems[0]


def test_the_estimate_goes_by_the_newest_study(
    module: ModuleType, told: dict[str, Any], measured: Any
) -> None:
    measured("s1", "h1", "ar", 65.0, seconds=40)
    measured("s1", "h1", "chain", 160.0, seconds=50)
    made, _ = module.plan(told, NOW)
    assert made["lines"][-1] == "Estimated time: about 3 min (45 s a row in study s1)"


def test_without_an_earlier_study_there_is_no_made_up_estimate(
    module: ModuleType, told: dict[str, Any]
) -> None:
    made, _ = module.plan(told, NOW)
    assert made["lines"][-1].startswith("Estimated time: unknown")
