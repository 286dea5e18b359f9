#!/usr/bin/python
"""Ansible module: which rows of a study still stand on a host, and which are to be measured again."""

from __future__ import annotations

from pathlib import Path

from ansible.module_utils.arborist_tuning import need_tuning
from ansible.module_utils.basic import AnsibleModule

try:
    from tuning.resume import standing
    from tuning.store import StoreError, Study

    TUNING_ERROR: str | None = None
except ImportError as error:
    TUNING_ERROR = str(error)

DOCUMENTATION = r"""
---
module: sweep_standing
short_description: Find the rows of a study that still stand on a host
description:
  - Runs on the controller. A face over C(tuning.resume). A row stands when it is C(ok) and its command, the
    engine's release and versions, and the service's environment are what they were.
  - Changes nothing. A study that does not exist yet has no rows.
options:
  plan:
    description: RV(sweep_plan#record).
    type: dict
    required: true
  host:
    description: The host that is swept.
    type: str
    required: true
  commands:
    description: The command of each configuration, by the configuration's id.
    type: dict
    required: true
  engine:
    description: Versions and hashes of what is deployed.
    type: dict
    required: true
"""

EXAMPLES = r"""
- name: Look for rows that still stand
  sweep_standing:
    plan: "{{ plan.record }}"
    host: "{{ inventory_hostname }}"
    commands: {a1b2c3d4e5f6: [python, -m, sglang.launch_server]}
    engine: "{{ ansible_facts.ansible_local.sglang_ddtree }}"
  delegate_to: localhost
"""

RETURN = r"""
kept:
  description: Ids of the configurations whose rows stand.
  type: list
  elements: str
  returned: success
superseded:
  description: Trials that a new measurement replaces, by the configuration's id.
  type: dict
  returned: success
lines:
  description: What is kept, for a person.
  type: list
  elements: str
  returned: success
"""


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "plan": {"type": "dict", "required": True},
            "host": {"type": "str", "required": True},
            "commands": {"type": "dict", "required": True},
            "engine": {"type": "dict", "required": True},
        },
        supports_check_mode=True,
    )
    need_tuning(module, TUNING_ERROR)
    params = module.params
    study = Study(Path(params["plan"]["study_dir"]))
    try:
        found = standing(study.facts(), params["host"], params["commands"], params["engine"])
    except (StoreError, OSError) as error:
        module.fail_json(msg=f"the rows of {study.path} can't be read: {error}")
    lines = []
    if found.kept:
        first, last = found.kept[0].finished_at, found.kept[-1].finished_at
        labels = "  ".join(fact.configuration.label for fact in found.kept)
        lines = [
            f"{params['host']}: kept {len(found.kept)} of {len(params['commands'])} rows, measured {first} "
            f"to {last} with the same engine, environment, commands and prompts: {labels}"
        ]
    module.exit_json(
        changed=False,
        kept=[fact.configuration.id for fact in found.kept],
        superseded=found.superseded,
        lines=lines,
    )


if __name__ == "__main__":
    main()
