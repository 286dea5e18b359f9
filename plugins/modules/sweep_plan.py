#!/usr/bin/python
"""Ansible module: read and check everything a sweep is told, before it touches anything."""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ansible.module_utils.arborist_controller import describe, token
from ansible.module_utils.arborist_tuning import need_tuning
from ansible.module_utils.basic import AnsibleModule

try:
    from pydantic import TypeAdapter, ValidationError

    from tuning import __version__
    from tuning.grid import GridError, parse_grid, to_json
    from tuning.models import FileName
    from tuning.prompts import Prompt, PromptError, load_prompts
    from tuning.resume import same_workload
    from tuning.store import LATEST, StoreError, Study, open_study

    _STUDY: TypeAdapter[str] = TypeAdapter(FileName)
    TUNING_ERROR: str | None = None
except ImportError as error:
    TUNING_ERROR = str(error)

DOCUMENTATION = r"""
---
module: sweep_plan
short_description: Read and check everything a sweep is told
description:
  - Runs on the controller, before any host is contacted. Expands the grid through C(tuning.grid), checks
    every value that a sweep takes, and names the study.
  - Numbers may come as text, as C(-e sweep_tokens=64) hands them over. All complaints come at once.
  - Writes nothing.
options:
  grid:
    description: The grid in any of its spellings.
    type: raw
    required: true
  arms:
    description: Baseline arms to add to the grid.
    type: raw
    default: [ar, chain]
  base:
    description: The folder that a relative grid or prompts path starts from.
    type: path
    required: true
  study:
    description: The study's name. Empty means the time, in UTC.
    type: str
    default: ""
  resume:
    description: >-
      Go on with a study that has rows already, if its workload is the one planned. Without it such a study
      is refused.
    type: bool
    default: false
  results_dir:
    description: The folder of studies.
    type: path
    required: true
  hosts:
    description: The hosts to sweep.
    type: list
    elements: str
    required: true
  levels:
    description: Concurrencies to measure at.
    type: raw
    default: [1]
  tokens:
    description: Tokens to generate a prompt.
    type: raw
    default: 128
  prompts:
    description: A prompts file. Empty means the packaged prompts.
    type: str
    default: ""
  prompt_limit:
    description: How many prompts to take; 0 means all.
    type: raw
    default: 0
  ready_timeout:
    description: Seconds a configuration may take until it generates.
    type: raw
    default: 900
  stop_timeout:
    description: Seconds the service may take to stop.
    type: int
    default: 120
  lease_seconds:
    description: Seconds after which a host restores itself if the controller is gone.
    type: raw
    default: 1800
"""

EXAMPLES = r"""
- name: Read and check the grid
  sweep_plan:
    grid: "8:4, 16:4"
    base: "{{ playbook_dir }}"
    results_dir: results
    hosts: "{{ ansible_play_hosts }}"
  delegate_to: localhost
"""

RETURN = r"""
study:
  description: The study's name.
  type: str
  returned: success
token:
  description: Names this controller process, for M(sweep_service).
  type: str
  returned: success
controller:
  description: This controller, for a person.
  type: str
  returned: success
configurations:
  description: What will be tried, in order.
  type: list
  elements: dict
  returned: success
workload:
  description: What will be asked; passed on to M(sglang_measure).
  type: dict
  returned: success
ready_timeout:
  description: As a number.
  type: int
  returned: success
lease_seconds:
  description: As a number.
  type: int
  returned: success
record:
  description: >-
    What M(sweep_record) needs of the plan, C(study), C(study_dir), C(labels), and C(meta), which becomes
    C(study.json). The study's folder is made with the first trial.
  type: dict
  returned: success
lines:
  description: The plan for a person.
  type: list
  elements: str
  returned: success
"""

# A lease must outlast a stop and a start that take their whole time, with room to measure.
_ROOM_S = 15


class Problems(list[str]):
    """Complaints about values, collected so that all come at once."""

    def whole(self, name: str, value: object, least: int) -> int:
        """``value`` as a whole number of at least ``least``; a complaint and ``least`` otherwise."""
        try:
            number = int(value) if isinstance(value, str) else value
        except ValueError:
            number = None
        if isinstance(number, bool) or not isinstance(number, int) or number < least:
            self.append(f"{name} is {value!r}; expected a whole number of at least {least}")
            return least
        return number

    def levels(self, name: str, value: object) -> list[int]:
        """Concurrencies: a list, one number, or text such as ``1,4``."""
        if isinstance(value, str):
            items: Sequence[object] = [part for part in value.replace(",", " ").split() if part.strip("[]")]
            items = [str(item).strip("[]") for item in items]
        else:
            items = value if isinstance(value, list) else [value]
        if not items:
            self.append(f"{name} is empty; expected concurrencies such as [1, 4]")
        found = [self.whole(name, item, 1) for item in items]
        return sorted(set(found))


def seconds_a_row(results_dir: Path) -> tuple[float, str] | None:
    """Median seconds of a measured trial in the newest study, and that study's name; None without one."""
    try:
        study = open_study(results_dir)
        facts = [fact for fact in study.facts() if fact.status == "ok"]
    except (StoreError, OSError):
        return None
    if not facts:
        return None
    spans = [
        (datetime.fromisoformat(f.finished_at) - datetime.fromisoformat(f.started_at)).total_seconds()
        for f in facts
    ]
    return statistics.median(spans), study.name


def plan_lines(
    study: str,
    labels: Sequence[str],
    hosts: Sequence[str],
    estimate: tuple[float, str] | None,
    limit_s: int,
    resume: bool = False,
) -> list[str]:
    """The plan for a person: the rows, and how long they will take."""
    rows = f"{len(labels)} row{'s' if len(labels) != 1 else ''}"
    where = f"{len(hosts)} host{'s' if len(hosts) != 1 else ''} ({', '.join(hosts)})"
    lines = [f"Study {study}: {rows} on {where}", "  " + "  ".join(labels)]
    if estimate is None:
        lines.append(
            "Estimated time: unknown, there is no earlier study to go by "
            f"(a start may take at most {limit_s} s, sweep_ready_timeout)"
        )
    else:
        minutes = math.ceil(len(labels) * estimate[0] / 30) / 2
        lines.append(
            f"Estimated time: about {minutes:g} min ({estimate[0]:.0f} s a row in study {estimate[1]})"
            + (", less the rows that are kept" if resume else "")
        )
    return lines


def plan(params: dict[str, Any], now: datetime) -> tuple[dict[str, Any], list[str]]:
    """The plan and the complaints; the plan counts only when there are none."""
    problems = Problems()
    base = Path(params["base"])
    configurations = []
    try:
        configurations = parse_grid(params["grid"], params["arms"], base=base)
    except GridError as error:
        problems.append(str(error))
    levels = problems.levels("sweep_levels", params["levels"])
    max_tokens = problems.whole("sweep_tokens", params["tokens"], 2)
    limit = problems.whole("sweep_prompt_limit", params["prompt_limit"], 0)
    prompts: list[Prompt] = []
    try:
        path = base / Path(params["prompts"]).expanduser() if params["prompts"] else None
        prompts = load_prompts(path, limit)
    except PromptError as error:
        problems.append(str(error))
    workload = {"levels": levels, "max_tokens": max_tokens}
    ready_timeout = problems.whole("sweep_ready_timeout", params["ready_timeout"], 1)
    lease_seconds = problems.whole("sweep_lease_seconds", params["lease_seconds"], 1)
    least = ready_timeout + params["stop_timeout"] + _ROOM_S
    if lease_seconds < least:
        problems.append(
            f"sweep_lease_seconds is {lease_seconds}; expected at least sweep_ready_timeout + "
            f"sglang_stop_timeout + {_ROOM_S} = {least}, or a slow restart would be cut off by the lease"
        )
    asked: dict[str, Any] = {
        **workload,
        "prompts": [prompt.id for prompt in prompts],
        "prompts_sha256": hashlib.sha256(
            json.dumps([prompt.model_dump(mode="json") for prompt in prompts]).encode()
        ).hexdigest(),
    }
    if params["resume"] and not params["study"]:
        problems.append(
            "sweep_resume is set and sweep_study is not; expected the name of the study to go on with"
        )
    name = params["study"] or now.strftime("%Y%m%dT%H%M%SZ")
    study = Study(Path(params["results_dir"]) / name)
    there: set[str] = set()
    try:
        _STUDY.validate_python(name)
        if name == LATEST:
            problems.append(
                f"sweep_study is {LATEST!r}; that name is the link to the newest study, choose another"
            )
        there = {fact.host for fact in study.facts()} & set(params["hosts"])
        if there and not params["resume"]:
            problems.append(
                f"sweep_study is {name!r}, which already has rows of {', '.join(sorted(there))}; "
                "choose another name, or set sweep_resume to keep the rows that still stand"
            )
        elif there and (differences := same_workload(study.meta(), asked)):
            problems.append(
                f"sweep_study {name!r} was measured with another workload, so its rows can't be kept "
                f"({'; '.join(differences)}); choose another name"
            )
    except ValidationError as error:
        problems.append(f"sweep_study: {error.errors()[0]['msg'].removeprefix('Value error, ')}")
    except (StoreError, OSError) as error:
        problems.append(f"sweep_study: {error}")
    if not params["hosts"]:
        problems.append("no host to sweep; check the inventory and --limit")
    labels = [configuration.label for configuration in configurations]
    rows = to_json(configurations)
    controller = describe()
    lines = plan_lines(
        name,
        labels,
        params["hosts"],
        seconds_a_row(Path(params["results_dir"])),
        ready_timeout,
        resume=bool(there),
    )
    if params["resume"] and not there:
        lines.insert(1, f"  a new study: {name!r} has no rows of these hosts to go on with")
    return {
        "study": name,
        "token": token(),
        "controller": controller,
        "configurations": rows,
        "workload": {**workload, "prompts": [prompt.model_dump(mode="json") for prompt in prompts]},
        "ready_timeout": ready_timeout,
        "lease_seconds": lease_seconds,
        "record": {
            "study": name,
            "study_dir": str(study.path),
            "labels": labels,
            "meta": {
                "study": name,
                "planned_at": now.isoformat(timespec="seconds").replace("+00:00", "Z"),
                "controller": controller,
                "arborist": __version__,
                "hosts": params["hosts"],
                "grid": params["grid"],
                "configurations": rows,
                "workload": asked,
            },
        },
        "lines": lines,
    }, problems


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "grid": {"type": "raw", "required": True},
            "arms": {"type": "raw", "default": ["ar", "chain"]},
            "base": {"type": "path", "required": True},
            "study": {"type": "str", "default": ""},
            "resume": {"type": "bool", "default": False},
            "results_dir": {"type": "path", "required": True},
            "hosts": {"type": "list", "elements": "str", "required": True},
            "levels": {"type": "raw", "default": [1]},
            "tokens": {"type": "raw", "default": 128},
            "prompts": {"type": "str", "default": ""},
            "prompt_limit": {"type": "raw", "default": 0},
            "ready_timeout": {"type": "raw", "default": 900},
            "stop_timeout": {"type": "int", "default": 120},
            "lease_seconds": {"type": "raw", "default": 1800},
        },
        supports_check_mode=True,
    )
    need_tuning(module, TUNING_ERROR)
    made, problems = plan(module.params, datetime.now(UTC))
    if problems:
        module.fail_json(msg="\n".join(problems), problems=list(problems))
    module.exit_json(changed=False, **made)


if __name__ == "__main__":
    main()
