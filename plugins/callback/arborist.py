"""Ansible's own output, with a sweep cut down to what a person reads: the plan, a line a row, the report.

Modules of this project that have something to say return ``lines``. For the sweep's roles these lines are
printed and the rest is left out; ``-v`` shows everything as usual.
"""

from __future__ import annotations

import atexit
import os
import time
from typing import Any

from ansible import constants as C
from ansible.plugins.callback.default import CallbackModule as Default

DOCUMENTATION = r"""
name: arborist
type: stdout
short_description: Ansible's output, with sweeps cut down to a line a row
description:
  - Behaves as P(ansible.builtin.default#callback) for everything but the roles of a sweep. Of these it prints
    the plan, one line a finished row, the report and what failed; C(-v) shows everything as usual.
  - When a run ends while hosts are still under a sweep, it says so, and how they get their deployed command
    back.
extends_documentation_fragment:
  - default_callback
  - result_format_callback
requirements:
  - set as stdout in configuration
"""

#: Roles whose tasks are told in lines, not in tasks.
QUIET = frozenset({"sweep_plan", "sweep_trial", "sweep_restore", "sweep_report", "sweep_promote"})

#: Tasks of a trial: when one fails, the trial's row says so.
ROWS = frozenset({"sglang_ready", "sglang_measure"})


#: Tasks that fail with a message for a person.
SPOKEN = frozenset(
    prefix + name
    for prefix in ("", "ansible.builtin.")
    for name in ("validate_argument_spec", "assert", "fail")
)
VALUES = """With -e, a list or a mapping is given as JSON: -e '{"sglang_engine_args": {"page-size": 1}}'"""

DEBUG = frozenset({"debug", "ansible.builtin.debug"})


class CallbackModule(Default):
    """The callback that Ansible loads."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "stdout"
    CALLBACK_NAME = "arborist"

    def __init__(self) -> None:
        super().__init__()
        self._held: dict[str, float] = {}  # host -> when its lease runs out, seconds since the epoch
        self._process = os.getpid()
        atexit.register(self._at_exit)

    # --- which tasks are told in lines ---
    def _quiet(self, task: Any) -> bool:
        role = getattr(task, "_role", None)
        return self._display.verbosity == 0 and role is not None and role.get_name() in QUIET

    def _idle(self, result: Any) -> bool:
        """Whether this is a task that found nothing to do, of the client or of a role that a sweep's uses."""
        role = getattr(result.task, "_role", None)
        if self._display.verbosity > 0 or role is None or result.result.get("changed"):
            return False
        if result.task.action in DEBUG:
            return False
        return role.get_name() == "sweep_client" or any(
            parent.get_name() in QUIET for parent in role.get_parents()
        )

    def _say(self, result: Any, color: str | None = None) -> None:
        """Print a result's lines; what a host says of itself carries its name."""
        here = "_ansible_delegated_vars" in result.result
        for line in result.result.get("lines") or []:
            self._display.display(str(line) if here else f"{result.host.get_name()}: {line}", color=color)

    # --- events ---
    def v2_playbook_on_task_start(self, task: Any, is_conditional: bool) -> None:
        """Leave out the banner of a task that is told in lines."""
        if not self._quiet(task):
            super().v2_playbook_on_task_start(task, is_conditional)

    def v2_playbook_on_include(self, included_file: Any) -> None:
        """Leave out the list of a sweep's rows, which the plan has shown."""
        if not self._quiet(included_file._task):
            super().v2_playbook_on_include(included_file)

    def v2_runner_on_ok(self, result: Any) -> None:
        """Print the lines of a task, or the task."""
        self._note(result)
        if not self._quiet(result.task):
            if not self._idle(result):
                super().v2_runner_on_ok(result)
            return
        self._handle_warnings_and_exception(result)
        self._say(result, C.COLOR_ERROR if result.result.get("status") == "failed" else None)
        if result.task.action in DEBUG:
            said = result.result.get("msg")
            for line in said if isinstance(said, list) else [said]:
                self._display.display(str(line))

    def v2_runner_on_failed(self, result: Any, ignore_errors: bool = False) -> None:
        """Print the message of a task that failed; a trial's failure is told by its row."""
        if not self._quiet(result.task):
            if result.task.action in SPOKEN and self._display.verbosity == 0 and result.result.get("msg"):
                # The message says what is wrong; a specification or an expression beside it hides that.
                said = result.result["msg"]
                hint = f"\n{VALUES}" if "unable to convert" in said else ""
                self._fatal(result, f"{said}{hint}")
            else:
                super().v2_runner_on_failed(result, ignore_errors)
            return
        told_by_its_row = (
            result.task.action in ROWS and result.task._role.get_name() == "sweep_trial"
        ) and not result.result.get("abort")
        if not told_by_its_row:
            said = result.result.get("msg") or self._dump_results(result.result)
            self._fatal(result, said)

    def _fatal(self, result: Any, said: str) -> None:
        self._display.display(f"fatal: [{self.host_label(result)}]: {said}", color=C.COLOR_ERROR)

    def v2_runner_on_unreachable(self, result: Any) -> None:
        """Print that a host is gone; what it will do by itself is said at the end."""
        if not self._quiet(result.task):
            super().v2_runner_on_unreachable(result)
            return
        said = result.result.get("msg") or self._dump_results(result.result)
        self._display.display(f"unreachable: [{self.host_label(result)}]: {said}", color=C.COLOR_UNREACHABLE)

    def v2_runner_on_skipped(self, result: Any) -> None:
        """Say nothing of a task that had nothing to do."""
        if not self._quiet(result.task):
            super().v2_runner_on_skipped(result)

    def v2_playbook_on_stats(self, stats: Any) -> None:
        """Print the recap, and which hosts are still under the sweep."""
        super().v2_playbook_on_stats(stats)
        self._warn_of_held()

    # --- hosts that are left under a sweep ---
    def _note(self, result: Any) -> None:
        host = result.host.get_name()
        if result.task.action in ("sweep_service", "sglang_measure") and result.result.get("lease_until"):
            self._held[host] = float(result.result["lease_until"])
        elif result.task.action == "sweep_service" and result.result.get("released"):
            self._held.pop(host, None)

    def _warn_of_held(self) -> None:
        for host, until in sorted(self._held.items()):
            left = max(0, round(until - time.time()))
            self._display.display(
                f"{host} is still under the sweep. It gives itself the deployed command back when its lease "
                f"runs out, in {left} s; at once: run restore.yml.",
                color=C.COLOR_WARN,
            )
        self._held.clear()

    def _at_exit(self) -> None:
        """The one place that is reached after Ctrl-C; workers are copies of the process, and say nothing."""
        if os.getpid() == self._process:
            self._warn_of_held()
