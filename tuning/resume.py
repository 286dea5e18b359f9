"""Going on with a study: which finished rows still stand, and which are to be measured again.

A row stands when it is ``ok`` and all that reaches the engine is what it was: the command, the release and
its versions, the service's environment. The workload is the study's and is compared before
(:func:`same_workload`). A model that was changed in place, under the same path, is not noticed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pydantic import JsonValue

from tuning.models import TrialFact

#: What of a fact's ``engine`` must be unchanged for its row to stand.
ENGINE_KEYS = ("release", "versions", "environment_sha256")


@dataclass(frozen=True)
class Standing:
    """What a study already holds for one host."""

    kept: list[TrialFact]
    """Rows that stand, one a configuration, in the order written."""
    superseded: dict[str, list[str]]
    """Configuration id -> all its trials so far, which a new measurement replaces."""


def current(facts: Sequence[TrialFact]) -> list[TrialFact]:
    """The facts that no later fact of their host replaces, in the order given."""
    replaced = {(fact.host, trial) for fact in facts for trial in fact.supersedes}
    return [fact for fact in facts if (fact.host, fact.trial) not in replaced]


def standing(
    facts: Sequence[TrialFact],
    host: str,
    commands: Mapping[str, Sequence[str]],
    engine: Mapping[str, JsonValue],
) -> Standing:
    """Sort a host's rows into those that stand and those to measure again.

    Args:
        facts: of the study, all hosts.
        host: the host that is swept.
        commands: configuration id -> the command it would be started with now.
        engine: what is deployed now, as it would go into a fact.
    """
    kept: dict[str, TrialFact] = {}
    superseded: dict[str, list[str]] = {}
    now = current(facts)
    for fact in facts:
        key = fact.configuration.id
        if fact.host != host or key not in commands:
            continue
        unchanged = all(
            name in engine and fact.engine.get(name) == engine.get(name) for name in ENGINE_KEYS
        ) and fact.command == list(commands[key])
        if fact.status == "ok" and unchanged and fact in now:
            kept[key] = fact
        else:
            superseded.setdefault(key, []).append(fact.trial)
    return Standing(list(kept.values()), {k: v for k, v in superseded.items() if k not in kept})


def same_workload(meta: Mapping[str, JsonValue], workload: Mapping[str, JsonValue]) -> list[str]:
    """Where a study's workload (``study.json``) differs from the one planned: ``name: found, expected``."""
    had = meta.get("workload")
    if not isinstance(had, dict):
        return ["workload: the study's study.json has none"]
    return [
        f"{name}: the study has {_short(had.get(name))}, this sweep {_short(workload.get(name))}"
        for name in sorted(set(had) | set(workload))
        if had.get(name) != workload.get(name)
    ]


def _short(value: JsonValue) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
