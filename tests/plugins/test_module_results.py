"""Modules over ``tuning``: what is recorded, reported and chosen from results on disk."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.plugins.support import load, measurement
from tuning.grid import parse_grid
from tuning.models import Failure, Phases
from tuning.readiness import ReadyReport
from tuning.report import markdown
from tuning.store import Study, open_study

Run = Callable[..., dict[str, Any]]

FAILURE = {
    "kind": "draft_missing",
    "summary": "no draft",
    "hint": "set sglang_draft_model_path",
    "journal_tail": ["a", "b"],
}


@pytest.fixture
def plan(tmp_path: Path) -> dict[str, Any]:
    return {
        "study": "s1",
        "study_dir": str(tmp_path / "results" / "s1"),
        "labels": ["ar", "8:4"],
        "meta": {"study": "s1", "hosts": ["h1"]},
    }


def row(plan: dict[str, Any], spec: str, position: int, **result: Any) -> dict[str, Any]:
    configuration = parse_grid([spec], [])[0].model_dump(mode="json")
    return {
        "plan": plan,
        "host": "h1",
        "position": position,
        "configuration": configuration,
        "command": ["python", "-m", "x"],
        "engine": {"versions": {"sglang": "0.5.23"}},
        "applied": {"invocation_id": "i1", "started_at": "2026-03-01T12:00:00.000Z"},
        "ready": {"invocation_id": "i1", "phases": {"first_token_s": 16.5}},
        **result,
    }


def test_a_measured_row_is_on_disk_and_told_in_a_line(run_module: Run, plan: dict[str, Any]) -> None:
    module = load("sweep_record")
    run_module(module, **row(plan, "ar", 1, measurement=measurement(65.0, "ar")))
    result = run_module(module, **row(plan, "8:4", 2, measurement=measurement(195.0)))
    assert result["status"] == "ok"
    (line,) = result["lines"]
    shown = " ".join(line.split())
    assert shown == "[2/2] 8:4 ok 195.0 tok/s accept 4.00 3.00 x AR same as AR 1/1 boot 16.5 s"
    study = open_study(Path(plan["study_dir"]).parent)
    assert study.name == "s1"
    assert study.meta() == plan["meta"]
    fact = study.facts()[-1]
    assert (fact.status, fact.invocation_id, fact.command) == ("ok", "i1", ["python", "-m", "x"])
    assert fact.phases is not None
    assert fact.phases.boot_s == 16.5
    assert fact.trial == f"02-{fact.configuration.id}"
    assert json.loads(Path(result["path"]).read_text())["status"] == "ok"


def test_a_failed_row_has_its_class_its_hint_and_where_the_tail_is(
    run_module: Run, plan: dict[str, Any]
) -> None:
    failed = {"failed": True, "msg": "x", "failure": FAILURE, "phases": {"process_s": 0.1}}
    result = run_module(load("sweep_record"), **row(plan, "8:4", 2, failed=failed))
    assert result["status"] == "failed"
    assert "draft_missing: no draft" in result["lines"][0]
    assert result["lines"][1].strip() == "what to do: set sglang_draft_model_path"
    fact = open_study(Path(plan["study_dir"]).parent).facts()[0]
    assert fact.failure is not None
    assert fact.failure.journal_tail == ["a", "b"]
    assert str(result["path"]) in result["lines"][2]


def test_a_module_that_broke_is_a_failed_row_too(run_module: Run, plan: dict[str, Any]) -> None:
    failed = {"failed": True, "msg": "MODULE FAILURE", "module_stderr": "Killed\n"}
    run_module(load("sweep_record"), **row(plan, "8:4", 2, failed=failed))
    fact = open_study(Path(plan["study_dir"]).parent).facts()[0]
    assert fact.failure is not None
    assert (fact.failure.kind, fact.failure.journal_tail) == ("crashed", ["Killed"])
    assert "MODULE FAILURE" in fact.failure.summary


def test_an_earlier_rows_readiness_is_not_this_rows(run_module: Run, plan: dict[str, Any]) -> None:
    told = row(plan, "8:4", 2, failed={"msg": "x", "failure": FAILURE})
    told["ready"]["invocation_id"] = "i0"
    run_module(load("sweep_record"), **told)
    assert open_study(Path(plan["study_dir"]).parent).facts()[0].phases is None


def test_a_row_that_can_not_be_written_stops_the_sweep(run_module: Run, plan: dict[str, Any]) -> None:
    module = load("sweep_record")
    told = row(plan, "8:4", 2, measurement=measurement(195.0))
    run_module(module, **told)
    result = run_module(module, **told)
    assert result["failed"] is True
    assert result["abort"] is True
    assert "the row of 8:4 is not on disk" in result["msg"]
    assert len(open_study(Path(plan["study_dir"]).parent).facts()) == 1


def test_the_report_is_written_and_shown(run_module: Run, measured: Any, tmp_path: Path) -> None:
    measured("s1", "h1", "ar", 65.0)
    measured("s1", "h1", "8:4", 195.0)
    measured("s1", "h2", "8:4", 0, kind="out_of_memory")
    result = run_module(load("sweep_report"), study_dir=str(tmp_path / "results" / "s1"))
    assert result["ok_rows"] == {"h1": 2, "h2": 0}
    assert result["lines"][-1] == f"Report: {tmp_path}/results/s1/report.md"
    assert any("8:4" in line and "195.0" in line and "3.00" in line for line in result["lines"])
    assert "195.0" in (tmp_path / "results" / "s1" / "report.md").read_text()


def test_a_sweep_without_a_finished_row_has_no_report(run_module: Run, tmp_path: Path) -> None:
    result = run_module(load("sweep_report"), study_dir=str(tmp_path / "results" / "s1"))
    assert (result["lines"], result["ok_rows"]) == (["No row was finished."], {})


def test_the_best_row_is_chosen(run_module: Run, measured: Any, tmp_path: Path) -> None:
    measured("s1", "h1", "ar", 65.0)
    measured("s1", "h1", "chain", 130.0)
    measured("s1", "h1", "16:4", 208.0)
    measured("s1", "h1", "48:8", 0, kind="out_of_memory")
    result = run_module(load("sweep_best"), results_dir=str(tmp_path / "results"), study="latest")
    assert (result["study"], result["configuration"]["label"]) == ("s1", "16:4")
    assert result["tok_s"] == 208.0
    assert result["times_ar"] == pytest.approx(3.2)
    assert result["host"] == "h1"
    assert result["reason"] == "208.0 tok/s, 3.20 x AR on h1, study s1"
    assert result["changed"] is False


def test_a_study_that_was_cut_off_is_refused(run_module: Run, measured: Any, tmp_path: Path) -> None:
    """What was measured first would win over what was never tried: here plain decoding over all trees."""
    module, results = load("sweep_best"), tmp_path / "results"
    rows = [
        measured("s1", "h1", "ar", 65.0)["configuration"],
        parse_grid(["8:4"], [])[0].model_dump(mode="json"),
    ]
    Study(results / "s1").write_meta({"hosts": ["h1"], "configurations": rows})
    result = run_module(module, results_dir=str(results), study="latest")
    assert result["failed"] is True
    assert "study s1 is not finished, it has no row of 8:4 on h1: go on with it" in result["msg"]
    assert "-e sweep_study=s1 -e sweep_resume=true" in result["msg"]
    assert "not measured: 8:4 on h1" in markdown(Study(results / "s1"))
    result = run_module(module, results_dir=str(results), study="s1", unfinished=True)
    assert result["configuration"]["label"] == "ar"
    assert "study s1: not measured: 8:4 on h1" in result["lines"]
    measured("s1", "h1", "8:4", 0, kind="out_of_memory")
    assert run_module(module, results_dir=str(results), study="s1")["configuration"]["label"] == "ar"


def test_a_host_that_was_not_measured_is_named(run_module: Run, measured: Any, tmp_path: Path) -> None:
    measured("s1", "h1", "ar", 65.0)
    measured("s1", "h1", "8:4", 130.0)
    module, results = load("sweep_best"), str(tmp_path / "results")
    assert run_module(module, results_dir=results, study="s1", hosts=["h1"])["lines"] == []
    result = run_module(module, results_dir=results, study="s1", hosts=["h1", "gpu1"])
    assert result["lines"] == ["study s1: measured on h1, not on gpu1"]


def test_nothing_to_promote_says_what_is_there(run_module: Run, measured: Any, tmp_path: Path) -> None:
    module, results = load("sweep_best"), str(tmp_path / "results")
    result = run_module(module, results_dir=results, study="latest")
    assert result["failed"] is True
    assert "nothing to promote: no study 'latest'" in result["msg"]
    measured("s1", "h1", "8:4", 0, kind="out_of_memory")
    result = run_module(module, results_dir=results, study="latest")
    assert "8:4 on h1: failed" in result["msg"]
    result = run_module(module, results_dir=results, study="s9")
    assert "no study 's9'" in result["msg"]
    assert "found: s1" in result["msg"]


@pytest.mark.parametrize(
    ("report", "wanted", "words"),
    [
        (
            ReadyReport(False, "i1", 0, Phases(process_s=0.1), Failure.model_validate(FAILURE)),
            "i1",
            [
                "svc is not ready: draft_missing: no draft",
                "What to do: set sglang_draft",
                "last 2 lines",
                "  b",
            ],
        ),
        (
            ReadyReport(True, "i2", 7, Phases(first_token_s=2.0), None),
            "i1",
            ["killed: something else restarted the unit", "found invocation i2, expected i1"],
        ),
    ],
)
def test_a_service_that_is_not_ready_says_why(
    run_module: Run, monkeypatch: pytest.MonkeyPatch, report: ReadyReport, wanted: str, words: list[str]
) -> None:
    module = load("sglang_ready")
    monkeypatch.setattr(module, "wait_ready", lambda *args, **kwargs: report)
    result = run_module(module, unit="svc", base_url="http://127.0.0.1:1", invocation_id=wanted)
    assert result["failed"] is True
    for word in words:
        assert word in result["msg"]
    assert set(result["failure"]) == set(FAILURE)


def test_readiness_hands_its_values_on(run_module: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    module = load("sglang_ready")
    asked: list[Any] = []

    def wait(*args: Any, **kwargs: Any) -> ReadyReport:
        asked.extend([args, kwargs])
        return ReadyReport(True, "i1", 7, Phases(first_token_s=2.0), None)

    monkeypatch.setattr(module, "wait_ready", wait)
    result = run_module(module, unit="svc", base_url="http://127.0.0.1:1", timeout="60")
    assert asked == [("svc", "http://127.0.0.1:1"), {"timeout_s": 60.0, "poll_s": 0.25, "api_key": None}]
    assert (result["changed"], result["main_pid"], result["phases"]["boot_s"]) == (False, 7, 2.0)


def test_check_mode_waits_for_nothing(run_module: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    module = load("sglang_ready")
    monkeypatch.setattr(module, "wait_ready", None)
    assert run_module(module, check=True, unit="svc", base_url="http://127.0.0.1:1")["changed"] is False


def test_a_measurement_that_failed_keeps_its_class(run_module: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    module = load("sglang_measure")

    def fail(*args: Any, **kwargs: Any) -> None:
        raise module.MeasurementFailed(Failure.model_validate(FAILURE))

    monkeypatch.setattr(module, "measure", fail)
    workload = {"prompts": [{"id": "p", "category": "c", "text": "t"}], "levels": [1], "max_tokens": 8}
    result = run_module(module, unit="svc", base_url="u", invocation_id="i1", workload=workload)
    assert (result["failed"], result["failure"], result["invocation_id"]) == (True, FAILURE, "i1")


def test_a_row_measured_again_replaces_the_one_that_failed(run_module: Run, plan: dict[str, Any]) -> None:
    """The failed row is to be measured again, the AR row stands; afterwards both stand."""
    engine = {"release": "r1", "versions": {"sglang": "0.5.23"}, "environment_sha256": "e1"}
    ar = row(plan, "ar", 1, measurement=measurement(65.0, "ar")) | {"engine": engine}
    tree = row(plan, "8:4", 2) | {"engine": engine}
    run_module(load("sweep_record"), **ar)
    run_module(load("sweep_record"), **tree, failed={"failure": FAILURE})
    ids = [told["configuration"]["id"] for told in (ar, tree)]
    asked = {
        "plan": plan,
        "host": "h1",
        "commands": {key: ["python", "-m", "x"] for key in ids},
        "engine": engine,
    }
    found = run_module(load("sweep_standing"), **asked)
    assert found["kept"] == [ids[0]]
    assert found["superseded"] == {ids[1]: [f"02-{ids[1]}"]}
    assert "kept 1 of 2 rows" in found["lines"][0]
    run_module(
        load("sweep_record"),
        **tree,
        measurement=measurement(195.0),
        supersedes=found["superseded"][ids[1]],
    )
    assert run_module(load("sweep_standing"), **asked)["kept"] == ids
    said = "\n".join(run_module(load("sweep_report"), study_dir=plan["study_dir"])["lines"])
    assert "draft_missing" not in said
    assert "195.0" in said
