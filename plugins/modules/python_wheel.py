#!/usr/bin/python
"""Ansible module: build a Python project's wheel on the controller, reproducibly."""

from __future__ import annotations

import hashlib
import sys
import tempfile
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = r"""
---
module: python_wheel
short_description: Build a Python project's wheel, reproducibly
description:
  - Builds the wheel of a project whose build backend is hatchling and puts it into a directory.
  - Hatchling's wheels are reproducible, so the same sources give the same bytes and the same C(sha256);
    what is installed elsewhere can be named by that hash.
  - The directory is a build cache on the controller, not managed state, so the module never reports a change
    and also works in check mode.
options:
  source:
    description: The project's folder, which holds C(pyproject.toml).
    type: path
    required: true
  dest:
    description: The folder for the wheel, made when it is missing.
    type: path
    required: true
"""

EXAMPLES = r"""
- name: Build the client's wheel
  python_wheel:
    source: "{{ project }}"
    dest: "{{ project }}/.cache/wheels"
  delegate_to: localhost
"""

RETURN = r"""
path:
  description: The wheel.
  type: str
  returned: success
name:
  description: The wheel's file name.
  type: str
  returned: success
sha256:
  description: Hash of the wheel's bytes.
  type: str
  returned: success
"""


_BUILD = "import sys, hatchling.build; print(hatchling.build.build_wheel(sys.argv[1]))"


def build_argv(dest: str) -> list[str]:
    """The command that builds the wheel of the project in the working directory into ``dest``."""
    return [sys.executable, "-c", _BUILD, dest]


def main() -> None:
    """Build the wheel into a temporary folder, then move it into place in one step."""
    module = AnsibleModule(
        argument_spec={
            "source": {"type": "path", "required": True},
            "dest": {"type": "path", "required": True},
        },
        supports_check_mode=True,
    )
    source, dest = Path(module.params["source"]), Path(module.params["dest"])
    if not (source / "pyproject.toml").is_file():
        module.fail_json(msg=f"no pyproject.toml in {source}: expected a Python project's folder")
    dest.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=dest) as scratch:
        rc, out, err = module.run_command(build_argv(scratch), cwd=str(source))
        if rc != 0:
            tail = "\n".join(err.strip().splitlines()[-5:])
            module.fail_json(
                msg=f"building the wheel of {source} with {sys.executable} failed (rc {rc}): {tail}", rc=rc
            )
        built = Path(scratch) / out.strip().splitlines()[-1]
        result: dict[str, Any] = {
            "path": str(dest / built.name),
            "name": built.name,
            "sha256": hashlib.sha256(built.read_bytes()).hexdigest(),
        }
        built.replace(dest / built.name)
    module.exit_json(changed=False, **result)


if __name__ == "__main__":
    main()
