"""Real hosts, from boot to the last trace of them."""

from __future__ import annotations

import fnmatch
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.testhosts.conftest import Tool

SPACES = ("cgroup", "ipc", "mnt", "net", "pid", "uts")


def until(true: Callable[[], bool], what: str, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def below(top: Path, pattern: str) -> list[Path]:
    """As a recursive glob, which fails when a folder ends under it; hosts come and go here."""
    return [
        Path(folder) / name
        for folder, folders, files in os.walk(top)
        for name in fnmatch.filter((*folders, *files), pattern)
    ]


def groups(tool: Tool, name: str = "*") -> list[Path]:
    return below(Path("/sys/fs/cgroup"), f"arborist-{tool.bridge}-{name}")


def processes(tool: Tool, name: str) -> list[int]:
    found: set[int] = set()
    for path in [path for group in groups(tool, name) for path in below(group, "cgroup.procs")]:
        with suppress(OSError):  # the group has ended
            found.update(map(int, path.read_text().split()))
    return sorted(found)


def pids_of(tool: Tool, name: str, command: str) -> list[int]:
    """The host's processes of that name; its supervisor's is `sh`."""
    found = []
    for pid in processes(tool, name):
        with suppress(OSError):  # it has ended
            if Path(f"/proc/{pid}/comm").read_text().strip() == command:
                found.append(pid)
    return found


def kill(tool: Tool, name: str, command: str, number: signal.Signals = signal.SIGKILL) -> None:
    pids = pids_of(tool, name, command)
    assert pids
    for pid in pids:
        os.kill(pid, number)


def namespaces(pid: int) -> set[str]:
    """A process's namespaces, as `net:[4026532281]`, those left out that it shares with this process."""
    return _namespaces(pid) - _namespaces("self")


def _namespaces(pid: int | str) -> set[str]:
    with suppress(FileNotFoundError):  # it has ended
        return {str(Path(f"/proc/{pid}/ns/{kind}").readlink()) for kind in SPACES}
    return set()


def traces(tool: Tool, spaces: set[str]) -> list[str]:
    """What is left of hosts anywhere on the machine: in any process's view, not only in ours."""
    left = [f"cgroup {path}" for path in groups(tool)]
    left += [f"link {link.name}" for link in Path("/sys/class/net").glob(f"{tool.bridge}*")]
    left += [f"run {path}" for path in below(Path("/run/systemd"), f"*{tool.bridge}*")]
    left += [
        f"netns {path}" for path in Path("/run/netns").glob("*") if f"{path.stat().st_ino}]" in str(spaces)
    ]
    if (tool.state / "hosts").is_dir():
        left += [f"directory {path}" for path in (tool.state / "hosts").iterdir()]
    for process in Path("/proc").glob("[0-9]*"):
        try:
            held = namespaces(int(process.name)) & spaces
            mounts = (process / "mountinfo").read_text()
            words = (process / "cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue  # it has ended
        left += [f"process {process.name} in {space}" for space in held]
        left += [
            f"mount of {process.name}: {line}" for line in mounts.splitlines() if str(tool.state) in line
        ]
        left += [f"mount of {process.name}: {space}" for space in spaces if space in mounts]
        left += [f"process {process.name}: {words}"] if str(tool.state) in words else []
    return left


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("shared")
    (directory / "file").write_text("from outside\n")
    return directory


@pytest.fixture(scope="module")
def pair(tool: Tool, shared: Path) -> Iterator[list[str]]:
    """The words after `up` that n1 and n2 are up with."""
    words = [f"n1={tool.address(11)}", f"n2={tool.address(12)}", "--bind", f"{shared}:/srv/shared"]
    shown = tool.ok("up", *words)
    assert shown == f"n1 {tool.address(11)} started\nn2 {tool.address(12)} started\n"
    yield words
    tool.ok("down", "n1", "n2")


def test_systemd_is_pid_1_and_content(tool: Tool, pair: list[str]) -> None:
    for name in ("n1", "n2"):
        assert tool.inside(name, "cat /proc/1/comm; hostname; systemctl is-system-running").split() == [
            "systemd",
            name,
            "running",
        ]
    assert tool.inside("n1", "cat /etc/machine-id") != tool.inside("n2", "cat /etc/machine-id")


def test_list_tells_everything_a_caller_needs(tool: Tool, pair: list[str], shared: Path) -> None:
    assert tool.ok("list").split() == ["n1", tool.address(11), "running", "n2", tool.address(12), "running"]
    found = tool.host("n1")
    assert (found["address"], found["state"], found["supervised"]) == (tool.address(11), "running", True)
    assert found["binds"] == [f"{shared}:/srv/shared"]
    assert Path(f"/proc/{found['pid']}/comm").read_text() == "systemd\n"
    assert (Path("/sys/class/net") / found["link"]).exists()
    assert found["key"] == tool.ok("key").strip()


def test_ssh_logs_in_and_knows_the_host(tool: Tool, pair: list[str]) -> None:
    for name in ("n1", "n2"):
        found = tool.host(name)
        options = ["BatchMode=yes", "StrictHostKeyChecking=yes", f"UserKnownHostsFile={found['known_hosts']}"]
        words = ["ssh", "-F", "none", "-i", found["key"], *(f"-o{option}" for option in options)]
        words += [f"{found['user']}@{found['address']}", "hostname; id -u; systemctl is-active ssh"]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert done.stdout.split() == [name, "0", "active"], done.stderr


def test_hosts_reach_each_other_and_nothing_beyond(tool: Tool, pair: list[str]) -> None:
    greeting = "import socket, sys; print(socket.create_connection((sys.argv[1], 22), 5).recv(4).decode())"
    for name, other in (("n1", tool.address(12)), ("n2", tool.address(11))):
        assert tool.ok("exec", name, "python3", "-c", greeting, other) == "SSH-\n"
        beyond = tool.run("exec", name, "ip", "route", "get", "192.0.2.1")
        assert "Network is unreachable" in beyond.stderr
        routes = tool.inside(name, "ip route show table all type unicast | grep -v fe80").splitlines()
        assert [route.split()[0] for route in routes] == [str(tool.network)]


def test_the_hosts_have_namespaces_of_their_own(tool: Tool, pair: list[str]) -> None:
    first, second = (namespaces(tool.host(name)["pid"]) for name in ("n1", "n2"))
    assert len(first) == len(second) == len(SPACES)
    assert not first & second


def test_a_bind_is_read_only(tool: Tool, pair: list[str], shared: Path) -> None:
    assert tool.inside("n1", "cat /srv/shared/file") == "from outside\n"
    for script in ("echo x > /srv/shared/file", "touch /srv/shared/new", "rm /srv/shared/file"):
        done = tool.run("exec", "n1", "sh", "-c", script)
        assert done.returncode != 0
        assert "Read-only file system" in done.stderr
    assert [(path.name, path.read_text()) for path in shared.iterdir()] == [("file", "from outside\n")]


def test_exec_passes_input_arguments_and_exit_code(tool: Tool, pair: list[str]) -> None:
    assert tool.ok("exec", "n1", "cat", stdin="a line\n") == "a line\n"
    assert tool.ok("exec", "n1", "--", "printf", "%s|", "a b", "$HOME", "--", "-x") == "a b|$HOME|--|-x|"
    assert tool.run("exec", "n1", "sh", "-c", "exit 42").returncode == 42
    assert tool.run("exec", "n1", "no-such-command").returncode == 127
    assert tool.run("exec", "n3", "true").returncode == 125


def test_exec_runs_as_root_in_the_host_alone(tool: Tool, pair: list[str]) -> None:
    leader = tool.host("n1")["pid"]
    inside = tool.inside("n1", "id -u; echo $HOME; cd /proc/self/ns; readlink " + " ".join(SPACES))
    assert inside.split()[:2] == ["0", "/root"]
    assert set(inside.split()[2:]) == namespaces(leader)
    assert "ARBORIST_TESTHOSTS" not in tool.ok("exec", "n1", "env")
    assert tool.inside("n1", "grep ^0:: /proc/self/cgroup") == "0::/testhosts.exec\n"


def test_the_journal_outlives_a_reboot(tool: Tool, pair: list[str]) -> None:
    tool.inside(
        "n1", "logger -t before the-mark; journalctl --sync; mountpoint -q /var/log/journal && exit 1 || :"
    )
    boot = tool.inside(
        "n1", "cat /proc/sys/kernel/random/boot_id; journalctl -q --list-boots | wc -l"
    ).split()[1]
    leader = tool.host("n1")["pid"]
    tool.ok("exec", "n1", "systemctl", "reboot")
    until(lambda: tool.host("n1")["pid"] not in (None, leader), "n1 did not boot again")
    until(lambda: bool(tool.host("n1")["state"] == "running"), "n1 is not up again")
    assert int(tool.inside("n1", "journalctl -q --list-boots | wc -l")) == int(boot) + 1
    assert tool.inside("n1", "journalctl -q -b -1 -t before -o cat") == "the-mark\n"
    assert tool.inside("n1", "journalctl -q -b 0 -t before -o cat") == ""
    assert tool.address(11) in tool.inside("n1", "ip -4 -o addr show eth0")


def test_a_command_from_outside_cannot_hold_up_a_reboot(tool: Tool, pair: list[str]) -> None:
    """A host that shuts down stops all its processes for a moment; here one is stopped for longer."""
    with subprocess.Popen(tool.argv("exec", "n1", "sleep", "1000"), env=tool.environment) as process:
        try:
            until(lambda: bool(pids_of(tool, "n1", "sleep")), "the command did not start")
            leader = tool.host("n1")["pid"]
            kill(tool, "n1", "sleep", signal.SIGSTOP)
            tool.ok("exec", "n1", "systemctl", "reboot", "--force")
            until(lambda: tool.host("n1")["pid"] not in (None, leader), "n1 did not boot again")
            assert process.wait() != 0
        finally:
            process.kill()
    until(lambda: bool(tool.host("n1")["state"] == "running"), "n1 is not up again")


def test_up_again_changes_nothing(tool: Tool, pair: list[str]) -> None:
    before = [tool.host(name)["pid"] for name in ("n1", "n2")]
    assert tool.ok("up", *pair) == f"n1 {tool.address(11)} already up\nn2 {tool.address(12)} already up\n"
    assert [tool.host(name)["pid"] for name in ("n1", "n2")] == before


def test_a_clash_is_refused_and_hurts_nobody(tool: Tool, pair: list[str]) -> None:
    binds = pair[2:]
    assert f"n1 is already up at {tool.address(11)}" in tool.refused("up", f"n1={tool.address(13)}", *binds)
    assert f"n1 is already up at {tool.address(11)} with --bind" in tool.refused(
        "up", f"n1={tool.address(11)}"
    )
    said = tool.refused("up", f"n3={tool.address(12)}", *binds)
    assert f"n3: {tool.address(12)} is the address of n2, which is up" in said
    assert [item["name"] for item in json.loads(tool.ok("list", "--json"))] == ["n1", "n2"]
    assert tool.host("n2")["state"] == "running"


def test_other_hosts_bridge_and_network_are_respected(tool: Tool, pair: list[str], tmp_path: Path) -> None:
    other = tool.other(**{"": str(tmp_path)})
    said = other.refused("up", f"n4={tool.address(14)}")
    assert f"the link {tool.bridge} is there and belongs to {tool.state}, not to {tmp_path}" in said
    other = other.other(_BRIDGE="u" + tool.bridge[1:])
    said = other.refused("up", f"n4={tool.address(14)}")
    assert f"{tool.network} overlaps {tool.network} of this machine's {tool.bridge}" in said
    other = tool.other(_NETWORK="10.91.7.0/24")
    said = other.refused("up", "n4=10.91.7.14")
    assert f"the bridge {tool.bridge} is up with {tool.address(1)}/24, not with 10.91.7.1/24" in said


def test_a_state_directory_on_an_overlay_is_refused(tool: Tool, tmp_path: Path) -> None:
    for name in ("lower", "upper", "work", "merged"):
        (tmp_path / name).mkdir()
    mount = "mount -t overlay x -o lowerdir=lower,upperdir=upper,workdir=work merged"
    script = f'cd {tmp_path}; {mount}; exec "$@"'
    other = tool.other("unshare", "--mount", "sh", "-ec", script, "x", **{"": f"{tmp_path}/merged"})
    assert "lies on an overlay" in other.refused("up", f"n4={tool.address(14)}")


# --- the end of hosts: each test below starts with none -----------------------------------------------------


@pytest.fixture
def alone(tool: Tool) -> Iterator[list[str]]:
    """The words after `up` for n5 and n6; none is up."""
    tool.ok("down", "--all")
    assert traces(tool, set()) == []
    yield [f"n5={tool.address(15)}", f"n6={tool.address(16)}"]
    tool.ok("down", "--all")


def spaces_of(tool: Tool, *names: str) -> set[str]:
    """The namespaces of all processes of these hosts, the supervisors' too."""
    return {space for name in names for pid in processes(tool, name) for space in namespaces(pid)}


def test_down_leaves_no_trace(tool: Tool, alone: list[str]) -> None:
    tool.ok("up", *alone)
    spaces = spaces_of(tool, "n5", "n6")
    held = traces(tool, spaces)
    for kind in ("cgroup", "link", "process", "mount", "directory"):  # the search finds what is there
        assert any(line.startswith(kind) for line in held), kind
    tool.ok("down", "n5")
    assert tool.host("n6")["state"] == "running"
    assert (Path("/sys/class/net") / tool.bridge).exists()
    tool.ok("down", "n6")
    assert traces(tool, spaces) == []
    assert tool.ok("list") == ""
    tool.ok("down", "n5", "n6", "never")


def test_a_host_outlives_its_supervisor_and_ends_at_its_reboot(tool: Tool, alone: list[str]) -> None:
    tool.ok("up", *alone)
    spaces = spaces_of(tool, "n5", "n6")
    kill(tool, "n5", "sh")
    found = tool.host("n5")
    assert (found["state"], found["supervised"]) == ("running", False)
    assert "its supervisor is gone" in tool.ok("list")
    assert tool.inside("n5", "systemctl is-system-running") == "running\n"
    tool.ok("exec", "n5", "systemctl", "reboot")
    until(lambda: bool(tool.host("n5")["state"] == "stopped"), "n5 did not end")
    assert tool.ok("up", *alone).split()[2::3] == ["started", "already"]
    kill(tool, "n5", "sh")
    tool.ok("down", "--all")
    assert traces(tool, spaces) == []


def test_a_host_ends_with_its_container_manager(tool: Tool, alone: list[str]) -> None:
    tool.ok("up", alone[0])
    tool.inside("n5", "echo kept > /root/file")
    spaces = spaces_of(tool, "n5")
    kill(tool, "n5", "systemd-nspawn")
    until(lambda: bool(tool.host("n5")["state"] == "stopped"), "n5 was left half alive")
    assert processes(tool, "n5") == []
    tool.ok("up", alone[0])
    assert tool.inside("n5", "cat /root/file") == "kept\n"
    spaces |= spaces_of(tool, "n5")
    tool.ok("down", "n5")
    assert traces(tool, spaces) == []


def test_down_finds_a_host_of_which_supervisor_and_manager_are_killed(tool: Tool, alone: list[str]) -> None:
    tool.ok("up", alone[0])
    spaces = spaces_of(tool, "n5")
    kill(tool, "n5", "sh")
    kill(tool, "n5", "systemd-nspawn")
    assert tool.host("n5")["state"] == "running"
    tool.ok("down", "n5")
    assert traces(tool, spaces) == []


def test_down_finds_hosts_whose_directory_is_gone(tool: Tool, alone: list[str]) -> None:
    tool.ok("up", alone[0])
    spaces = spaces_of(tool, "n5")
    subprocess.run(["rm", "-rf", str(tool.state / "hosts" / "n5")], check=True)
    assert tool.ok("list").split() == ["n5", "-", "running"]
    tool.ok("down", "--all")
    assert traces(tool, spaces) == []


@pytest.mark.parametrize("seconds", [0.05, 0.15, 0.25, 0.35])
def test_down_cleans_up_after_a_killed_up(tool: Tool, alone: list[str], seconds: float) -> None:
    process = subprocess.Popen(tool.argv("up", *alone), env=tool.environment, stderr=subprocess.DEVNULL)
    time.sleep(seconds)
    process.kill()
    process.wait()
    spaces = spaces_of(tool, "n5", "n6")
    tool.ok("down", "--all")
    assert traces(tool, spaces) == []


def test_two_at_once_do_not_disturb_each_other(tool: Tool, alone: list[str]) -> None:
    both = [subprocess.Popen(tool.argv("up", words), env=tool.environment) for words in alone]
    assert [process.wait() for process in both] == [0, 0]
    assert tool.ok("list").split()[2::3] == ["running", "running"]
    both = [subprocess.Popen(tool.argv("down", name), env=tool.environment) for name in ("n5", "n6")]
    assert [process.wait() for process in both] == [0, 0]
    assert traces(tool, set()) == []


def test_keep_keeps_the_disk_and_nothing_else(tool: Tool, alone: list[str]) -> None:
    tool.ok("up", alone[0])
    tool.inside(
        "n5", "echo installed > /opt/file; rm /usr/bin/hostnamectl; cat /etc/ssh/*_ed25519_key.pub > /opt/key"
    )
    spaces = spaces_of(tool, "n5")
    tool.ok("down", "--keep", "n5")
    kept = f"directory {tool.state}/hosts/n5"
    assert traces(tool, spaces) == [kept]
    found = tool.host("n5")
    assert (found["state"], found["pid"], found["link"]) == ("stopped", None, None)
    assert tool.ok("up", f"n5={tool.address(17)}") == f"n5 {tool.address(17)} started\n"
    assert tool.inside(
        "n5", "cat /opt/file; test ! -e /usr/bin/hostnamectl; cmp /etc/ssh/*_ed25519_key.pub /opt/key"
    )
    assert "Reached target poweroff.target" in tool.inside("n5", "journalctl -q -b -1 -o cat")
    tool.ok("down", "n5")
    assert traces(tool, spaces) == []


def test_a_kept_disk_of_another_template_is_discarded(tool: Tool, alone: list[str]) -> None:
    tool.ok("up", alone[0])
    tool.inside("n5", "echo installed > /opt/file")
    tool.ok("down", "--keep", "n5")
    record = tool.state / "hosts" / "n5" / "host.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "template": "another"}))
    done = tool.run("up", alone[0])
    assert done.returncode == 0
    assert "n5: its kept disk was made on another template and is discarded" in done.stderr
    assert tool.run("exec", "n5", "test", "-e", "/opt/file").returncode == 1


def test_a_powered_off_host_is_stopped_and_boots_again(tool: Tool, alone: list[str]) -> None:
    tool.ok("up", alone[0])
    tool.ok("exec", "n5", "systemctl", "poweroff")
    until(lambda: bool(tool.host("n5")["state"] == "stopped"), "n5 did not end")
    assert tool.ok("up", alone[0]) == f"n5 {tool.address(15)} started\n"


def test_a_host_that_cannot_boot_is_told_with_its_console(tool: Tool, alone: list[str]) -> None:
    tool.ok("up", alone[0])
    tool.inside("n5", "rm /sbin/init /lib/systemd/systemd; ln -s /bin/false /sbin/init")
    tool.ok("down", "--keep", "n5")
    assert "n5 died while booting: " in tool.refused("up", alone[0])
    assert tool.host("n5")["state"] == "stopped"


def test_a_degraded_host_is_told(tool: Tool, alone: list[str]) -> None:
    tool.ok("up", alone[0])
    unit = "[Service]\\nExecStart=/bin/false\\n[Install]\\nWantedBy=multi-user.target\\n"
    tool.inside("n5", f"printf '{unit}' > /etc/systemd/system/broken.service; systemctl enable broken")
    tool.ok("down", "--keep", "n5")
    done = tool.run("up", alone[0])
    assert done.returncode == 0
    assert "n5 is degraded: broken.service" in done.stderr


def test_it_works_on_a_machine_with_cgroup_v2_alone(tool: Tool, alone: list[str]) -> None:
    """On a hybrid machine: in a mount namespace that shows it as a pure one."""
    pure = 'umount -R /sys/fs/cgroup; mount -t cgroup2 cgroup2 /sys/fs/cgroup; exec "$@"'
    other = tool.other("unshare", "--mount", "sh", "-ec", pure, "x")
    other.ok("up", alone[0])
    leader = other.host("n5")["pid"]
    spaces = namespaces(leader)
    other.ok("exec", "n5", "systemctl", "reboot")
    until(lambda: other.host("n5")["pid"] not in (None, leader), "n5 did not boot again")
    until(lambda: bool(other.host("n5")["state"] == "running"), "n5 is not up again")
    assert other.inside("n5", "systemctl show -p ControlGroup --value ssh") == "/system.slice/ssh.service\n"
    other.ok("down", "--keep", "n5")
    other.ok("down", "--all")
    assert traces(tool, spaces) == []
