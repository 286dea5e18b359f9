#!/usr/bin/python
"""Ansible module: restart a service, whatever state a failure left it in."""

from __future__ import annotations

from ansible.module_utils.arborist_unit import Unit
from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = r"""
---
module: sglang_restart
short_description: Restart a service, whatever state a failure left it in
description:
  - Forgets earlier failures first, because systemd refuses to start a unit that failed too often a short
    while ago, also when its command has been put right since.
  - A start that systemd refuses is no failure here. It is returned, and M(sglang_ready) says why the unit
    does not run, with the journal's tail.
options:
  unit:
    description: The systemd service, with or without C(.service).
    type: str
    required: true
"""

EXAMPLES = r"""
- name: Restart the service
  sglang_restart:
    unit: sglang-ddtree
"""

RETURN = r"""
refused:
  description: What systemd said when it refused; empty when it did not.
  type: str
  returned: success
"""


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={"unit": {"type": "str", "required": True}}, supports_check_mode=True
    )
    refused = "" if module.check_mode else Unit(module.params["unit"], module.run_command).start_anew()
    module.exit_json(changed=True, refused=refused)


if __name__ == "__main__":
    main()
