"""What the modules over the Python package ``tuning`` share: it is missing, or it saw another invocation."""

from __future__ import annotations

from typing import Any

from ansible.module_utils.basic import AnsibleModule, missing_required_lib


def need_tuning(module: AnsibleModule, error: str | None) -> None:
    """End the module with a message when importing ``tuning`` gave ``error``."""
    if error is not None:
        module.fail_json(
            msg=missing_required_lib(
                "tuning",
                reason=f"({error}); `make setup` installs it on the controller, role sweep_client on a host",
            ),
            abort=True,
        )


def another_invocation(wanted: str, found: str) -> dict[str, Any] | None:
    """The failure of a trial whose unit something else has restarted; None when it is the one wanted."""
    if not wanted or found == wanted:
        return None
    return {
        "kind": "killed",
        "summary": f"something else restarted the unit: found invocation {found}, expected {wanted}",
        "hint": "see the journal for who did; raise sweep_lease_seconds if the sweep's lease ran out",
        "journal_tail": [],
    }
