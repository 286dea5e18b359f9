"""A service under a sweep: who holds it, what is written where, in which order, and the way back."""

from __future__ import annotations

import json
import os
import stat
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from ansible.module_utils.arborist_sweep import Deploying, SweptService, Taken
from ansible.module_utils.arborist_unit import UnitError

from tests.plugins.support import Systemctl, load

BUS = "busctl --json=short get-property org.freedesktop.systemd1"
EXEC = f"{BUS} /org/freedesktop/systemd1/unit/svc_2eservice org.freedesktop.systemd1.Service ExecStart"
SHOW = "systemctl show svc.service --property"
LEASE = "systemctl show svc-sweep-lease.timer --property ActiveState"
DEPLOYED = ["/opt/python", "-b", "16"]
TRIAL = ["/opt/python", "-b", "8"]
NEW = {"deployment": ""}
DROPIN = "[Service]\nExecStart=\nExecStart=/opt/python -b 8\nRestart=no\n"


class Host:
    """A host that behaves like one: systemctl's answers follow from what was done."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.systemctl = Systemctl()
        self.service = SweptService("svc", self.systemctl, root)
        self.service.unit._proc = root / "proc"
        self.loaded = DEPLOYED
        self.trial = TRIAL
        self.state = "active"
        self.invocation = 1
        self.pid = 100
        self.lease = "inactive"
        self.run(DEPLOYED)
        answers = self.systemctl.answers
        answers[EXEC] = lambda: json.dumps({"data": [["/opt/python", self.loaded]]})
        answers[LEASE] = lambda: f"ActiveState={self.lease}\n"
        answers[f"{SHOW} ActiveState"] = lambda: f"ActiveState={self.state}\n"
        answers[f"{SHOW} InvocationID"] = lambda: f"InvocationID={self.invocation}\n"
        answers[f"{SHOW} InvocationID,ActiveState,SubState,Result"] = lambda: (
            f"InvocationID={self.invocation}\nActiveState={self.state}\nSubState=running\nResult=success\n"
        )
        answers[f"{SHOW} MainPID"] = lambda: f"MainPID={self.pid if self.state == 'active' else 0}\n"
        answers[f"{SHOW} ActiveState,SubState"] = lambda: f"ActiveState={self.state}\nSubState=dead\n"
        answers["systemctl daemon-reload"] = self.reload
        answers["systemctl restart svc.service"] = self.restart
        answers["systemctl stop svc.service"] = self.stop
        answers["systemctl restart svc-sweep-lease.timer"] = lambda: self.set_lease("active")
        answers["systemctl stop svc-sweep-lease.timer"] = lambda: self.set_lease("inactive")

    def run(self, argv: list[str]) -> None:
        folder = self.root / "proc" / str(self.pid)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "cmdline").write_bytes(b"".join(a.encode() + b"\0" for a in argv))

    def reload(self) -> str:
        self.loaded = self.trial if self.service.dropin.exists() else DEPLOYED
        return ""

    def restart(self) -> str:
        self.invocation += 1
        self.pid += 1
        self.state = "active"
        self.run(self.loaded)
        return ""

    def stop(self) -> str:
        self.state = "inactive"
        return ""

    def set_lease(self, state: str) -> str:
        self.lease = state
        return ""

    def take(self, token: str = "me", from_token: str = "") -> list[str]:
        left: list[str] = self.service.take(token, "s1", "a@b", 60, from_token)[1]
        return left

    def apply(self, token: str = "me") -> dict[str, object]:
        facts: dict[str, object] = self.service.apply(token, DROPIN, TRIAL, 60)
        return facts


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_taking_a_service_arms_the_lease_and_leaves_the_service_alone(host: Host) -> None:
    assert host.take() == []
    assert host.systemctl.done() == [
        "systemctl daemon-reload",
        "systemctl restart svc-sweep-lease.timer",
    ]
    claim = host.service.claim()
    assert claim is not None
    assert (claim.token, claim.study, claim.controller, claim.was_active) == ("me", "s1", "a@b", True)
    timer = host.service.timer.read_text()
    assert "OnActiveSec=60s\n" in timer
    assert "OnCalendar=20" in timer
    assert stat.S_IMODE(host.service.script.stat().st_mode) == 0o700
    assert not host.service.dropin.exists()


def test_applying_renews_the_lease_before_it_restarts(host: Host) -> None:
    host.take()
    host.systemctl.calls.clear()
    result = host.apply()
    assert host.systemctl.done() == [
        "systemctl daemon-reload",
        "systemctl restart svc-sweep-lease.timer",
        "systemctl reset-failed svc.service",
        "systemctl restart svc.service",
    ]
    assert host.service.dropin.read_text() == DROPIN
    assert host.service.dropin == host.root / "run/systemd/system/svc.service.d/90-sweep.conf"
    assert result["invocation_id"] == "2"


def test_a_later_drop_in_that_wins_stops_the_trial_before_the_restart(host: Host) -> None:
    host.take()
    host.trial = ["/opt/python", "-b", "99"]
    with pytest.raises(UnitError, match=r"reads another command .*'99', expected '8'.*systemctl cat svc"):
        host.apply()
    assert "systemctl restart svc.service" not in host.systemctl.done()


def test_a_unit_that_cannot_start_is_left_to_the_readiness_wait(host: Host) -> None:
    host.take()

    def refuse() -> str:
        host.restart()
        host.state = "failed"
        return ""

    host.systemctl.answers["systemctl restart svc.service"] = refuse
    assert host.apply()["invocation_id"] == "2"


def test_a_restart_that_did_nothing_is_not_taken_for_a_trial(host: Host) -> None:
    host.take()
    host.systemctl.failures["systemctl restart svc.service"] = "Job for svc.service canceled."
    with pytest.raises(UnitError, match=r"still runs as before: .*Job for svc.service canceled"):
        host.apply()


def test_a_held_service_is_refused_and_untouched(host: Host) -> None:
    host.take("first")
    host.apply("first")
    host.systemctl.calls.clear()
    with pytest.raises(Taken, match=r"svc.service is being swept by study s1 \(controller a@b") as taken:
        host.take("second")
    assert taken.value.claim is not None
    assert taken.value.claim.token == "first"
    assert host.systemctl.done() == []
    assert host.service.dropin.exists()


def test_a_claim_without_a_lease_is_dead_and_its_drop_in_is_removed_first(host: Host) -> None:
    host.take("first")
    host.apply("first")
    host.lease = "inactive"
    left = host.take("second")
    assert str(host.service.dropin) in left
    assert not host.service.dropin.exists()
    assert host.service.unit.command() == DEPLOYED


def test_a_gone_controllers_claim_may_be_taken_over(host: Host) -> None:
    host.take("first")
    host.apply("first")
    host.take("second", from_token="first")
    claim = host.service.claim()
    assert claim is not None
    assert claim.token == "second"
    assert host.lease == "active"


def test_a_drop_in_without_any_record_is_removed_too(host: Host) -> None:
    host.service.dropin.parent.mkdir(parents=True)
    host.service.dropin.write_text(DROPIN)
    host.state = "failed"
    assert host.take() == [str(host.service.dropin)]
    claim = host.service.claim()
    assert claim is not None
    assert claim.was_active, "a service that died under a sweep's drop-in has to come back"


def test_a_sweep_that_lost_its_claim_applies_nothing(host: Host) -> None:
    host.take("first")
    host.service.record.unlink()
    with pytest.raises(Taken, match=r"no longer holds svc.service: restore.*lease ran out \(then raise"):
        host.apply("first")
    host.take("second")
    with pytest.raises(Taken, match=r"another sweep has taken svc\.service over: study s1"):
        host.apply("first")
    assert not host.service.dropin.exists()


def test_the_lease_can_be_renewed_between_start_and_measurement(host: Host) -> None:
    host.take()
    host.apply()
    host.systemctl.calls.clear()
    before = host.service.claim()
    after = host.service.renew("me", 3600)
    assert before is not None
    assert after.expires_at > before.expires_at + 3000
    assert "OnActiveSec=3600s" in host.service.timer.read_text()
    assert host.systemctl.done() == ["systemctl daemon-reload", "systemctl restart svc-sweep-lease.timer"]


def test_giving_back_what_the_lease_gave_back_already_is_fine(host: Host) -> None:
    host.take()
    for path in (host.service.record, host.service.timer, host.service.service, host.service.script):
        path.unlink()
    host.lease = "inactive"
    result = load("sweep_service").restored(host.service, {"token": "me"}, check=False)
    assert (result["changed"], result["released"]) == (False, True)


def test_another_sweeps_service_is_not_given_back(host: Host) -> None:
    host.take("second")
    with pytest.raises(Taken, match="another sweep has taken"):
        load("sweep_service").restored(host.service, {"token": "first"}, check=False)
    assert host.lease == "active"


def test_restoring_removes_everything_and_restarts_the_deployed_command(host: Host) -> None:
    host.take()
    host.apply()
    host.systemctl.calls.clear()
    host.service.restore()
    assert host.systemctl.done() == [
        "systemctl daemon-reload",
        "systemctl reset-failed svc.service",
        "systemctl restart svc.service",
        "systemctl stop svc-sweep-lease.timer",
        "systemctl daemon-reload",
    ]
    assert host.service.leftovers() == []
    assert not host.service.dropin.parent.exists()
    assert host.service.wrong() == []
    assert host.loaded == DEPLOYED


def test_what_is_wrong_is_named(host: Host) -> None:
    host.take()
    assert host.service.wrong() == ["a sweep's lease, svc-sweep-lease.timer"]
    host.apply()
    assert host.service.wrong() == [
        f"a sweep's drop-in, {host.service.dropin}",
        "a sweep's lease, svc-sweep-lease.timer",
    ]


def test_restoring_keeps_drop_ins_of_others(host: Host) -> None:
    host.take()
    host.apply()
    other = host.service.dropin.with_name("50-mine.conf")
    other.write_text("[Service]\nNice=1\n")
    host.service.restore()
    assert other.exists()


def test_nothing_to_restore_changes_nothing(host: Host) -> None:
    assert host.service.wrong() == []


def test_a_claim_whose_trial_never_started_needs_no_restart(host: Host) -> None:
    host.take()
    host.systemctl.calls.clear()
    host.service.restore()
    assert "systemctl restart svc.service" not in host.systemctl.done()


def test_a_stopped_service_is_stopped_again(host: Host) -> None:
    host.state = "inactive"
    host.take()
    host.apply()
    host.service.restore()
    assert host.state == "inactive"
    assert host.service.leftovers() == []


def test_a_baseline_that_does_not_start_keeps_the_lease(host: Host) -> None:
    host.take()
    host.apply()
    host.systemctl.failures["systemctl restart svc.service"] = "Job for svc.service failed."
    with pytest.raises(UnitError, match=r"Job for svc\.service failed"):
        host.service.restore()
    assert host.lease == "active"


def test_a_baseline_that_cannot_start_is_not_held(host: Host) -> None:
    """Nothing of the sweep runs any more; a held service would only keep deploy.yml from repairing it."""
    host.take()
    host.apply()
    host.state = "failed"
    host.systemctl.failures["systemctl restart svc.service"] = "Job for svc.service failed."
    with pytest.raises(UnitError, match=r"lease are gone.*does not start.*failed\..*deploy\.yml"):
        host.service.restore()
    assert host.service.leftovers() == []
    assert host.lease == "inactive"


def test_a_drop_in_that_systemd_still_goes_by_is_wrong(host: Host) -> None:
    """The file is gone, but systemd was not told: what it calls the command is the drop-in's."""
    host.loaded = TRIAL
    host.run(TRIAL)
    host.systemctl.answers[f"{SHOW} DropInPaths"] = lambda: f"DropInPaths=/x.conf {host.service.dropin}\n"
    assert host.service.wrong() == [f"a sweep's drop-in that systemd still goes by, {host.service.dropin}"]


def test_a_process_that_runs_something_else_is_wrong(host: Host) -> None:
    host.run(TRIAL)
    assert host.service.wrong() == ["another command than deployed: argument 2 is '8', expected '16'"]


@pytest.mark.parametrize(("was_active", "verb"), [(True, "restart"), (False, "stop")])
def test_the_leases_script_restores_by_itself(host: Host, was_active: bool, verb: str) -> None:
    """Run by a real shell; only ``systemctl`` is a stand-in that writes down what it is asked."""
    host.take()
    claim = host.service.claim()
    assert claim is not None
    host.service._arm(replace(claim, was_active=was_active), 60)
    host.service.dropin.parent.mkdir()
    host.service.dropin.write_text(DROPIN)
    log = host.root / "log"
    stub = host.root / "bin" / "systemctl"
    stub.parent.mkdir()
    stub.write_text(f'#!/bin/sh\necho "$*" >> {log}\n')
    stub.chmod(0o755)
    path = f"{stub.parent}:{os.environ['PATH']}"
    subprocess.run(["/bin/sh", str(host.service.script)], check=True, env={"PATH": path})
    assert log.read_text().splitlines() == [
        "daemon-reload",
        "reset-failed svc.service",
        f"{verb} svc.service",
        "stop --no-block svc-sweep-lease.timer",
        "daemon-reload",
    ]
    assert host.service.leftovers() == []


def test_the_leases_script_tries_again_until_systemd_has_read_its_files(host: Host) -> None:
    host.take()
    host.apply()
    stub = host.root / "bin" / "systemctl"
    stub.parent.mkdir()
    stub.write_text(f'#!/bin/sh\necho "$*" >> {host.root}/log\n[ "$1" != daemon-reload ]\n')
    stub.chmod(0o755)
    path = f"{stub.parent}:{os.environ['PATH']}"
    run = subprocess.run(["/bin/sh", str(host.service.script)], check=False, env={"PATH": path})
    assert run.returncode == 1
    assert (host.root / "log").read_text().splitlines() == ["daemon-reload"]
    assert not host.service.dropin.exists()
    assert host.service.script.exists()
    unit = host.service.service.read_text()
    assert "Restart=on-failure" in unit
    stub.write_text(f'#!/bin/sh\necho "$*" >> {host.root}/log\n')
    subprocess.run(["/bin/sh", str(host.service.script)], check=True, env={"PATH": path})
    assert "restart svc.service" in (host.root / "log").read_text()  # the drop-in is gone, the process is not
    assert host.service.leftovers() == []


@pytest.mark.parametrize(
    ("applied", "restarts"), [(False, False), (True, True)], ids=["clean", "a trial's process, drop-in gone"]
)
def test_the_leases_script_restarts_what_may_run_another_command(
    host: Host, applied: bool, restarts: bool
) -> None:
    host.take("first")
    if applied:
        host.apply("first")
        host.take("second", from_token="first")
    assert not host.service.dropin.exists()
    stub = host.root / "bin" / "systemctl"
    stub.parent.mkdir()
    stub.write_text(f'#!/bin/sh\necho "$*" >> {host.root}/log\n')
    stub.chmod(0o755)
    path = f"{stub.parent}:{os.environ['PATH']}"
    subprocess.run(["/bin/sh", str(host.service.script)], check=True, env={"PATH": path})
    assert ("restart svc.service" in (host.root / "log").read_text()) is restarts


def test_check_mode_looks_and_writes_nothing(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    module = load("sweep_service")
    before = sorted(host.root.rglob("*"))
    arguments = {"token": "me", "from_token": "", "study": "s", "controller": "c", "lease_seconds": 60}
    assert module.claimed(host.service, arguments, check=True)["claimed"] is True
    assert module.restored(host.service, {"token": ""}, check=True)["found"] == []
    host.run(TRIAL)
    assert module.restored(host.service, {"token": ""}, check=True)["changed"] is True
    assert sorted(host.root.rglob("*")) == before
    assert host.systemctl.done() == []


def test_looking_says_which_sweep_has_the_service(host: Host) -> None:
    module = load("sweep_service")
    assert module.observed(host.service, {"token": ""}, check=False)["swept_by"] == ""
    host.take("first")
    host.apply("first")
    host.systemctl.calls.clear()
    assert module.observed(host.service, {"token": ""}, check=False)["swept_by"].startswith(
        "study s1 (controller a@b"
    )
    host.lease = "inactive"
    cut_off = module.observed(host.service, {"token": ""}, check=False)["swept_by"]
    assert cut_off.startswith("a sweep that was cut off and left ")
    assert str(host.service.dropin) in cut_off
    assert host.systemctl.done() == []


def test_the_module_says_who_holds_the_service(host: Host) -> None:
    host.take("first")
    module = load("sweep_service")
    arguments = {"token": "me", "from_token": "", "study": "s", "controller": "c", "lease_seconds": 60}
    result = module.claimed(host.service, arguments, check=False)
    assert result["claimed"] is False
    assert result["holder"]["study"] == "s1"
    assert result["changed"] is False


def test_no_sweep_begins_while_a_deployment_has_not_ended(host: Host) -> None:
    module = load("sweep_service")
    arguments = {"token": "me", "from_token": "", "study": "s", "controller": "c", "lease_seconds": 60}
    begun = module.deploying(host.service, NEW, check=False)
    assert begun["changed"] is False
    for check in (True, False):
        with pytest.raises(Deploying, match=r"that began at 20.* has not ended, or failed: .*deploy.yml"):
            module.claimed(host.service, arguments, check)
    assert not host.service.record.exists()
    assert host.systemctl.done() == []
    assert module.deployed(host.service, begun, check=False) == {"changed": False}
    host.take()


def test_restoring_leaves_a_deployment_alone(host: Host) -> None:
    module = load("sweep_service")
    begun = module.deploying(host.service, NEW, check=False)
    host.run(TRIAL)  # the unit is written, and the old process not restarted yet
    said = module.restored(host.service, {"token": ""}, check=False)
    assert (said["changed"], said["found"]) == (False, [])
    assert said["lines"][0].startswith("nothing to restore; a deployment that began at 20")
    assert host.systemctl.done() == []
    module.deployed(host.service, begun, check=False)
    assert module.restored(host.service, {"token": ""}, check=False)["changed"] is True


def test_no_deployment_begins_on_a_swept_service(host: Host) -> None:
    module = load("sweep_service")
    host.take("first")
    for check in (True, False):
        with pytest.raises(Taken, match=r"is held by study s1 \(controller a@b.*restore.yml first"):
            module.deploying(host.service, NEW, check)
    host.apply("first")
    host.lease = "inactive"
    with pytest.raises(Taken, match=r"by a sweep that was cut off and left .*90-sweep.conf"):
        module.deploying(host.service, NEW, check=False)
    assert not host.service.deploying.exists()


def test_the_last_deployment_decides_when_sweeps_may_begin(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = load("sweep_service")
    times = iter([1000.0, 1001.0])
    monkeypatch.setattr("ansible.module_utils.arborist_sweep.time.time", lambda: next(times))
    first = module.deploying(host.service, NEW, check=False)
    second = module.deploying(host.service, NEW, check=False)
    module.deployed(host.service, first, check=False)
    assert "1970-01-01T00:16:41.000Z" in host.service.unfinished()
    assert module.deploying(host.service, second, check=False) == second
    with pytest.raises(Deploying, match=r"has overtaken this one, which began at 1970-01-01T00:16:40"):
        module.deploying(host.service, first, check=False)
    module.deployed(host.service, second, check=False)
    assert host.service.unfinished() == ""


def test_a_deployment_that_was_held_up_writes_nothing_under_a_sweep(host: Host) -> None:
    module = load("sweep_service")
    held_up = module.deploying(host.service, NEW, check=False)
    module.deployed(host.service, module.deploying(host.service, NEW, check=False), check=False)
    with pytest.raises(Deploying, match="has overtaken this one"):
        module.deploying(host.service, held_up, check=False)
    host.take("first")
    with pytest.raises(Taken, match="is held by study s1"):
        module.deploying(host.service, held_up, check=False)


def test_a_dry_run_of_a_deployment_keeps_nobody_away(host: Host) -> None:
    module = load("sweep_service")
    begun = module.deploying(host.service, NEW, check=True)
    host.take()
    module.deployed(host.service, begun, check=True)


@pytest.mark.parametrize("then", ["inactive", "active"])
def test_a_lease_that_runs_out_while_it_is_disarmed_is_no_error(host: Host, then: str) -> None:
    host.take()
    states = iter(["active", then])
    host.systemctl.answers[LEASE] = lambda: f"ActiveState={next(states)}\n"
    host.systemctl.failures["systemctl stop svc-sweep-lease.timer"] = "it said no"
    if then == "active":
        with pytest.raises(UnitError, match="it said no"):
            host.service.restore()
    else:
        host.service.restore()
        assert host.service.leftovers() == []


def test_looking_says_why_a_sweep_has_lost_its_service(host: Host) -> None:
    module = load("sweep_service")
    host.take("me")
    assert module.observed(host.service, {"token": "me"}, check=False)["lost"] == ""
    host.take("other", from_token="me")
    lost = module.observed(host.service, {"token": "me"}, check=False)["lost"]
    assert lost.startswith("another sweep has taken svc.service over: study s1")
    host.service.restore()
    lost = module.observed(host.service, {"token": "me"}, check=False)["lost"]
    assert lost.startswith("this sweep no longer holds svc.service: restore.yml ended it")
