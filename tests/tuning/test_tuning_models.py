"""The models refuse what would be misread later."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from tests.tuning.facts import AR, fact, measurement, tree
from tuning.models import Acceptance, Configuration, Failure, Phases, TrialFact


def test_fact_survives_json() -> None:
    made = fact(tree(8, 4))
    assert TrialFact.model_validate_json(made.model_dump_json()) == made


def test_facts_do_not_change() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        fact().status = "failed"


@pytest.mark.parametrize(
    "change",
    [
        {"surprise": 1},
        {"schema_version": 2},
        {"status": "fine"},
        {"host": "../h1"},
        {"trial": "a/b"},
        {"study": ""},
        {"study": ".hidden"},
    ],
)
def test_foreign_facts_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        TrialFact.model_validate(fact().model_dump() | change)


def test_ok_needs_a_measurement_and_failed_a_failure() -> None:
    with pytest.raises(ValidationError, match="status ok needs a measurement"):
        fact(measurement=None)
    with pytest.raises(ValidationError, match="status failed needs a failure"):
        fact(status="failed", failure=None)
    with pytest.raises(ValidationError, match="and no failure"):
        fact(measurement=measurement(), failure=Failure(kind="crashed", summary="x"))


@pytest.mark.parametrize(
    "values",
    [
        {"arm": "tree", "budget": 8},
        {"arm": "tree", "budget": 0, "topk": 4},
        {"arm": "tree", "budget": True, "topk": 4},
        {"arm": "tree", "budget": 8.0, "topk": 4},
        {"arm": "chain", "budget": 8, "topk": 4},
        {"arm": "ar", "topk": 4},
    ],
)
def test_inconsistent_configurations(values: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Configuration.model_validate(values)


def test_derived_values() -> None:
    assert Acceptance(tokens=161, steps=40, source="responses").tau == 161 / 40
    assert Acceptance(tokens=0, steps=0, source="responses").tau is None
    assert Phases(process_s=0.1).boot_s is None
    assert Phases(first_token_s=16.0).boot_s == 16.0
    assert AR.label == "ar"


def test_lowest_level_is_by_concurrency_not_by_place() -> None:
    made = measurement()
    high = made.levels[0].model_copy(update={"concurrency": 8})
    assert made.model_copy(update={"levels": [high, made.levels[0]]}).lowest().concurrency == 1


def test_schema_names_every_part() -> None:
    schema = TrialFact.model_json_schema(mode="serialization")
    assert {"Configuration", "Failure", "Phases", "Level", "Acceptance", "Measurement"} <= set(
        schema["$defs"]
    )
    assert "boot_s" in schema["$defs"]["Phases"]["properties"]
