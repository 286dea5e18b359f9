"""The report's figures, by hand; and the winner."""

from __future__ import annotations

import csv as csv_module
import io
from pathlib import Path

import pytest
from rich.console import Console

from tests.tuning.facts import AR, CHAIN, fact, measurement, tree
from tuning import report
from tuning.models import Configuration, Failure, Measurement, TrialFact
from tuning.store import Study


def ok(configuration: Configuration, tok_s: float, host: str = "h1", trial: str = "") -> TrialFact:
    name = trial or f"{configuration.id}-{host}"
    return fact(configuration, name, host=host, measurement=measurement(tok_s))


def failed(configuration: Configuration, host: str = "h1") -> TrialFact:
    failure = Failure(kind="draft_missing", summary="Repo id must | be\nin the form")
    return fact(configuration, f"{configuration.id}-{host}", host=host, status="failed", failure=failure)


def stored(tmp_path: Path, facts: list[TrialFact]) -> Study:
    study = Study(tmp_path / "s1").create()
    for one in facts:
        study.append(one)
    return study


def test_row_figures() -> None:
    made = fact(tree(8, 4), "02", measurement=measurement(150.0, tokens=161, steps=40))
    ar = fact(AR, "01", measurement=measurement(60.0))
    row = report.rows([ar, made])[1]
    assert row.tok_s == pytest.approx(150.0)
    assert row.times_ar == pytest.approx(2.5)
    assert row.accept_length == pytest.approx(4.025)
    assert row.verify_steps == 40
    assert row.same_as_ar == (2, 2)
    assert row.boot_s == 16.25


def test_same_as_ar_looks_at_every_level() -> None:
    ar = fact(AR, "01")
    base = measurement()
    twisted = [record.model_copy(update={"output_sha256": "x"}) for record in base.levels[0].records[:1]]
    high = base.levels[0].model_copy(
        update={"concurrency": 4, "records": twisted + base.levels[0].records[1:]}
    )
    made = fact(tree(8, 4), "02", measurement=base.model_copy(update={"levels": [high, base.levels[0]]}))
    assert report.same_as_ar(made, ar) == (1, 2)
    assert report.same_as_ar(ar, ar) == (2, 2)


def test_a_missing_prompt_is_not_the_same() -> None:
    ar = fact(AR, "01")
    made = fact(tree(8, 4), "02", measurement=measurement(outputs={"p1": "out-p1"}))
    assert report.same_as_ar(made, ar) == (1, 2)


def test_no_speed_up_over_another_workload() -> None:
    ar = fact(AR, "01", measurement=measurement(digest="other"))
    row = report.rows([ar, ok(tree(8, 4), 100.0)])[1]
    assert row.times_ar is None
    assert row.same_as_ar is None


def test_ar_of_the_same_host() -> None:
    facts = [
        ok(AR, 50.0, "h1"),
        ok(AR, 100.0, "h2"),
        ok(tree(8, 4), 100.0, "h1"),
        ok(tree(8, 4), 100.0, "h2"),
    ]
    assert [row.times_ar for row in report.rows(facts)][2:] == pytest.approx([2.0, 1.0])


def test_best_is_the_fastest() -> None:
    facts = [
        ok(AR, 60.0),
        ok(CHAIN, 150.0),
        ok(tree(8, 4), 180.0),
        ok(tree(16, 4), 200.0),
        ok(tree(48, 8), 170.0),
    ]
    winner = report.best(facts)
    assert winner is not None
    assert winner.configuration == tree(16, 4)


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ({(8, 4): 199.0, (16, 4): 200.0}, (8, 4)),  # 0.5 % apart: a tie, the smaller budget
        ({(8, 4): 197.9, (16, 4): 200.0}, (16, 4)),  # 1.05 % apart
        ({(16, 8): 200.0, (16, 4): 199.0}, (16, 4)),  # same budget: the smaller topk
        ({(8, 4): 199.0, (12, 4): 199.5, (24, 4): 200.5}, (8, 4)),
    ],
)
def test_ties_go_to_the_smaller_tree(rates: dict[tuple[int, int], float], expected: tuple[int, int]) -> None:
    winner = report.best([ok(tree(*pair), rate) for pair, rate in rates.items()])
    assert winner is not None
    assert (winner.configuration.budget, winner.configuration.topk) == expected


def test_a_tie_with_the_chain_goes_to_the_chain() -> None:
    winner = report.best([ok(CHAIN, 199.0), ok(tree(8, 4), 200.0)])
    assert winner is not None
    assert winner.configuration == CHAIN


def test_failed_rows_never_win() -> None:
    assert report.best([failed(tree(8, 4))]) is None
    assert report.best([]) is None
    winner = report.best([failed(tree(16, 4)), ok(AR, 10.0)])
    assert winner is not None
    assert winner.configuration == AR


def test_rates_are_compared_at_the_lowest_level() -> None:
    slow = measurement(100.0)
    busy = slow.levels[0].model_copy(update={"concurrency": 8, "tok_s": 900.0})
    facts = [
        fact(tree(8, 4), "1", measurement=slow.model_copy(update={"levels": [busy, slow.levels[0]]})),
        ok(tree(16, 4), 120.0),
    ]
    winner = report.best(facts)
    assert winner is not None
    assert winner.configuration == tree(16, 4)


def test_hosts_are_normalised_by_their_own_ar() -> None:
    # 8:4 gains 3.0x and 2.3x, 16:4 2.4x and 2.7x: the mean gain decides, though 16:4 has more tok/s in all.
    facts = [
        *(ok(AR, rate, host) for host, rate in (("h1", 50.0), ("h2", 100.0))),
        *(ok(tree(8, 4), rate, host) for host, rate in (("h1", 150.0), ("h2", 230.0))),
        *(ok(tree(16, 4), rate, host) for host, rate in (("h1", 120.0), ("h2", 270.0))),
    ]
    winner = report.best(facts)
    assert winner is not None
    assert winner.configuration == tree(8, 4)
    assert winner.host == "h2"


def test_an_ar_row_that_is_not_ok_is_no_base() -> None:
    ar = ok(AR, 50.0).model_copy(update={"status": "inconclusive"})
    assert [row.times_ar for row in report.rows([ar, ok(tree(8, 4), 100.0)])] == [None, None]


def test_a_configuration_that_failed_on_a_host_is_not_promoted() -> None:
    facts = [
        *(ok(AR, 50.0, host) for host in ("h1", "h2")),
        ok(tree(16, 4), 200.0, "h1"),
        failed(tree(16, 4), "h2"),
        *(ok(tree(8, 4), 150.0, host) for host in ("h1", "h2")),
    ]
    winner = report.best(facts)
    assert winner is not None
    assert winner.configuration == tree(8, 4)


def test_markdown(tmp_path: Path) -> None:
    study = stored(tmp_path, [ok(AR, 60.0), ok(tree(8, 4), 150.0), failed(tree(16, 4))])
    text = report.markdown(study)
    lines = text.splitlines()
    assert lines[0] == "# Study s1"
    assert lines[2] == (
        "| row | status | tok/s | accept length | verify steps | \u00d7 AR | same as AR | boot s |"
    )
    assert lines[5] == "| 8:4 | ok | 150.0 | 4.00 | 100 | 2.50 | 2/2 | 16.2 |"
    assert lines[6].startswith("| 16:4 | failed (draft_missing) |  |")
    assert "- best: 8:4" in lines
    assert "- 16:4: draft_missing: Repo id must \\| be in the form" in lines
    cells = [line.replace("\\|", "").count("|") for line in lines[2:7]]
    assert set(cells) == {9}


def test_hosts_get_a_column_when_there_are_several(tmp_path: Path) -> None:
    text = report.markdown(stored(tmp_path, [ok(AR, 60.0, "h1"), ok(AR, 60.0, "h2")]))
    assert "| host | row |" in text
    assert "| h2 | ar |" in text


def test_csv(tmp_path: Path) -> None:
    study = stored(tmp_path, [ok(AR, 60.0), failed(tree(16, 4))])
    rows = list(csv_module.DictReader(io.StringIO(report.csv(study))))
    assert [row["row"] for row in rows] == ["ar", "16:4"]
    assert float(rows[0]["tok_s"]) == pytest.approx(60.0)
    assert rows[0]["same_as_ar"] == rows[0]["prompts"] == "2"
    assert rows[1]["budget"] == "16"
    assert rows[1]["note"] == "draft_missing: Repo id must | be\nin the form"
    assert rows[1]["tok_s"] == ""


def test_table_shows_every_row_and_problem(tmp_path: Path) -> None:
    study = stored(tmp_path, [ok(AR, 60.0), failed(tree(16, 4))])
    with study.trials.open("ab") as file:
        file.write(b"{")
    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(report.table(study))
    text = console.export_text()
    for part in ("ar", "60.0", "16:4", "failed (draft_missing)", "best: ar", "torn by a crash"):
        assert part in text


def test_rows_are_shown_whatever_became_of_the_plan(tmp_path: Path) -> None:
    study = stored(tmp_path, [ok(AR, 60.0)])
    (study.path / "study.json").write_text("{torn")
    text = report.markdown(study)
    assert "| ar | ok |" in text
    assert "study.json isn't JSON" in text
    assert "which rows are missing is not known" in text


@pytest.mark.parametrize("spare", [0, 40])
def test_a_table_is_never_narrower_than_its_figures(tmp_path: Path, spare: int) -> None:
    """Printed narrower, whole columns are left out."""
    made = report.table(stored(tmp_path, [ok(AR, 60.0), failed(tree(16, 4))]))
    console = Console(width=report.least_width(made) + spare, file=io.StringIO(), record=True)
    console.print(made)
    heads = console.export_text().splitlines()
    assert any(all(name in line for name in report.COLUMNS) for line in heads)


def test_warnings_are_shown(tmp_path: Path) -> None:
    made = fact(tree(8, 4), measurement=measurement(warnings=["accept length 1.00: gains nothing"]))
    assert "accept length 1.00: gains nothing" in report.markdown(stored(tmp_path, [made]))


def test_write(tmp_path: Path) -> None:
    study = stored(tmp_path, [ok(AR, 60.0)])
    assert [path.name for path in report.write(study)] == ["report.md", "report.csv"]
    assert (study.path / "report.md").read_text() == report.markdown(study)


def tau(configuration: Configuration, steps: int, host: str = "h1") -> TrialFact:
    made = measurement(100.0, tokens=1000, steps=steps)
    return fact(configuration, f"{configuration.id}-{host}", host=host, measurement=made)


def test_an_accept_length_that_falls_with_the_budget_is_doubted() -> None:
    facts = [ok(AR, 1.0), tau(tree(8, 4), 250), tau(tree(16, 4), 400), tau(tree(24, 4), 251)]
    (said,) = report.doubts(facts)[:1]
    assert said.startswith("accept length falls from 4.00 at 8:4 to 2.50 at 16:4")
    assert len(report.doubts(facts)) == 1  # 251 steps are within 1 %


def test_accept_lengths_that_need_not_grow_are_not_doubted() -> None:
    facts = [
        ok(AR, 1.0),
        tau(tree(8, 4), 250),
        tau(tree(16, 8), 400),  # another topk
        tau(tree(24, 4, **{"page-size": 1}), 400),  # another engine
        tau(tree(32, 4), 400, host="h2"),  # another host
        tau(CHAIN, 100),
    ]
    assert report.doubts(facts) == []


def in_dtype(dtype: str, outputs: dict[str, str], tok_s: float = 100.0) -> Measurement:
    return measurement(tok_s, outputs=outputs).model_copy(update={"server": {"dtype": dtype}})


@pytest.mark.parametrize(
    ("dtype", "same", "of", "wins"),
    [
        ("float32", 3, 3, True),
        ("float32", 2, 3, False),
        ("bfloat16", 1, 3, True),  # rounding parts single prompts
        ("bfloat16", 0, 3, False),  # but not all of them
    ],
)
def test_a_row_with_other_output_than_ar_can_not_win(dtype: str, same: int, of: int, wins: bool) -> None:
    right = {f"p{i}": f"out-p{i}" for i in range(of)}
    made = {key: value if i < same else "garbled" for i, (key, value) in enumerate(right.items())}
    facts = [
        fact(AR, "01", measurement=in_dtype(dtype, right, 50.0)),
        fact(tree(8, 4), "02", measurement=in_dtype(dtype, made, 200.0)),
    ]
    winner = report.best(facts)
    assert winner is not None
    assert winner.configuration == (tree(8, 4) if wins else AR)
    assert report.rows(facts)[1].status == ("ok" if wins else report.DIFFERS)


def test_an_ar_arm_with_flags_of_its_own_is_no_reference() -> None:
    odd = Configuration(arm="ar", extra={"max-running-requests": 1})
    rows = report.rows([ok(odd, 10.0), ok(AR, 50.0), ok(tree(8, 4), 100.0)])
    assert rows[2].times_ar == pytest.approx(2.0)
    assert report.rows([ok(odd, 10.0), ok(tree(8, 4), 100.0)])[1].times_ar is None


def test_without_an_ar_row_nothing_is_said_to_be_right() -> None:
    assert report.doubts([ok(tree(8, 4), 100.0)]) == [
        "no autoregressive row: nothing says that the outputs are right"
    ]


def test_every_level_has_its_column(tmp_path: Path) -> None:
    low = measurement(100.0)
    busy = low.levels[0].model_copy(update={"concurrency": 4, "tok_s": 321.0})
    study = stored(
        tmp_path, [fact(AR, "01", measurement=low.model_copy(update={"levels": [busy, low.levels[0]]}))]
    )
    assert "| row | status | tok/s @1 | tok/s @4 |" in report.markdown(study)
    assert "| 100.0 | 321.0 |" in report.markdown(study)
    assert report.csv(study).splitlines()[1].endswith(",1:100.0 4:321.0")


def test_rows_that_one_pass_does_not_tell_apart_are_named(tmp_path: Path) -> None:
    study = stored(tmp_path, [ok(AR, 60.0), ok(tree(8, 4), 181.0), ok(tree(16, 4), 200.0), ok(CHAIN, 179.0)])
    assert "- within 10% of it, which one pass a row does not tell apart: 8:4" in report.markdown(study)


def test_the_report_says_what_was_measured(tmp_path: Path) -> None:
    made = in_dtype("float32", {"p1": "a", "p2": "b"})
    study = stored(tmp_path, [fact(AR, "01", measurement=made)])
    assert (
        "- measured: 2 prompts of 100 tokens, concurrency 1 float32; 2026-01-01T00:01 to 2026-01-01T00:01 UTC"
        in report.markdown(study)
    )


def test_other_output_than_ar_is_doubted(tmp_path: Path) -> None:
    odd = measurement(outputs={"p1": "out-p1", "p2": "else"})
    study = stored(tmp_path, [ok(AR, 60.0), fact(tree(8, 4), "02", measurement=odd)])
    said = "8:4: 1 of 2 prompts have another output than the autoregressive arm"
    assert report.doubts(study.facts()) == [said]
    assert f"- {said}" in report.markdown(study)
