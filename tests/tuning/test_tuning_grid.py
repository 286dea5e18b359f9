"""Every spelling of a grid, and every way to get one wrong."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuning.grid import PRESETS, GridError, parse_grid, to_json
from tuning.models import Configuration

SEED = ["8:4", "16:4", "16:8", "24:6", "32:8", "48:8"]  # the budgets and caps of the seed's own sweep


def labels(spec: object, **more: Any) -> list[str]:
    return [configuration.label for configuration in parse_grid(spec, **more)]


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("seed", SEED),
        (" seed\n", SEED),
        ("quick", ["8:4", "16:4"]),
        ("8:4", ["8:4"]),
        ("8:4, 16:4", ["8:4", "16:4"]),
        ("8:4, 16:4,", ["8:4", "16:4"]),
        ("8 4;16 4", ["8:4", "16:4"]),
        ("8 4; 16 4;", ["8:4", "16:4"]),
        ("8:4 16:4", ["8:4", "16:4"]),
        ("8:4\n16:4\n", ["8:4", "16:4"]),
        (" 08 : 04 ", ["8:4"]),
        (["8:4", "16 4"], ["8:4", "16:4"]),
        (("8:4",), ["8:4"]),
        ([{"budget": 8, "topk": 4}], ["8:4"]),
        ([{"budget": "8", "topk": "4"}], ["8:4"]),
        ([{"arm": "tree", "budget": 8, "topk": 4, "extra": {}}], ["8:4"]),
        ({"budget": [8, 16], "topk": [4, 6]}, ["8:4", "8:6", "16:4", "16:6"]),
        ({"budget": [8, 16], "topk": 4}, ["8:4", "16:4"]),
        ({"budget": 8, "topk": 4}, ["8:4"]),
        ('{"budget": [8, 16], "topk": [4]}', ["8:4", "16:4"]),
        ('["8:4", {"budget": 16, "topk": 4}]', ["8:4", "16:4"]),
        ("[8:4, 16:4]", ["8:4", "16:4"]),
        ("16:4, 8:4, 16:4", ["16:4", "8:4"]),
        (["8:4", {"budget": 8, "topk": 4}], ["8:4"]),
        ("4:9", ["4:9"]),
    ],
)
def test_spellings(spec: object, expected: list[str]) -> None:
    assert labels(spec) == ["ar", "chain", *expected]


def test_baselines_come_first_whatever_the_order() -> None:
    spec = ["8:4", {"arm": "chain"}, "ar"]
    assert labels(spec, arms=()) == ["ar", "chain", "8:4"]
    assert labels({"arm": "chain"}, arms=()) == ["chain"]


@pytest.mark.parametrize(
    ("arms", "expected"),
    [
        (("ar",), ["ar", "8:4"]),
        ("chain", ["chain", "8:4"]),
        ("ar,chain", ["ar", "chain", "8:4"]),
        ("", ["8:4"]),
    ],
)
def test_baseline_arms(arms: Any, expected: list[str]) -> None:
    assert labels("8:4", arms=arms) == expected


@pytest.mark.parametrize("arms", [("tree",), ("AR",), ["ar", "greedy"]])
def test_unknown_baseline_arm(arms: Any) -> None:
    with pytest.raises(GridError, match="sweep_arms takes ar and chain"):
        parse_grid("8:4", arms=arms)


@pytest.mark.parametrize("name", ["g.yml", "g.yaml", "g.json"])
def test_files(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text('["8:4", {"budget": 16, "topk": 4}]')
    assert labels(name, base=tmp_path)[2:] == ["8:4", "16:4"]
    assert labels(str(tmp_path / name))[2:] == ["8:4", "16:4"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("- 8:4\n- 16:4\n", ["8:4", "16:4"]),  # YAML 1.1 would read the number 484
        ("budget: [8, 16]\ntopk: 4\n", ["8:4", "16:4"]),
        ("8:4, 16:4\n", ["8:4", "16:4"]),
        ("seed\n", SEED),
        ("- budget: 8\n  topk: 4\n  extra: {page-size: 1, log-requests: true, x: 0.5, y: null}\n", None),
    ],
)
def test_file_contents(tmp_path: Path, text: str, expected: list[str] | None) -> None:
    (tmp_path / "g.yml").write_text(text)
    made = parse_grid("g.yml", arms=(), base=tmp_path)
    if expected is None:
        assert made[0].extra == {"page-size": 1, "log-requests": True, "x": 0.5, "y": None}
    else:
        assert [configuration.label for configuration in made] == expected


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("8:", r"grid item 1 '8:': topk is missing; write budget:topk such as 16:4"),
        (":4", r"grid item 1 ':4': budget is missing; write budget:topk such as 16:4"),
        ("16:4, 8:", r"grid item 2 '8:': topk is missing"),
        ("8", r"grid item 1 '8': topk is missing"),
        ("0:4", r"grid item 1 '0:4': budget is '0'; expected a whole number of at least 1"),
        ("8:0", r"grid item 1 '8:0': topk is '0'; expected a whole number of at least 1"),
        ("-8:4", r"grid item 1 '-8:4': budget is '-8'"),
        ("8:four", r"grid item 1 '8:four': topk is 'four'; expected a whole number of at least 1"),
        ("8.5:4", r"grid item 1 '8.5:4': budget is '8.5'"),
        ("٨:4", r"budget is '٨'"),
        ("8:4:2", r"expected two numbers, found 3"),
        ("8 4 16 4", r"expected two numbers, found 4"),
        ("8:4,,16:4", r"grid item 2 '': it is empty"),
        ("sede", r"grid 'sede' is not a preset; known presets: quick, seed"),
        ("auto", r"'auto' is not available yet"),
        ("", r"the grid is empty; write budget:topk"),
        ("  \n", r"the grid is empty"),
        (None, r"the grid is empty"),
        ([], r"the grid is an empty list"),
        ({}, r"the grid is an empty dict"),
        ("[]", r"the grid is an empty list"),
        ("[8:4", r"the grid is neither YAML nor JSON"),
        (8, r"the grid is 8; write"),
        (True, r"the grid is true; write"),
        (484, r"quote it, '8:4'"),
        ([484], r"grid item 1 484: .*quote it, '8:4'"),
        ([8.5], r"grid item 1 8\.5: expected budget:topk"),
        ([True], r"grid item 1 true: expected budget:topk"),
        ([None], r"grid item 1 null: expected budget:topk"),
        ([["8", "4"]], r'grid item 1 \["8", "4"\]: expected budget:topk'),
        ([""], r"grid item 1 '': it is empty"),
        ([{"budget": 8}], r"grid item 1 .*: topk is missing; write"),
        ([{"topk": 8}], r"grid item 1 .*: budget is missing; write"),
        ([{"budget": 8, "topk": 4.0}], r"topk is 4\.0; expected a whole number"),
        ([{"budget": True, "topk": 4}], r"budget is true; expected a whole number"),
        ([{"budget": -1, "topk": 4}], r"budget is -1; expected a whole number"),
        ([{"budget": [8], "topk": 4}], r"budget is \[8\]; expected a whole number"),
        (["8:4", {"budget": 8, "topk": 4, "cap": 1}], r"grid item 2 .*: unknown key 'cap'; known keys: arm,"),
        ([{"arm": "dfs", "budget": 8, "topk": 4}], r"arm 'dfs' is unknown; expected one of ar, chain, tree"),
        ([{"arm": "ar", "budget": 8, "topk": 4}], r"budget and topk belong to arm tree, not to arm ar"),
        ({"budget": [], "topk": [4]}, r"grid 'budget' is an empty list"),
        ({"budget": [8], "topk": [4], "top": [1]}, r"unknown key 'top'"),
        ({"budget": [8, 0], "topk": [4]}, r"grid item 2 .*budget is 0"),
        ([{"budget": 8, "topk": 4, "extra": [1]}], r"extra must map engine flags to values"),
        ([{"budget": 8, "topk": 4, "extra": {"--tp": 2}}], r"without leading dashes, as 'tp'"),
        ([{"budget": 8, "topk": 4, "extra": {"page_size": 2}}], r"as 'page-size'"),
        ([{"budget": 8, "topk": 4, "extra": {"a b": 2}}], r"'a b' isn't a flag name"),
        (
            [{"budget": 8, "topk": 4, "extra": {"a": {"b": 1}}}],
            r"extra flag 'a' is \{\"b\": 1\}; expected text",
        ),
        ([{"budget": 8, "topk": 4, "extra": {"a": [[1]]}}], r"extra flag 'a' is \[\[1\]\]; expected text"),
        ([{"budget": 8, "topk": 4, "extra": {"a": []}}], r"extra flag 'a' has an empty list"),
        ([{"budget": 8, "topk": 4, "extra": {"a": "x\ny"}}], r"holds a line break"),
        ([{"budget": 8, "topk": 4, "extra": {"a": float("nan")}}], r"extra"),
        (
            [{"budget": 8, "topk": 4, "extra": {"port": 1}}],
            r"'port' means 'port', which is set by the service",
        ),
        (
            [{"budget": 8, "topk": 4, "extra": {"speculative-ddtree-budget": 1}}],
            r"is set by the service or by",
        ),
        ([{"arm": "ar", "extra": {"model-path": "/other"}}], r"'model-path', which is set by"),
        ([{"arm": "ar", "extra": {"por": 1}}], r"'por' means 'port', which is set by"),
        ("8:4,", r"'8:4,' ends with a separator.*quotes inside quotes"),  # what is left of -e grid=8:4, 16:4
        ("8", r"topk is missing.*quotes inside quotes"),  # of -e grid=8 4;16 4
        ('{"budget":', r"neither YAML nor JSON.*quotes inside quotes"),
        ([{"budget": 8, "topk": 4, "label": "9:4"}], r"label is '9:4' but .* own label is '8:4'"),
    ],
)
def test_refusals_name_the_item(spec: object, said: str) -> None:
    with pytest.raises(GridError, match=said):
        parse_grid(spec)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", r"grid file .*g\.yml is empty"),
        (b"# nothing\n", r"grid file .*g\.yml is empty"),
        (b"[]", r"g\.yml: the grid is an empty list"),
        (b"- 8:4\n- '8:'\n", r"g\.yml: grid item 2 '8:': topk is missing"),
        (b"other.yml\n", r"named inside another grid file"),
        (b"\xff\xfe", r"g\.yml can't be read: it isn't UTF-8 text"),
        (b"a: [", r"g\.yml is neither YAML nor JSON"),
        (b"!!python/object/apply:os.getcwd []", r"neither YAML nor JSON"),
        (b"[" * 1500, r"neither YAML nor JSON"),
    ],
)
def test_bad_files(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "g.yml").write_bytes(content)
    with pytest.raises(GridError, match=said):
        parse_grid("g.yml", base=tmp_path)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(GridError, match=r"grid file .*nope\.yml can't be read: No such file"):
        parse_grid("nope.yml", base=tmp_path)


def test_presets_are_what_design_says() -> None:
    assert labels("seed", arms=()) == SEED
    assert set(PRESETS) == {"seed", "quick"}


def test_extra_reaches_configuration_label_and_json() -> None:
    item = {"budget": 8, "topk": 4, "extra": {"speculative-draft-model-path": "/nope"}}
    (made,) = parse_grid([item], arms=())
    assert made.label == "8:4+speculative-draft-model-path=/nope"
    assert to_json([made]) == [{"arm": "tree", **item, "label": made.label, "id": made.id}]
    assert parse_grid(to_json([made]), arms=()) == [made]


def test_product_shares_extra() -> None:
    made = parse_grid({"budget": [8, 16], "topk": 4, "extra": {"page-size": 1}}, arms=())
    assert [one.label for one in made] == ["8:4+page-size=1", "16:4+page-size=1"]


def test_id_is_the_hash_of_what_reaches_the_engine() -> None:
    text = '{"arm":"tree","budget":8,"extra":{"page-size":"1"},"topk":4}'
    expected = hashlib.sha256(text.encode()).hexdigest()[:12]

    def made(**extra: Any) -> str:
        return Configuration(arm="tree", budget=8, topk=4, extra=extra).id

    assert made(**{"page-size": 1}) == expected
    assert made(**{"page-size": "1"}) == expected  # one and the same argument
    assert made(a=False) == made(a=None)  # both leave the flag out
    assert made(a=True) != made(a="true")  # the bare flag is not "--a true"
    assert made(a=None) != made()  # leaving a deployed flag out is not keeping it
    assert made(a=["1", "2"]) != made(a="1 2")
    assert len({Configuration(arm="ar").id, Configuration(arm="chain").id, made()}) == 3


@given(st.lists(st.tuples(st.integers(1, 999), st.integers(1, 99)), min_size=1, max_size=8))
def test_text_round_trip(pairs: list[tuple[int, int]]) -> None:
    text = ", ".join(f"{budget}:{topk}" for budget, topk in pairs)
    made = parse_grid(text, arms=())
    assert [(one.budget, one.topk) for one in made] == list(dict.fromkeys(pairs))
    assert parse_grid(json.dumps(to_json(made)), arms=()) == made
