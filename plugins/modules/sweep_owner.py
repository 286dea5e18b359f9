#!/usr/bin/python
"""Ansible module: is the controller that holds a service still there? Runs on the controller."""

from __future__ import annotations

from ansible.module_utils.arborist_controller import gone
from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = r"""
---
module: sweep_owner
short_description: Check that the controller which holds a service is gone
description:
  - Runs on the controller. Succeeds when the holder's controller process ran on this machine and has ended,
    so that its claim may be taken over; fails, saying what to do, when it lives or runs elsewhere.
options:
  service:
    description: The held service, for the message.
    type: str
    required: true
  host:
    description: The host it is on, for the message.
    type: str
    required: true
  holder:
    description: RV(sweep_service#holder).
    type: dict
    required: true
"""

EXAMPLES = r"""
- name: Refuse a service that another sweep holds
  sweep_owner:
    service: sglang-ddtree
    host: "{{ inventory_hostname }}"
    holder: "{{ claim.holder }}"
  delegate_to: localhost
"""

RETURN = r"""
token:
  description: The ended controller's name.
  type: str
  returned: success
"""


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "service": {"type": "str", "required": True},
            "host": {"type": "str", "required": True},
            "holder": {"type": "dict", "required": True},
        },
        supports_check_mode=True,
    )
    holder = module.params["holder"]
    if not gone(holder["token"]):
        module.fail_json(
            msg=f"{module.params['service']} on {module.params['host']} is being swept by study "
            f"{holder['study']} since {holder['started_at']} (controller {holder['controller']}). "
            "Let it finish; if that controller is gone, run restore.yml first, or wait until its lease "
            "has run out and the host has restored itself."
        )
    module.exit_json(changed=False, token=holder["token"])


if __name__ == "__main__":
    main()
