"""The one way modules say that the Python package ``tuning`` is missing."""

from __future__ import annotations

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
