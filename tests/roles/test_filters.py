"""The filters: exact commands, systemd's quoting, and which configuration a host should run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.roles.rolekit import ROOT, filters

SETTINGS: dict[str, Any] = {
    "python": "/opt/sglang/current/bin/python",
    "model_path": "/srv/models/target",
    "draft_model_path": "/srv/models/draft",
    "host": "127.0.0.1",
    "port": 30000,
    "block_size": None,
    "engine_args": {},
}
BASE = [
    *("/opt/sglang/current/bin/python", "-m", "sglang.launch_server", "--model-path", "/srv/models/target"),
    *("--host", "127.0.0.1", "--port", "30000"),
]
DRAFT = ["--speculative-draft-model-path", "/srv/models/draft"]
TREE = {"arm": "tree", "budget": 16, "topk": 4, "extra": {}}


def argv(configuration: dict[str, Any], **settings: Any) -> list[str]:
    """The command after the part that is always the same."""
    command: list[str] = filters.sglang_argv(configuration, SETTINGS | settings)
    assert command[: len(BASE)] == BASE
    return command[len(BASE) :]


# --- the command ---
def test_what_a_row_adds_is_the_rows_own_risk() -> None:
    given = {"device": "cpu", "max-total-tokens": 8192}
    row = {"arm": "ar", "extra": {"attention-backend": "intel_amx"}}
    assert argv(row, engine_args=given)[-2:] == ["--attention-backend", "intel_amx"]


def test_a_cpu_may_have_a_share_of_memory_beside_the_number_of_its_tokens() -> None:
    given = {"device": "cpu", "mem-fraction-static": 0.5, "max-total-tokens": 8192}
    flags = ["--device", "cpu", "--mem-fraction-static", "0.5", "--max-total-tokens", "8192"]
    assert argv({"arm": "ar", "extra": {}}, engine_args=given) == flags


def test_the_autoregressive_arm_has_no_speculative_flag() -> None:
    assert argv({"arm": "ar", "extra": {}}, draft_model_path="") == []


def test_the_chain_arm() -> None:
    assert argv({"arm": "chain", "extra": {}}) == ["--speculative-algorithm", "DFLASH", *DRAFT]


def test_the_tree_arm_has_budget_and_topk_next_to_each_other() -> None:
    assert argv(TREE) == [
        *("--speculative-algorithm", "DDTREE", *DRAFT),
        *("--speculative-ddtree-budget", "16", "--speculative-ddtree-topk-cap", "4"),
    ]


def test_the_block_size_is_for_the_arms_that_draft() -> None:
    assert argv({"arm": "ar", "extra": {}}, block_size=8) == []
    expected = ["--speculative-algorithm", "DFLASH", *DRAFT, "--speculative-dflash-block-size", "8"]
    assert argv({"arm": "chain", "extra": {}}, block_size="8") == expected


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (True, ["--flag"]),
        (False, []),
        (None, []),
        (0, ["--flag", "0"]),
        (0.5, ["--flag", "0.5"]),
        ("false", ["--flag", "false"]),
        ("", ["--flag", ""]),
        (-1, ["--flag", "-1"]),
        ([1, "b", 0.25], ["--flag", "1", "b", "0.25"]),
        ({"a": True, "n": 16}, ["--flag", '{"a":true,"n":16}']),
    ],
)
def test_values_of_flags(value: Any, words: list[str]) -> None:
    assert argv({"arm": "ar", "extra": {}}, engine_args={"flag": value}) == words


def test_a_flag_of_extra_takes_the_place_of_the_same_flag_and_a_new_one_comes_last() -> None:
    extra = {
        "mem-fraction-static": 0.5,
        "speculative-draft-model-path": "/nope",
        "page-size": 1,
        "other": False,
    }
    assert argv(TREE | {"extra": extra}, engine_args={"mem-fraction-static": 0.85, "other": True}) == [
        *("--mem-fraction-static", "0.5"),
        *("--speculative-algorithm", "DDTREE", "--speculative-draft-model-path", "/nope"),
        *("--speculative-ddtree-budget", "16", "--speculative-ddtree-topk-cap", "4"),
        *("--page-size", "1"),
    ]


def test_the_command_of_the_seeds_sed_can_be_edited() -> None:
    """The seed's own sed, on the line that the unit holds."""
    import re

    line = "ExecStart=" + filters.systemd_exec(filters.sglang_argv(TREE, SETTINGS))
    edited, count = re.subn(
        "--speculative-ddtree-budget [0-9]* --speculative-ddtree-topk-cap [0-9]*",
        "--speculative-ddtree-budget 48 --speculative-ddtree-topk-cap 8",
        line,
    )
    assert count == 1
    assert edited.endswith("--speculative-ddtree-budget 48 --speculative-ddtree-topk-cap 8")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"engine_args": {"port": 1}}, "sglang_engine_args sets 'port'; set sglang_port instead"),
        (
            {"engine_args": {"device": "cpu", "attention-backend": "triton", "mem-fraction-static": 0.85}},
            "holds attention-backend triton and mem-fraction-static without max-total-tokens; expected",
        ),
        ({"engine_args": {"--tp-size": 1}}, "write it without dashes, as 'tp-size'"),
        ({"engine_args": {"tp_size": 1}}, "write it without dashes, as 'tp-size'"),
        ({"engine_args": {"list": []}}, "flag 'list' has an empty list"),
        ({"draft_model_path": ""}, "sglang_draft_model_path is empty; arm tree needs"),
        ({"port": "http"}, "sglang_port is 'http'; expected a whole number"),
        ({"block_size": 0}, "sglang_block_size is 0; expected a whole number of at least 1"),
    ],
)
def test_settings_that_make_no_command(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        argv(TREE, **settings)


# --- systemd's quoting ---
@pytest.mark.parametrize(
    ("word", "written"),
    [
        ("--flag", "--flag"),
        ("0", "0"),
        ("false", "false"),
        ("0.5", "0.5"),
        ("", '""'),
        ("a b", '"a b"'),
        ("50%", "50%%"),
        ("%h/x y", '"%%h/x y"'),
        ("$HOME", '"$$HOME"'),
        ("${A}", '"$${A}"'),
        (";", '";"'),
        ('{"a":true}', '"{\\"a\\":true}"'),
        ("it's", '"it\'s"'),
        ("back\\slash", '"back\\\\slash"'),
        ("a\tb\nc", '"a\\tb\\nc"'),
        ("\x07", '"\\x07"'),
        ("größe", '"größe"'),
        ("~", '"~"'),
    ],
)
def test_arguments_for_systemd(word: str, written: str) -> None:
    assert filters.systemd_exec(["/bin/echo", word]) == f"/bin/echo {written}"


def test_a_command_starts_with_an_absolute_path() -> None:
    with pytest.raises(ValueError, match="expected an absolute path first"):
        filters.systemd_exec(["python", "-V"])


def test_a_nul_cannot_be_carried() -> None:
    with pytest.raises(ValueError, match="NUL"):
        filters.systemd_exec(["/bin/echo", "a\0b"])


def test_an_environment_file_is_sorted_and_quoted() -> None:
    variables = {"B": 'a "b" $c `d` \\e', "A": 1, "T": True, "F": False, "N": None, "J": '{"x": 0.5}'}
    assert filters.systemd_environment(variables).splitlines() == [
        'A="1"',
        'B="a \\"b\\" \\$c \\`d\\` \\\\e"',
        'F="0"',
        'J="{\\"x\\": 0.5}"',
        'T="1"',
    ]


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"A-B": "1"}, "'A-B'; expected a name"),
        ({"A": "1\n2"}, "sglang_environment.A holds a line break"),
        ({"A": [1]}, "sglang_environment.A is"),
    ],
)
def test_environments_that_cannot_be_written(variables: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        filters.systemd_environment(variables)


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:30000"),
        ("localhost", "http://localhost:30000"),
        ("::1", "http://[::1]:30000"),
    ],
)
def test_where_the_service_answers(host: str, url: str) -> None:
    assert filters.sglang_base_url(host, "30000") == url


# --- the inventory's configuration ---
def test_text_from_the_command_line_is_cast() -> None:
    made = filters.sglang_configuration({"arm": "tree", "budget": "24", "topk": " 6 "})
    assert (made["arm"], made["budget"], made["topk"], made["label"]) == ("tree", 24, 6, "24:6")


def test_the_configuration_is_the_one_that_a_grid_makes() -> None:
    from tuning.grid import parse_grid

    made = filters.sglang_configuration({"arm": "tree", "budget": 24, "topk": 6})
    assert made == parse_grid("24:6", [])[0].model_dump(mode="json")


def test_budget_and_topk_do_not_count_without_a_tree() -> None:
    one = filters.sglang_configuration({"arm": "chain", "budget": 16, "topk": 4})
    other = filters.sglang_configuration({"arm": "chain", "budget": 8, "topk": 1})
    assert one == other
    assert one["label"] == "chain"


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"arm": "tree", "budget": "x", "topk": 4}, "sglang_budget is 'x'"),
        ({"arm": "tree", "budget": 0, "topk": 4}, "sglang_budget is 0"),
        ({"arm": "tree", "budget": 8, "topk": None}, "sglang_topk is None"),
        ({"arm": "tree", "budget": 8, "topk": True}, "sglang_topk is True"),
        ({"arm": "forest", "budget": 8, "topk": 4}, "sglang_arm is 'forest'; expected ar, chain or tree"),
    ],
)
def test_bad_configurations(variables: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        filters.sglang_configuration(variables)


# --- inventory or promotion ---
def tree(budget: int, topk: int) -> dict[str, Any]:
    made: dict[str, Any] = filters.sglang_configuration({"arm": "tree", "budget": budget, "topk": topk})
    return made


def promoted(budget: int, study: str = "s1", superseded: dict[str, Any] | None = None) -> dict[str, Any]:
    """The local fact after a promotion."""
    made = {"configuration": tree(budget, 8), "study": study, "superseded": superseded or tree(16, 4)}
    return {"service": "sglang-ddtree", "promoted": made}


def test_a_host_without_a_fact_runs_what_the_inventory_says() -> None:
    found = filters.sglang_effective_configuration(tree(16, 4), None)
    assert found == {
        "configuration": tree(16, 4),
        "source": "inventory",
        "promoted": None,
        "dropped": None,
    }


def test_a_promotion_is_made() -> None:
    found = filters.sglang_effective_configuration(
        tree(16, 4), None, {"configuration": tree(24, 8), "study": "s1"}
    )
    assert found == {
        "configuration": tree(24, 8),
        "source": "promotion",
        "promoted": promoted(24)["promoted"],
        "dropped": None,
    }


def test_a_promotion_holds_while_the_inventory_stays() -> None:
    found = filters.sglang_effective_configuration(tree(16, 4), promoted(24))
    assert found["configuration"] == tree(24, 8)
    assert found["source"] == "promotion"
    assert found["promoted"] == promoted(24)["promoted"]


def test_promoting_again_changes_nothing() -> None:
    again = {"configuration": tree(24, 8), "study": "s1"}
    first = filters.sglang_effective_configuration(tree(16, 4), promoted(24), again)
    assert first["promoted"] == promoted(24)["promoted"]


def test_a_later_promotion_takes_the_place_of_an_earlier_one() -> None:
    found = filters.sglang_effective_configuration(
        tree(16, 4), promoted(24), {"configuration": tree(48, 8), "study": "s2"}
    )
    assert found["promoted"] == promoted(48, "s2")["promoted"]


def test_a_changed_inventory_wins_and_says_so() -> None:
    found = filters.sglang_effective_configuration(tree(32, 4), promoted(24))
    assert found["configuration"] == tree(32, 4)
    assert found["source"] == "inventory"
    assert found["promoted"] is None
    assert found["dropped"] == promoted(24)["promoted"]


def test_a_promotion_is_undone_by_word() -> None:
    found = filters.sglang_effective_configuration(tree(16, 4), promoted(24), keep=False)
    assert found["configuration"] == tree(16, 4)
    assert found["promoted"] is None
    assert found["dropped"] == promoted(24)["promoted"]


def test_a_promotion_that_was_dropped_does_not_come_back() -> None:
    after = {"service": "sglang-ddtree", "promoted": None}
    assert filters.sglang_effective_configuration(tree(16, 4), after)["source"] == "inventory"


def test_the_fact_of_another_service_does_not_count() -> None:
    found = filters.sglang_effective_configuration(tree(16, 4), promoted(24), None, "other")
    assert found["source"] == "inventory"


def test_an_unreadable_fact_is_not_overruled_in_silence() -> None:
    with pytest.raises(ValueError, match=r"remove /etc/ansible/facts.d/sglang_ddtree.fact"):
        filters.sglang_effective_configuration(tree(16, 4), "error loading facts as JSON or ini")


# --- the local fact ---
def test_the_fact_keeps_its_time_while_nothing_changes() -> None:
    first = filters.sglang_fact({"hash": "a"}, None, "2026-01-01T00:00:00Z")
    assert first == {"hash": "a", "deployed_at": "2026-01-01T00:00:00Z"}
    assert filters.sglang_fact({"hash": "a"}, first, "2026-02-02T00:00:00Z") == first
    changed = filters.sglang_fact({"hash": "b"}, first, "2026-02-02T00:00:00Z")
    assert changed == {"hash": "b", "deployed_at": "2026-02-02T00:00:00Z"}


# --- releases ---
def test_old_and_half_installed_releases_go() -> None:
    folders = [f"/r/{name}" for name in "abcde"]
    markers = [
        {"path": f"/r/{name}/.complete", "mtime": time}
        for name, time in zip("abcd", (4, 3, 2, 1), strict=True)
    ]
    assert filters.sglang_prunable(folders, markers, "/r/d", "3") == ["/r/c", "/r/e"]
    assert filters.sglang_prunable(folders, markers, "/r/d", 1) == ["/r/a", "/r/b", "/r/c", "/r/e"]
    assert filters.sglang_prunable(folders, markers, "/r/a", 9) == ["/r/e"]


def test_devices_are_ranks_of_both_kinds() -> None:
    assert filters.sglang_devices({}) == 1
    assert filters.sglang_devices({"tp-size": 8}) == 8
    assert filters.sglang_devices({"tensor-parallel-size": "4", "pp-size": 2, "dp-size": 4}) == 8


def test_the_last_words_of_a_failed_command() -> None:
    hashes = f"      Expected sha256 {'a' * 64}\n      Expected     or {'b' * 64}\n"
    said = f"ERROR: MISMATCH\n\n  x==1:\n{hashes}   Got  c\n"
    assert filters.sglang_last_words({"stderr": said}) == "ERROR: MISMATCH\n    x==1:\n     Got  c"
    assert filters.sglang_last_words({"stderr": "", "stdout": "a\nb\nc"}, 2) == "b\n  c"
    assert filters.sglang_last_words({"msg": "no such file"}) == "no such file"
    assert filters.sglang_last_words({"stderr": "x" * 500}) == "x" * 399 + "…"


# --- the gate ---
def gate(names: list[str], **overrides: Any) -> list[str]:
    given: dict[str, Any] = {"roles": str(ROOT / "roles"), "hosts": ["h1"], "ansible_version": "2.19.14"}
    problems: list[str] = filters.sglang_gate(names, **(given | overrides))
    return problems


def test_the_gate_lets_known_variables_pass() -> None:
    assert gate(["sglang_budget", "sweep_tokens"]) == []


def test_the_gate_names_an_unknown_variable_and_the_closest_known_one() -> None:
    found = gate(["sglang_bugdet", "sweep_xyzzy", "sglang_port"])
    assert found[0] == "unknown variable sglang_bugdet; did you mean sglang_budget?"
    assert found[1].startswith("unknown variable sweep_xyzzy; ")
    assert "sglang_model_path" in found[2]


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("stduy", "study"),
        ("grids", "grid"),
        ("model_path", "sglang_model_path"),
        ("prompt_limit", "sweep_prompt_limit"),
        ("sweeps_tokens", "sweep_tokens"),
    ],
)
def test_the_gate_names_what_was_misspelt_on_the_command_line(name: str, meant: str) -> None:
    assert gate([], typed=[name])[0] == f"unknown variable {name}; did you mean {meant}?"


def test_the_gate_reads_what_the_command_line_gave(tmp_path: Path) -> None:
    """Through Ansible itself, as where it keeps them is Ansible's own affair."""
    (tmp_path / "hosts.yml").write_text("sglang: {hosts: {h1: {}}}\n")
    (tmp_path / "more.yml").write_text("model_path: /x\nrack: 3\n")
    said = subprocess.run(
        [
            str(Path(sys.executable).with_name("ansible-playbook")),
            *("-i", str(tmp_path / "hosts.yml"), str(ROOT / "promote.yml")),
            *("-e", "stduy=monday", "-e", f"@{tmp_path / 'more.yml'}"),
        ],
        env={**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert said.returncode != 0
    assert "unknown variable stduy; did you mean study?" in said.stdout
    assert "unknown variable model_path; did you mean sglang_model_path?" in said.stdout
    assert "rack" not in said.stdout


def test_the_gate_leaves_other_variables_of_the_command_line_alone() -> None:
    own = ["study", "grid", "ansible_user", "ansible_become", "rack", "models_root", "host", "port", "user"]
    assert gate([], typed=own) == []


@pytest.mark.parametrize(
    ("overrides", "start"),
    [
        ({"hosts": []}, "inventory: found no host in the group sglang"),
        ({"ansible_version": "2.18.5"}, "ansible-core: found 2.18.5; expected 2.19 or newer"),
        ({"python": (3, 10)}, "Python of the controller: found 3.10; expected 3.11 or newer"),
    ],
)
def test_the_gate_refuses(overrides: dict[str, Any], start: str) -> None:
    problems = gate([], **overrides)
    assert len(problems) == 1
    assert problems[0].startswith(start)


def test_the_gate_takes_newer_versions() -> None:
    assert gate([], ansible_version="2.21.0rc1", python=(3, 13)) == []


def test_the_gate_notices_a_python_without_tuning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filters.importlib.util, "find_spec", lambda name: None)
    assert f"{sys.executable} cannot import tuning" in gate([])[0]


def test_all_filters_are_offered_by_name() -> None:
    offered = filters.FilterModule().filters()
    assert all(function.__name__ == name for name, function in offered.items())
    assert "sglang_argv" in offered
    assert "systemd_exec" in offered


def test_roles_use_only_filters_that_exist() -> None:
    offered = set(filters.FilterModule().filters())
    for path in [*(ROOT / "roles").rglob("*.yml"), *Path(ROOT / "templates").glob("*.j2")]:
        for line in path.read_text().splitlines():
            for word in line.split("|")[1:]:
                name = word.strip().split("(")[0].split(" ")[0].rstrip("}")
                if name.startswith(("sglang_", "systemd_")):
                    assert name in offered, f"{path}: {name}"
