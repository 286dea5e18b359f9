#!/usr/bin/python
"""Ansible module: the service's process runs exactly the command its unit says."""

from __future__ import annotations

from ansible.module_utils.arborist_sweep import SweptService
from ansible.module_utils.arborist_unit import UnitError, first_difference
from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = r"""
---
module: sglang_verify
short_description: Check that a service's process runs the command its unit says
description:
  - Compares C(/proc/PID/cmdline) of the unit's main process with the unit's ExecStart as systemd loaded it.
  - Fails, naming the first difference, when they differ or when a sweep's drop-in is in place.
  - Changes nothing.
options:
  unit:
    description: The systemd service, with or without C(.service).
    type: str
    required: true
  command:
    description: What the command must be. Empty means whatever the unit says.
    type: list
    elements: str
    default: []
"""

EXAMPLES = r"""
- name: Check that the baseline is back
  sglang_verify:
    unit: sglang-ddtree
"""

RETURN = r"""
command:
  description: What the process runs.
  type: list
  elements: str
  returned: success
lines:
  description: The same for a person.
  type: list
  elements: str
  returned: success
main_pid:
  description: The unit's main process.
  type: int
  returned: success
"""


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "unit": {"type": "str", "required": True},
            "command": {"type": "list", "elements": "str", "default": []},
        },
        supports_check_mode=True,
    )
    swept = SweptService(module.params["unit"], module.run_command)
    unit = swept.unit
    if swept.dropin.exists():
        module.fail_json(msg=f"a sweep's drop-in is in place, {swept.dropin}; expected none: run restore.yml")
    try:
        if swept.dropin_loaded():
            module.fail_json(
                msg=f"systemd still goes by a sweep's drop-in that is gone, {swept.dropin}: run restore.yml"
            )
        difference = unit.mismatch()
        running = unit.process()
    except UnitError as error:
        module.fail_json(msg=str(error))
    if difference or running is None:
        module.fail_json(msg=f"{unit.name} does not run its unit's command: {difference or 'it just ended'}")
    pid, command = running
    wanted = module.params["command"]
    if wanted and command != wanted:
        module.fail_json(msg=f"{unit.name} runs another command: {first_difference(wanted, command)}")
    module.exit_json(
        changed=False,
        main_pid=pid,
        command=command,
        lines=[f"process {pid} of {unit.name} runs the deployed command"],
    )


if __name__ == "__main__":
    main()
