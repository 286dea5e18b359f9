#!/usr/bin/python
"""Ansible module: the configuration that a study says is best."""

from __future__ import annotations

from pathlib import Path

from ansible.module_utils.arborist_tuning import need_tuning
from ansible.module_utils.basic import AnsibleModule

try:
    from tuning import report
    from tuning.resume import current
    from tuning.store import LATEST, StoreError, open_study

    TUNING_ERROR: str | None = None
except ImportError as error:
    TUNING_ERROR = str(error)

DOCUMENTATION = r"""
---
module: sweep_best
short_description: The configuration that a study says is best
description:
  - Runs on the controller and changes nothing. A face over C(tuning.report.best).
  - Fails when there is no such study, when no row of it is C(ok) on every host that tried it, or when it
    lacks rows that its sweep set out to measure.
options:
  results_dir:
    description: The folder of studies.
    type: path
    required: true
  study:
    description: The study's name, or C(latest).
    type: str
    default: latest
  unfinished:
    description: Take a study with missing rows as it is.
    type: bool
    default: false
  hosts:
    description: The hosts that the row is for; where the study has no row of one, a line says so.
    type: list
    elements: str
    default: []
"""

EXAMPLES = r"""
- name: Choose the best row
  sweep_best:
    results_dir: results
  delegate_to: localhost
"""

RETURN = r"""
study:
  description: The study's own name.
  type: str
  returned: success
configuration:
  description: The winner.
  type: dict
  returned: success
tok_s:
  description: Its tokens a second at the lowest level measured.
  type: float
  returned: success
times_ar:
  description: Its speed-up over the autoregressive arm; null where that was not measured.
  type: float
  returned: success
reason:
  description: All that for a person.
  type: str
  returned: success
host:
  description: The host that figure is from.
  type: str
  returned: success
lines:
  description: What is doubtful in the study, or could not be read.
  type: list
  elements: str
  returned: success
"""


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "results_dir": {"type": "path", "required": True},
            "study": {"type": "str", "default": "latest"},
            "unfinished": {"type": "bool", "default": False},
            "hosts": {"type": "list", "elements": "str", "default": []},
        },
        supports_check_mode=True,
    )
    need_tuning(module, TUNING_ERROR)
    try:
        study = open_study(Path(module.params["results_dir"]), module.params["study"] or LATEST)
        contents = study.read()
        facts = contents.facts
        missing = report.unmeasured(study.meta(), facts)
    except (StoreError, OSError) as error:
        module.fail_json(msg=f"nothing to promote: {error}")
    winner = report.best(facts)
    if winner is None:
        states = ", ".join(f"{f.configuration.label} on {f.host}: {f.status}" for f in facts) or "no row"
        module.fail_json(
            msg=f"nothing to promote: study {study.name} in {module.params['results_dir']} has no "
            f"configuration that is ok on every host that tried it (found: {states}); sweep again, or name "
            "another study with -e study=NAME"
        )
        return
    if missing and not module.params["unfinished"]:
        module.fail_json(
            msg=f"nothing to promote: study {study.name} is not finished, it has no row of "
            f"{', '.join(missing)}: go on with it (its sweep again, with -e sweep_study={study.name} "
            "-e sweep_resume=true), or take it as it is with -e sweep_promote_unfinished=true"
        )
        return
    doubts = [*report.doubts(facts), *contents.problems]
    if missing:
        doubts.append(f"not measured: {', '.join(missing)}")
    measured = sorted({fact.host for fact in facts})
    if others := [host for host in module.params["hosts"] if host not in measured]:
        doubts.append(f"measured on {', '.join(measured)}, not on {', '.join(others)}")
    row = next(r for f, r in zip(current(facts), report.rows(facts), strict=True) if f is winner)
    against = f", {row.times_ar:.2f} x AR" if row.times_ar is not None else ""
    module.exit_json(
        changed=False,
        lines=[f"study {study.name}: {line}" for line in doubts],
        reason=f"{row.tok_s:.1f} tok/s{against} on {winner.host}, study {study.name}",
        study=study.name,
        configuration=winner.configuration.model_dump(mode="json"),
        tok_s=row.tok_s,
        times_ar=row.times_ar,
        host=winner.host,
    )


if __name__ == "__main__":
    main()
