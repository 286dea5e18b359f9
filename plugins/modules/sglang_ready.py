#!/usr/bin/python
"""Ansible module: wait until an SGLang unit really generates, or say why it does not."""

from __future__ import annotations

from typing import Any

from ansible.module_utils.arborist_tuning import another_invocation, need_tuning
from ansible.module_utils.basic import AnsibleModule

try:
    from tuning.readiness import wait_ready

    TUNING_ERROR: str | None = None
except ImportError as error:
    TUNING_ERROR = str(error)

DOCUMENTATION = r"""
---
module: sglang_ready
short_description: Wait until an SGLang service really generates
description:
  - A face over C(tuning.readiness). Waits for the unit's process, its port, its health and one real
    generation that the unit's own control group answered.
  - Fails as soon as the unit dies, with a classified reason and the journal's tail.
  - Runs on the service's host with an interpreter that has C(tuning), which the role C(sweep_client)
    installs.
  - In check mode nothing was started, so there is nothing to wait for, and the module says so.
options:
  unit:
    description: The systemd unit, with or without C(.service).
    type: str
    required: true
  base_url:
    description: Where the service listens, for example C(http://127.0.0.1:30000).
    type: str
    required: true
  timeout:
    description: Seconds to wait for at most.
    type: float
    default: 900
  poll:
    description: Seconds between two looks.
    type: float
    default: 0.25
  invocation_id:
    description: >-
      The invocation to wait for, from M(sweep_service). Another one that is ready is a failure then. Empty
      means whichever runs.
    type: str
    default: ""
  api_key:
    description: The service's API key, where it asks for one.
    type: str
"""

EXAMPLES = r"""
- name: Wait until the service generates
  sglang_ready:
    unit: sglang-ddtree
    base_url: http://127.0.0.1:30000
    timeout: 900
  vars:
    ansible_python_interpreter: /opt/sglang/client/current/bin/python
"""

RETURN = r"""
invocation_id:
  description: The unit's InvocationID that answered.
  type: str
  returned: success
main_pid:
  description: The unit's main process.
  type: int
  returned: success
phases:
  description: Seconds from the unit's start to each phase; C(boot_s) is the whole.
  type: dict
  returned: always
failure:
  description: Classified reason with C(kind), C(summary), C(hint) and C(journal_tail).
  type: dict
  returned: failure
"""


def failure_message(unit: str, failure: dict[str, Any]) -> str:
    """One message for a person: what failed, what to change, and the journal's end."""
    lines = [f"{unit} is not ready: {failure['kind']}: {failure['summary']}"]
    if failure.get("hint"):
        lines.append(f"What to do: {failure['hint']}")
    tail = failure.get("journal_tail") or []
    if tail:
        lines.append(f"The journal's last {len(tail)} lines:")
        lines.extend(f"  {line[:300]}" for line in tail)
    return "\n".join(lines)


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "unit": {"type": "str", "required": True},
            "base_url": {"type": "str", "required": True},
            "timeout": {"type": "float", "default": 900},
            "poll": {"type": "float", "default": 0.25},
            "invocation_id": {"type": "str", "default": ""},
            "api_key": {"type": "str", "no_log": True},
        },
        supports_check_mode=True,
    )
    params = module.params
    if module.check_mode:
        module.exit_json(changed=False, phases={}, msg=f"check mode: {params['unit']} was not started")
    need_tuning(module, TUNING_ERROR)
    report = wait_ready(
        params["unit"],
        params["base_url"],
        timeout_s=params["timeout"],
        poll_s=params["poll"],
        api_key=params["api_key"],
    )
    result: dict[str, Any] = {
        "changed": False,
        "invocation_id": report.invocation_id,
        "main_pid": report.main_pid,
        "phases": report.phases.model_dump(mode="json"),
    }
    failure = (
        report.failure.model_dump(mode="json")
        if report.failure is not None
        else another_invocation(params["invocation_id"], report.invocation_id)
    )
    if failure is not None:
        module.fail_json(msg=failure_message(params["unit"], failure), failure=failure, **result)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
