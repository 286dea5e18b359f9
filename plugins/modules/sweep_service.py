#!/usr/bin/python
"""Ansible module: hold a service for a sweep or a deployment, run a configuration on it, give it back."""

from __future__ import annotations

import contextlib
from dataclasses import asdict
from typing import Any

from ansible.module_utils.arborist_sweep import Deploying, SweptService, Taken
from ansible.module_utils.arborist_unit import UnitError, expand, first_difference
from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = r"""
---
module: sweep_service
short_description: Hold a service for a sweep or a deployment, run a configuration on it, give it back
description:
  - C(state=claimed) takes the service for one sweep, removes what a dead sweep left, arms the lease and
    returns the deployed command. A service that another sweep holds is left alone; RV(claimed) is then false.
  - C(state=applied) writes the volatile drop-in, renews the lease, restarts, and checks that systemd reads
    the command it should. It does not wait for readiness.
  - C(state=restored) removes drop-in, lease and claim, and restarts the service where its process does not
    run the deployed command. Without O(token) it does so whoever held the service.
  - C(state=observed) looks, changes nothing, and tells which sweep has the service; with O(token) also
    why that sweep no longer has it.
  - C(state=deploying) fails when a sweep has the service, and keeps sweeps away until C(state=deployed) with
    the RV(deployment) that it returned. Given that, it fails when another deployment has begun since.
  - The deployed unit is never written.
options:
  name:
    description: The systemd service, with or without C(.service).
    type: str
    required: true
  state:
    description: What to bring about.
    type: str
    choices: [observed, claimed, applied, restored, deploying, deployed]
    required: true
  token:
    description: Names the sweep's controller process; from M(sweep_plan).
    type: str
    default: ""
  from_token:
    description: For C(state=claimed), a controller known to be gone, whose claim may be taken.
    type: str
    default: ""
  deployment:
    description: For C(state=deployed), and C(state=deploying) again, what C(state=deploying) returned.
    type: str
    default: ""
  study:
    description: The sweep's study, for those who find the service held.
    type: str
    default: ""
  controller:
    description: Who sweeps, for those who find the service held.
    type: str
    default: ""
  lease_seconds:
    description: Seconds after which the host itself restores the service if nobody renews the lease.
    type: int
    default: 1800
  content:
    description: For C(state=applied), the drop-in's text.
    type: str
    default: ""
  command:
    description: >-
      For C(state=applied), the arguments that the drop-in's ExecStart must come to. For C(state=claimed), the
      command that the inventory asks for; a person is told where the deployed one differs.
    type: list
    elements: str
    default: []
"""

EXAMPLES = r"""
- name: Give the service back
  sweep_service:
    name: sglang-ddtree
    state: restored
"""

RETURN = r"""
claimed:
  description: Whether this sweep holds the service.
  type: bool
  returned: state=claimed
holder:
  description: Who holds it when RV(claimed) is false.
  type: dict
  returned: state=claimed
command:
  description: The deployed command, as systemd loaded it.
  type: list
  elements: str
  returned: state=claimed
was_active:
  description: Whether the service ran before the sweep.
  type: bool
  returned: state=claimed
leftovers:
  description: Files that a sweep had left; they are removed.
  type: list
  elements: str
  returned: state=claimed, state=restored
lines:
  description: What a person should know.
  type: list
  elements: str
  returned: state=claimed, state=restored
lease_until:
  description: When the lease runs out, in seconds since the epoch by the host's clock.
  type: float
  returned: state=claimed, state=applied
invocation_id:
  description: The started invocation.
  type: str
  returned: state=applied
started_at:
  description: When it was started, UTC.
  type: str
  returned: state=applied
restart_s:
  description: Seconds from asking the old process to stop until systemd had started the new one.
  type: float
  returned: state=applied
swept_by:
  description: Which sweep has the service, in words; empty when none has.
  type: str
  returned: state=observed
unfinished:
  description: Which deployment has not ended, in words; empty without one.
  type: str
  returned: state=restored
lost:
  description: Why the sweep O(token) no longer has the service; empty when it has, or without O(token).
  type: str
  returned: state=observed
deployment:
  description: Names this deployment.
  type: str
  returned: state=deploying
found:
  description: What was not as deployed.
  type: list
  elements: str
  returned: state=restored
abort:
  description: The sweep can't go on on this host; this is not a configuration's failure.
  type: bool
  returned: failure
"""


def observed(service: SweptService, params: dict[str, Any], check: bool) -> dict[str, Any]:
    """Say which sweep has the service, alive or cut off, and why not the one that asks."""
    del check
    lost = ""
    if params["token"]:
        try:
            service.mine(params["token"])
        except Taken as taken:
            lost = str(taken)
    return {
        "changed": False,
        "leftovers": service.leftovers(),
        "swept_by": service.swept_by(),
        "lost": lost,
    }


def claim_lines(left: list[str], asked: list[str], deployed: list[str]) -> list[str]:
    """What a person should know when a sweep takes a service."""
    lines = []
    if left:
        lines.append(f"removed what a sweep left here that was cut off: {', '.join(left)}")
    difference = first_difference(asked, [part for word in deployed for part in expand(word, {})])
    if asked and difference:
        lines.append(
            f"the deployed command is not the inventory's ({difference}): the rows take the inventory's "
            "settings, and at the end the service gets its deployed command back"
        )
    return lines


def claimed(service: SweptService, params: dict[str, Any], check: bool) -> dict[str, Any]:
    """Take the service, or say who has it. Raises Deploying when it is being deployed."""
    if check:
        service.refuse_unfinished()
        holder = service.holder()
        free = holder is None or holder.token in (params["token"], params["from_token"])
        return {
            "changed": False,
            "claimed": free,
            "holder": None if free or holder is None else asdict(holder),
            "leftovers": service.leftovers() if free else [],
            "command": service.unit.command(),
            "was_active": service.active(),
        }
    try:
        claim, left = service.take(
            params["token"],
            params["study"],
            params["controller"],
            params["lease_seconds"],
            params["from_token"],
        )
    except Taken as taken:
        holder = asdict(taken.claim) if taken.claim is not None else None
        return {"changed": False, "claimed": False, "holder": holder, "msg": str(taken)}
    return {
        "changed": True,
        "claimed": True,
        "holder": None,
        "leftovers": left,
        "command": service.unit.command(),
        "was_active": claim.was_active,
        "lease_until": claim.expires_at,
        "lines": claim_lines(left, params["command"], service.unit.command()),
    }


def applied(service: SweptService, params: dict[str, Any], check: bool) -> dict[str, Any]:
    """Run the configuration."""
    if check:
        return {"changed": True}
    facts = service.apply(params["token"], params["content"], params["command"], params["lease_seconds"])
    return {"changed": True, **facts}


def restored(service: SweptService, params: dict[str, Any], check: bool) -> dict[str, Any]:
    """Give the service back. Raises Taken when another sweep has it.

    A claim that is gone is none's: the lease ran out, or restore.yml was quicker.
    """
    if params["token"] and service.claim() is not None:
        service.mine(params["token"])
    found, leftovers = service.wrong(), service.leftovers()
    if found and not check:
        service.restore()
    told = f"{'would put' if check else 'put'} right: {'; '.join(found)}" if found else "nothing to restore"
    unfinished = service.unfinished()
    told += f"; {unfinished}: if it no longer runs, run deploy.yml" if unfinished else ""
    return {
        "changed": bool(found),
        "found": found,
        "leftovers": leftovers,
        "released": not check,
        "unfinished": unfinished,
        "lines": [] if params["token"] else [told],
    }


def deploying(service: SweptService, params: dict[str, Any], check: bool) -> dict[str, Any]:
    """Keep sweeps away, or see that this deployment still does. Raises Taken when a sweep has the service.

    No change that counts: a run that succeeds undoes it.
    """
    began = params["deployment"]
    if check:
        service.refuse_swept()
    elif began:
        service.refuse_overtaken(began)
    else:
        began = service.begin_deployment()
    return {"changed": False, "deployment": began}


def deployed(service: SweptService, params: dict[str, Any], check: bool) -> dict[str, Any]:
    """Let sweeps begin again, unless another deployment has begun since."""
    if not check:
        service.end_deployment(params["deployment"])
    return {"changed": False}


def main() -> None:
    """Run the module."""
    states = {
        "observed": observed,
        "claimed": claimed,
        "applied": applied,
        "restored": restored,
        "deploying": deploying,
        "deployed": deployed,
    }
    module = AnsibleModule(
        argument_spec={
            "name": {"type": "str", "required": True},
            "state": {
                "type": "str",
                "choices": list(states),
                "required": True,
            },
            "token": {"type": "str", "default": "", "no_log": False},
            "from_token": {"type": "str", "default": "", "no_log": False},
            "deployment": {"type": "str", "default": ""},
            "study": {"type": "str", "default": ""},
            "controller": {"type": "str", "default": ""},
            "lease_seconds": {"type": "int", "default": 1800},
            "content": {"type": "str", "default": ""},
            "command": {"type": "list", "elements": "str", "default": []},
        },
        required_if=[
            ("state", "claimed", ["token", "study", "controller"]),
            ("state", "applied", ["token", "content", "command"]),
        ],
        supports_check_mode=True,
    )
    service = SweptService(module.params["name"], module.run_command)
    act = states[module.params["state"]]
    try:
        with contextlib.nullcontext() if module.check_mode else service.locked():
            result = act(service, module.params, module.check_mode)
    except (UnitError, Taken, Deploying) as error:
        module.fail_json(msg=str(error), abort=True)
    except OSError as error:
        module.fail_json(msg=f"the files below /run that hold the service can't be kept: {error}", abort=True)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
