#!/usr/bin/python
"""Ansible module: write one finished trial into the study, for good."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ansible.module_utils.arborist_tuning import need_tuning
from ansible.module_utils.basic import AnsibleModule

try:
    from pydantic import ValidationError

    from tuning import report
    from tuning.models import Failure, TrialFact
    from tuning.resume import current
    from tuning.store import StoreError, Study

    TUNING_ERROR: str | None = None
except ImportError as error:
    TUNING_ERROR = str(error)

DOCUMENTATION = r"""
---
module: sweep_record
short_description: Write one finished trial into the study
description:
  - Runs on the controller. A face over C(tuning.store), which returns once the fact is on disk.
  - With O(measurement) the row is C(ok); with O(failed), the result of the module that failed, it is
    C(failed), with the reason that module gave.
  - The first trial makes the study's folder and points C(latest) at it.
options:
  plan:
    description: RV(sweep_plan#record).
    type: dict
    required: true
  host:
    description: The measured host's name.
    type: str
    required: true
  position:
    description: The row's place in the plan, from 1.
    type: int
    required: true
  configuration:
    description: What was tried.
    type: dict
    required: true
  command:
    description: The command the unit was given.
    type: list
    elements: str
    default: []
  engine:
    description: Versions and hashes of what is deployed.
    type: dict
    default: {}
  applied:
    description: The result of M(sweep_service) with C(state=applied).
    type: dict
    default: {}
  ready:
    description: The result of M(sglang_ready).
    type: dict
    default: {}
  measurement:
    description: What M(sglang_measure) measured.
    type: dict
  failed:
    description: The result of the module that failed.
    type: dict
  supersedes:
    description: Trials of this host that this one replaces; from M(sweep_standing).
    type: list
    elements: str
    default: []
"""

EXAMPLES = r"""
- name: Record the row
  sweep_record:
    plan: "{{ plan.record }}"
    host: "{{ inventory_hostname }}"
    position: 1
    configuration: "{{ configuration }}"
    applied: "{{ applied }}"
    ready: "{{ ready }}"
    measurement: "{{ measured.measurement }}"
  delegate_to: localhost
"""

RETURN = r"""
path:
  description: The fact's file.
  type: str
  returned: success
status:
  description: The row's status.
  type: str
  returned: success
lines:
  description: The row for a person.
  type: list
  elements: str
  returned: success
"""


def reason(failed: dict[str, Any]) -> Failure:
    """The classified failure of a module's result, or what can be said without a class."""
    if failed.get("failure"):
        return Failure.model_validate(failed["failure"])
    said = str(failed.get("msg") or "no message").strip().splitlines()
    tail = str(failed.get("module_stderr") or failed.get("exception") or "").strip().splitlines()
    return Failure(
        kind="crashed",
        summary=f"the trial's module failed: {said[-1][:300]}",
        hint="run the sweep again with -vvv to see the whole message",
        journal_tail=[line[:400] for line in tail[-10:]],
    )


def fact(params: dict[str, Any], now: str) -> TrialFact:
    """The trial's fact. A ready result of another invocation (of an earlier row) does not count."""
    plan, applied, failed = params["plan"], params["applied"], params["failed"]
    configuration = params["configuration"]
    invocation = applied.get("invocation_id") or None
    ready = params["ready"] if params["ready"].get("invocation_id") == invocation else {}
    phases = (failed or {}).get("phases") or ready.get("phases")
    again = f"-{len(params['supersedes']) + 1}" if params["supersedes"] else ""
    return TrialFact.model_validate(
        {
            "study": plan["study"],
            "trial": f"{params['position']:02d}-{configuration['id']}{again}",
            "host": params["host"],
            "started_at": applied.get("started_at") or now,
            "finished_at": now,
            "configuration": configuration,
            "engine": params["engine"],
            "command": params["command"],
            "status": "ok" if failed is None else "failed",
            "failure": None if failed is None else reason(failed).model_dump(),
            "invocation_id": invocation,
            "phases": phases,
            "measurement": params["measurement"],
            "supersedes": params["supersedes"],
        }
    )


def row_lines(row: report.Row, position: int, plan: dict[str, Any], path: Path, hint: str) -> list[str]:
    """One finished row for a person; a failed one with what to do and where the journal's tail is."""
    labels = plan["labels"]
    width = min(max(map(len, labels)), 40)
    many_hosts = len(plan["meta"]["hosts"]) > 1
    parts = [f"[{position}/{len(labels)}]", *([row.host] if many_hosts else []), f"{row.label:<{width}}"]
    if row.tok_s is None:
        parts.append(f"{row.status}  {row.note}")
    else:
        parts.append(f"{row.status:<6}  {row.tok_s:7.1f} tok/s")
        if row.accept_length is not None:
            parts.append(f"accept {row.accept_length:.2f}")
        if row.times_ar is not None:
            parts.append(f"{row.times_ar:.2f} x AR")
        if row.same_as_ar is not None:
            parts.append("same as AR {}/{}".format(*row.same_as_ar))
        if row.boot_s is not None:
            parts.append(f"boot {row.boot_s:.1f} s")
        if row.note:
            parts.append(row.note)
    lines = ["  ".join(parts)]
    if row.status == report.DIFFERS:
        lines.append("    its greedy output is not the autoregressive arm's: this row can't be the best")
    if row.status == "failed":
        lines += [f"    what to do: {hint}"] if hint else []
        lines.append(f"    journal's tail: {path}")
    return lines


def report_row(study: Study, made: TrialFact) -> report.Row:
    """The row of ``made`` as the report shows it."""
    facts = current(study.facts())
    index = next(i for i, f in enumerate(facts) if (f.host, f.trial) == (made.host, made.trial))
    return report.rows(facts)[index]


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "plan": {"type": "dict", "required": True},
            "host": {"type": "str", "required": True},
            "position": {"type": "int", "required": True},
            "configuration": {"type": "dict", "required": True},
            "command": {"type": "list", "elements": "str", "default": []},
            "engine": {"type": "dict", "default": {}},
            "applied": {"type": "dict", "default": {}},
            "ready": {"type": "dict", "default": {}},
            "measurement": {"type": "dict"},
            "failed": {"type": "dict"},
            "supersedes": {"type": "list", "elements": "str", "default": []},
        },
        required_one_of=[("measurement", "failed")],
        mutually_exclusive=[("measurement", "failed")],
        supports_check_mode=False,
    )
    need_tuning(module, TUNING_ERROR)
    params = module.params
    plan = params["plan"]
    try:
        made = fact(params, datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"))
        study = Study(Path(plan["study_dir"])).create()
        if not study.meta():
            study.write_meta(plan["meta"])
        study.link_latest()
        path = study.append(made)
        row = report_row(study, made)
    except (StoreError, OSError, ValidationError) as error:
        module.fail_json(
            msg=f"the row of {params['configuration'].get('label')} is not on disk: {error}", abort=True
        )
    hint = made.failure.hint if made.failure is not None else ""
    lines = row_lines(row, params["position"], plan, path, hint)
    module.exit_json(changed=True, path=str(path), status=made.status, lines=lines)


if __name__ == "__main__":
    main()
