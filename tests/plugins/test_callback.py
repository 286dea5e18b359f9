"""The output of a real ansible-playbook run with this project's callback, on this machine alone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.plugins.support import ROOT

Play = Callable[..., tuple[int, str]]

CONFIG = f"""\
[defaults]
roles_path = roles
library = library
callback_plugins = {ROOT}/plugins/callback
stdout_callback = arborist
display_skipped_hosts = false
localhost_warning = false
"""
PLAYBOOK = """\
- name: Play
  hosts: h1
  connection: local
  gather_facts: false
  vars: {ansible_python_interpreter: "{{ ansible_playbook_python }}"}
  roles: [ROLE]
"""
MODULE = """\
from ansible.module_utils.basic import AnsibleModule
module = AnsibleModule({"result": {"type": "dict", "default": {}}, "fail": {"type": "str"}})
if module.params["fail"]:
    module.fail_json(msg=module.params["fail"], **module.params["result"])
module.exit_json(**{"changed": False, **module.params["result"]})
"""


@pytest.fixture
def play(tmp_path: Path) -> Play:
    """Run tasks as a role; returns exit status, output."""

    def run(role: str, tasks: str, *options: str) -> tuple[int, str]:
        (tmp_path / "ansible.cfg").write_text(CONFIG)
        folder = tmp_path / "roles" / role / "tasks"
        folder.mkdir(parents=True)
        (folder / "main.yml").write_text(tasks)
        helper = tmp_path / "roles" / "helper" / "tasks"
        helper.mkdir(parents=True)
        (helper / "main.yml").write_text(HELPER)
        (tmp_path / "library").mkdir()
        for name in ("sweep_service", "sglang_ready", "sweep_record"):
            (tmp_path / "library" / f"{name}.py").write_text(MODULE)
        (tmp_path / "play.yml").write_text(PLAYBOOK.replace("ROLE", role))
        command = [str(Path(sys.executable).with_name("ansible-playbook")), "-i", "h1,", "play.yml", *options]
        environment = {**os.environ, "ANSIBLE_CONFIG": str(tmp_path / "ansible.cfg"), "NO_COLOR": "1"}
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
        )
        return done.returncode, done.stdout + done.stderr

    return run


HELPER = """\
- name: Idle
  sweep_record: {}
- name: Busy
  sweep_record: {result: {changed: true}}
- name: Tell
  ansible.builtin.debug: {msg: worth knowing}
"""
TOLD = """\
- name: An ok task
  sweep_record: {result: {lines: ["[1/2]  8:4  ok", "second"]}}
  delegate_to: localhost
- name: A quiet task
  sweep_record: {}
- name: A host's own
  sweep_service: {result: {lines: [nothing to restore]}}
- name: Another role
  ansible.builtin.import_role: {name: helper}
"""


def test_a_sweeps_role_is_told_in_lines(play: Play) -> None:
    status, said = play("sweep_trial", TOLD)
    assert status == 0
    assert "\n[1/2]  8:4  ok\nsecond\nh1: nothing to restore\n" in said
    assert "A quiet task" not in said
    assert "PLAY RECAP" in said
    assert "Idle" not in said, "a role that a sweep uses is told by what it changes"
    assert "TASK [helper : Busy]" in said
    assert "worth knowing" in said


def test_other_roles_and_verbose_runs_are_as_ever(play: Play) -> None:
    _, said = play("sglang_service", TOLD)
    assert "TASK [sglang_service : An ok task]" in said


def test_a_verbose_sweep_shows_its_tasks(play: Play) -> None:
    _, said = play("sweep_trial", TOLD, "-v")
    assert "TASK [sweep_trial : A quiet task]" in said


RESCUED = """\
- name: A trial
  block:
    - name: Wait
      sglang_ready: {fail: the unit died, result: {failure: {kind: crashed}}}
  rescue:
    - name: Record
      sweep_record: {result: {status: failed, lines: [the row]}}
      delegate_to: localhost
- name: Something else
  sweep_record: {fail: "no space left"}
"""


def test_a_trials_failure_is_its_row_and_others_are_messages(play: Play) -> None:
    status, said = play("sweep_trial", RESCUED)
    assert status != 0
    assert "the row\n" in said
    assert "the unit died" not in said
    assert "fatal: [h1]: no space left\n" in said


REFUSED = """\
- name: Refuse
  ansible.builtin.assert:
    that: 1 == 2
    fail_msg: this host is being swept
"""


def test_a_refusal_is_its_message_alone(play: Play) -> None:
    status, said = play("sglang_service", REFUSED)
    assert status != 0
    assert "fatal: [h1]: this host is being swept\n" in said
    assert said.count("this host is being swept") == 1
    assert "evaluated_to" not in said


CUT_OFF = """\
- name: Take
  sweep_service: {result: {lease_until: 4000000000}}
- name: Fail
  sweep_record: {fail: "gone"}
"""


def test_a_run_that_leaves_a_host_under_the_sweep_says_so(play: Play) -> None:
    _, said = play("sweep_trial", CUT_OFF)
    assert said.count("h1 is still under the sweep.") == 1
    assert "run restore.yml" in said


def test_a_host_that_was_given_back_is_not_mentioned(play: Play) -> None:
    tasks = "- name: Take\n  sweep_service: {result: {lease_until: 4000000000}}\n"
    _, said = play("sweep_trial", tasks + "- name: Give\n  sweep_service: {result: {released: true}}\n")
    assert "still under the sweep" not in said
