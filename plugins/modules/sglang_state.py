#!/usr/bin/python
"""Ansible module: what a service's process runs now, compared with what it should."""

from __future__ import annotations

from typing import Any

from ansible.module_utils.arborist_unit import Unit, UnitError, first_difference
from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = r"""
---
module: sglang_state
short_description: Look at a service's process
description:
  - Says whether the unit's main process runs the given command, and whether systemd has read the unit's file
    as it is now. Changes nothing and does not fail when it does not.
options:
  unit:
    description: The systemd service, with or without C(.service).
    type: str
    required: true
  command:
    description: The command that the process should run.
    type: list
    elements: str
    required: true
"""

EXAMPLES = r"""
- name: Look at the service
  sglang_state:
    unit: sglang-ddtree
    command: [/usr/bin/sleep, "60"]
"""

RETURN = r"""
active_state:
  description: systemd's word, such as C(active) or C(failed).
  type: str
  returned: success
need_reload:
  description: Whether systemd has not read the unit's file as it is now.
  type: bool
  returned: success
difference:
  description: How the process differs from the command, in words; empty when it does not.
  type: str
  returned: success
"""


def look(unit: Unit, command: list[str]) -> dict[str, Any]:
    """What the unit's process runs, compared with ``command``."""
    state = unit.show("ActiveState", "NeedDaemonReload")
    running = unit.process()
    if running is None:
        difference = f"no main process ({state['ActiveState']})"
    else:
        difference = first_difference(command, running[1])
    return {
        "active_state": state["ActiveState"],
        "need_reload": state["NeedDaemonReload"] == "yes",
        "difference": difference,
    }


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "unit": {"type": "str", "required": True},
            "command": {"type": "list", "elements": "str", "required": True},
        },
        supports_check_mode=True,
    )
    try:
        found = look(Unit(module.params["unit"], module.run_command), module.params["command"])
    except UnitError as error:
        module.fail_json(msg=str(error))
    module.exit_json(changed=False, **found)


if __name__ == "__main__":
    main()
