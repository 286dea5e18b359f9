#!/usr/bin/python
"""Ansible module: measure a running SGLang service."""

from __future__ import annotations

from ansible.module_utils.arborist_sweep import SweptService, Taken
from ansible.module_utils.arborist_tuning import another_invocation, need_tuning
from ansible.module_utils.arborist_unit import UnitError
from ansible.module_utils.basic import AnsibleModule

try:
    from tuning.measure import MeasurementFailed, Workload, measure
    from tuning.prompts import Prompt

    TUNING_ERROR: str | None = None
except ImportError as error:
    TUNING_ERROR = str(error)

DOCUMENTATION = r"""
---
module: sglang_measure
short_description: Measure a running SGLang service
description:
  - A face over C(tuning.measure). Warms the service up, runs the prompts at every level, and takes the accept
    length from the responses and from the journal.
  - Fails with a classified reason and the journal's tail when the service dies, is restarted, or does not
    answer. The service is not changed.
  - Runs on the service's host with an interpreter that has C(tuning), which the role C(sweep_client)
    installs.
options:
  unit:
    description: The systemd service, with or without C(.service).
    type: str
    required: true
  base_url:
    description: Where the service listens, for example C(http://127.0.0.1:30000).
    type: str
    required: true
  invocation_id:
    description: The invocation to measure, from M(sweep_service). Empty means whichever runs.
    type: str
    default: ""
  workload:
    description: What to ask.
    type: dict
    required: true
    suboptions:
      prompts:
        description: The prompts, each with C(id), C(category) and C(text).
        type: list
        elements: dict
        required: true
      levels:
        description: Concurrencies.
        type: list
        elements: int
        required: true
      max_tokens:
        description: Tokens to generate for each prompt.
        type: int
        required: true
  token:
    description: >-
      Names the sweep's controller process; from M(sweep_plan). With it, the lease is renewed before the
      measurement begins.
    type: str
    default: ""
  lease_seconds:
    description: Seconds that the lease is renewed for.
    type: int
    default: 1800
  api_key:
    description: The service's API key, where it asks for one.
    type: str
"""

EXAMPLES = r"""
- name: Measure the service
  sglang_measure:
    unit: sglang-ddtree
    base_url: http://127.0.0.1:30000
    workload: "{{ plan.workload }}"
  vars:
    ansible_python_interpreter: /opt/sglang/client/current/bin/python
"""

RETURN = r"""
measurement:
  description: The measurement, as C(tuning.models.Measurement) has it.
  type: dict
  returned: success
lease_until:
  description: When the renewed lease runs out, in seconds since the epoch by the host's clock.
  type: float
  returned: with a token
failure:
  description: Classified reason with C(kind), C(summary), C(hint) and C(journal_tail).
  type: dict
  returned: failure
"""


def renewed(module: AnsibleModule) -> dict[str, float]:
    """Renew the sweep's lease, so that a start that took long leaves the whole lease to the measurement."""
    service = SweptService(module.params["unit"], module.run_command)
    try:
        with service.locked():
            claim = service.renew(module.params["token"], module.params["lease_seconds"])
    except (UnitError, Taken) as error:
        module.fail_json(msg=str(error), abort=True)
    return {"lease_until": claim.expires_at}


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "unit": {"type": "str", "required": True},
            "base_url": {"type": "str", "required": True},
            "invocation_id": {"type": "str", "default": ""},
            "workload": {
                "type": "dict",
                "required": True,
                "options": {
                    "prompts": {"type": "list", "elements": "dict", "required": True},
                    "levels": {"type": "list", "elements": "int", "required": True},
                    "max_tokens": {"type": "int", "required": True},
                },
            },
            "token": {"type": "str", "default": "", "no_log": False},
            "lease_seconds": {"type": "int", "default": 1800},
            "api_key": {"type": "str", "no_log": True},
        },
        supports_check_mode=False,
    )
    need_tuning(module, TUNING_ERROR)
    lease = renewed(module) if module.params["token"] else {}
    asked, wanted = module.params["workload"], module.params["invocation_id"]
    workload = Workload(
        prompts=[Prompt.model_validate(prompt) for prompt in asked["prompts"]],
        levels=asked["levels"],
        max_tokens=asked["max_tokens"],
    )
    try:
        made = measure(
            module.params["unit"], module.params["base_url"], workload, api_key=module.params["api_key"]
        )
    except MeasurementFailed as error:
        module.fail_json(
            msg=str(error),
            failure=error.failure.model_dump(mode="json"),
            invocation_id=wanted,
            **lease,
        )
        return
    failure = another_invocation(wanted, made.invocation_id)
    if failure is not None:
        module.fail_json(msg=failure["summary"], failure=failure, invocation_id=wanted, **lease)
    module.exit_json(changed=False, measurement=made.model_dump(mode="json"), **lease)


if __name__ == "__main__":
    main()
