"""Every role's argument specs say exactly what its defaults are, and roles agree with each other."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
ROLES = sorted(path.name for path in (ROOT / "roles").iterdir() if path.is_dir())
MISSING = object()


def load(role: str, name: str) -> dict[str, Any]:
    """A YAML file of the role; empty where there is none."""
    path = ROOT / "roles" / role / name
    return (yaml.safe_load(path.read_text()) or {}) if path.exists() else {}


def entries(role: str) -> dict[str, dict[str, dict[str, Any]]]:
    """The options of each entry point."""
    specs = load(role, "meta/argument_specs.yml")["argument_specs"]
    return {entry: spec.get("options", {}) for entry, spec in specs.items()}


def test_the_roles_are_found() -> None:
    assert {"sglang_preflight", "sglang_engine", "sglang_service"} <= set(ROLES)


@pytest.mark.parametrize("role", ROLES)
def test_specs_and_defaults_name_the_same_variables_with_the_same_values(role: str) -> None:
    defaults = load(role, "defaults/main.yml")
    specified: dict[str, Any] = {}
    for options in entries(role).values():
        for name, option in options.items():
            if not option.get("required", False):
                value = option.get("default", MISSING)
                assert value is not MISSING, f"{name} is neither required nor has a default"
                assert specified.setdefault(name, value) == value, f"{name} differs between entry points"
    assert specified == defaults


@pytest.mark.parametrize("role", ROLES)
def test_a_required_variable_has_no_default(role: str) -> None:
    required = {
        name
        for options in entries(role).values()
        for name, option in options.items()
        if option.get("required")
    }
    assert not required & set(load(role, "defaults/main.yml"))


@pytest.mark.parametrize("role", ROLES)
def test_every_task_file_that_is_an_entry_point_exists(role: str) -> None:
    for entry in entries(role):
        assert (ROOT / "roles" / role / "tasks" / f"{entry}.yml").is_file()


@pytest.mark.parametrize("role", ROLES)
def test_public_variables_are_named_by_the_house_rule(role: str) -> None:
    allowed = ("sglang_", "sweep_")
    for options in entries(role).values():
        for name in options:
            assert name.startswith(allowed) or name in ("grid", "study")


@pytest.mark.parametrize("role", ROLES)
def test_internal_variables_are_marked(role: str) -> None:
    assert all(name.startswith("__") for name in load(role, "vars/main.yml"))


def test_a_variable_means_the_same_in_every_role() -> None:
    uses: dict[str, list[tuple[str, dict[str, Any]]]] = defaultdict(list)
    for role in ROLES:
        for options in entries(role).values():
            for name, option in options.items():
                uses[name].append((role, option))
    for name, found in uses.items():
        first_role, first = found[0]
        for role, option in found[1:]:
            for key in ("type", "default", "choices", "required", "elements"):
                assert option.get(key, MISSING) == first.get(key, MISSING), (
                    f"{name}: {role}, {first_role}: {key}"
                )
