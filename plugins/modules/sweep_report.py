#!/usr/bin/python
"""Ansible module: write a study's report and show its table."""

from __future__ import annotations

import io
from pathlib import Path

from ansible.module_utils.arborist_tuning import need_tuning
from ansible.module_utils.basic import AnsibleModule

try:
    from rich.console import Console

    from tuning import report
    from tuning.store import StoreError, Study

    TUNING_ERROR: str | None = None
except ImportError as error:
    TUNING_ERROR = str(error)

DOCUMENTATION = r"""
---
module: sweep_report
short_description: Write a study's report and show its table
description:
  - Runs on the controller. A face over C(tuning.report).
options:
  study_dir:
    description: The study's folder.
    type: path
    required: true
  width:
    description: Columns of the table at most.
    type: int
    default: 110
"""

EXAMPLES = r"""
- name: Write the report
  sweep_report:
    study_dir: results/latest
  delegate_to: localhost
"""

RETURN = r"""
lines:
  description: The table, and where the report lies.
  type: list
  elements: str
  returned: success
paths:
  description: The written files.
  type: list
  elements: str
  returned: success
ok_rows:
  description: How many C(ok) rows each host has.
  type: dict
  returned: success
"""


def table_lines(study: Study, width: int) -> list[str]:
    """The study's table as plain text, wider than ``width`` where figures would be cut."""
    text, made = io.StringIO(), report.table(study)
    Console(file=text, width=max(width, report.least_width(made)), color_system=None).print(made)
    return [line.rstrip() for line in text.getvalue().rstrip("\n").split("\n")]


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "study_dir": {"type": "path", "required": True},
            "width": {"type": "int", "default": 110},
        },
        supports_check_mode=False,
    )
    need_tuning(module, TUNING_ERROR)
    study = Study(Path(module.params["study_dir"]))
    try:
        facts = study.facts()
        if not facts:
            module.exit_json(changed=False, lines=["No row was finished."], paths=[], ok_rows={})
        # Also for a study that was gone on with and whose rows were all kept.
        study.link_latest()
        paths = [str(path) for path in report.write(study)]
        lines = [*table_lines(study, module.params["width"]), "", f"Report: {paths[0]}"]
    except (StoreError, OSError) as error:
        module.fail_json(msg=f"the report of {study.path} could not be written: {error}")
    ok_rows: dict[str, int] = {fact.host: 0 for fact in facts}
    for fact in facts:
        ok_rows[fact.host] += fact.status == "ok"
    module.exit_json(changed=True, lines=lines, paths=paths, ok_rows=ok_rows)


if __name__ == "__main__":
    main()
