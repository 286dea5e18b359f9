"""Hosts: boot, find, enter, stop.

A host is a supervisor (a small shell loop), below it systemd-nspawn, below that the host's systemd. Its
overlay is mounted, and its network made, in namespaces of the supervisor's own: both are gone when the last
process is, whatever it died of. If the supervisor is killed, the host goes on, and ends at its next reboot;
if systemd-nspawn is, the supervisor ends the host.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address
from pathlib import Path
from tempfile import mkdtemp

from . import network, template
from .cgroups import KEEPER, Group, names
from .settings import PREFIX, Bind, Request, Settings
from .system import Problem, locked, remove_tree, run, say, write_whole

# systemd-nspawn under --keep-unit ends with 133 to be started again: the host asked for a reboot.
# A boot gets a new group below the host's, as the last one's may hold controllers and thus no processes.
SUPERVISOR = """\
for group in $GROUPS; do echo $$ >"$group/$KEEPER/cgroup.procs"; done
echo ready >&0
read -r go
exec </dev/null
mkdir -p /run/systemd/nspawn
mount -t tmpfs testhosts /run/systemd/nspawn
mount -t overlay "$MACHINE" -o "lowerdir=$LOWER,upperdir=upper,workdir=work" root
boot=0 status=133
while [ "$status" -eq 133 ]; do
    boot=$((boot + 1)) status=0
    for group in $GROUPS; do mkdir "$group/boot-$boot"; done
    sh -ec 'for group in $GROUPS; do echo $$ >"$group/$0/cgroup.procs"; done; exec "$@"' \\
        "boot-$boot" "$@" || status=$?
    # Nothing is left, unless systemd-nspawn was killed.
    for group in $GROUPS; do find "$group/boot-$boot" -name cgroup.procs -exec cat {} +; done |
        xargs -r kill -9 || :
done
exit "$status"
"""
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
INSIDE = {"PATH": PATH, "HOME": "/root", "USER": "root", "SHELL": "/bin/bash", "LANG": "C.UTF-8"}


@dataclass(frozen=True)
class Record:
    """What a host was started with."""

    address: IPv4Address
    binds: tuple[Bind, ...]
    template: str

    def dump(self) -> str:
        """Return it as JSON."""
        binds = [[str(bind.source), bind.target] for bind in self.binds]
        return json.dumps({"address": str(self.address), "binds": binds, "template": self.template}) + "\n"

    @classmethod
    def load(cls, text: str) -> Record:
        """Read it from JSON."""
        data = json.loads(text)
        binds = tuple(Bind(Path(source), target) for source, target in data["binds"])
        return cls(IPv4Address(data["address"]), binds, data["template"])


class Host:
    """One host by name, whether it is there or not."""

    def __init__(self, settings: Settings, name: str) -> None:
        self.settings = settings
        self.name = name
        self.directory = settings.hosts / name
        self.machine = f"{settings.bridge}-{name}"
        self.group = Group(group_prefix(settings) + name)

    @property
    def console(self) -> Path:
        """What the host printed on its console since it was started."""
        return self.directory / "console.log"

    @property
    def public_key(self) -> Path:
        """The public half of the host's own ssh key."""
        return self.directory / "upper/etc/ssh/ssh_host_ed25519_key.pub"

    def record(self) -> Record | None:
        """Return what it was started with; None when there is no such host."""
        path = self.directory / "host.json"
        return Record.load(path.read_text()) if path.exists() else None

    def running(self) -> bool:
        """Say whether any of its processes lives."""
        return not self.group.empty()

    def state(self) -> str:
        """Return `stopped`, `starting` or what its systemd says: `running`, `degraded`, `stopping`, …"""
        if not self.running():
            return "stopped"
        leader = self.group.leader()
        if leader is None:
            return "starting"
        words = [*enter(leader), "systemctl", "is-system-running"]
        done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        return done.stdout.strip() or "starting"

    def describe(self) -> dict[str, object]:
        """Return everything a caller needs to reach it."""
        record = self.record()
        state = self.state()
        return {
            "name": self.name,
            "address": str(record.address) if record else None,
            "state": state,
            "supervised": self.group.supervisor() is not None,
            "pid": self.group.leader(),
            "link": network.link_name(self.settings, self.name) if state != "stopped" else None,
            "binds": [f"{bind.source}:{bind.target}" for bind in record.binds] if record else [],
            "directory": str(self.directory),
            "user": "root",
            "key": str(self.settings.key),
            "known_hosts": str(self.settings.known_hosts),
        }


def group_prefix(settings: Settings) -> str:
    """Return what the control groups of all hosts on this bridge begin with."""
    return f"arborist-{settings.bridge}-"


def enter(leader: int) -> list[str]:
    """Return the words that run what follows them inside the host, as root, with a clean environment.

    nsenter must not do the last step, into the pid namespace, itself: it waits for the command as a shell
    with job control does, and stops along with it. A host that shuts down first stops all it runs: nsenter
    would then sleep for ever, and so would the host, which waits until all its processes are reaped.
    """
    variables = [f"{key}={value}" for key, value in INSIDE.items()]
    spaces = ["--mount", "--uts", "--ipc", "--net", "--pid", "--cgroup"]
    words = ["nsenter", "--no-fork", "--target", str(leader), *spaces, "--", "env", "-i", *variables]
    return [*words, "sh", "-c", '"$@"; exit $?', "sh"]


def every(settings: Settings) -> list[Host]:
    """Return all hosts that have a directory here or a control group, by name."""
    found = names(group_prefix(settings))
    if settings.hosts.is_dir():
        found |= {path.name for path in settings.hosts.iterdir() if not path.name.startswith(".")}
    return [Host(settings, name) for name in sorted(found)]


def ensure_key(settings: Settings) -> Path:
    """Return the private key's path, making the pair on first use."""
    with locked(settings.lock):
        _ensure_key(settings)
    return settings.key


def _ensure_key(settings: Settings) -> None:
    if not settings.key.exists():
        run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "testhosts", "-f", settings.key])


def up(settings: Settings, requests: Sequence[Request], binds: Sequence[Bind]) -> dict[str, bool]:
    """Boot the hosts and wait until their systemd is done; return for each whether it was started now.

    A host that is up with the same address and binds is left alone; a stopped one boots from its disk.
    """
    base = template.ensure(settings)
    started: dict[str, bool] = {}
    with locked(settings.lock):
        _refuse_filesystem(settings)
        _ensure_key(settings)
        hosts = [(Host(settings, request.name), request) for request in requests]
        for host, request in hosts:
            _refuse_clash(host, request, binds)
        network.ensure_bridge(settings)
        try:
            for host, request in hosts:
                started[host.name] = not host.running()
                if started[host.name]:
                    _start(host, Record(request.address, tuple(binds), base.identity), base)
        finally:
            _write_known_hosts(settings)
    for host, _ in hosts:
        _wait(host)
    return started


def _refuse_filesystem(settings: Settings) -> None:
    kind = run(["stat", "--file-system", "--format=%T", settings.state]).strip()
    if kind == "overlayfs":
        raise Problem(
            f"{settings.state} lies on an overlay (a container's own disk?), which cannot carry another one: "
            f"set {PREFIX} to a directory on an ordinary filesystem or a tmpfs"
        )


def _refuse_clash(host: Host, request: Request, binds: Sequence[Bind]) -> None:
    for other in every(host.settings):
        record = other.record()
        if record is None or not other.running():
            continue
        if other.name != host.name and record.address == request.address:
            raise Problem(f"{host.name}: {request.address} is the address of {other.name}, which is up")
        if other.name == host.name and (record.address, record.binds) != (request.address, tuple(binds)):
            shown = " ".join(f"--bind {bind.source}:{bind.target}" for bind in record.binds) or "no binds"
            raise Problem(
                f"{host.name} is already up at {record.address} with {shown}; "
                f"ask for the same, or stop it first: testhosts down {host.name}"
            )


def _start(host: Host, record: Record, base: template.Template) -> None:
    host.group.remove()
    old = host.record()
    if old is not None and old.template != record.template:
        say(f"{host.name}: its kept disk was made on another template and is discarded")
        _discard(host)
    _prepare_disk(host, record)
    host.group.create()
    try:
        _spawn(host, record, base)
    except BaseException:
        host.group.remove()
        raise


def _prepare_disk(host: Host, record: Record) -> None:
    """Write the host's own files straight into the overlay's upper layer, before it is mounted."""
    for name in ("upper", "work", "root"):
        (host.directory / name).mkdir(parents=True, exist_ok=True)
    etc = host.directory / "upper/etc"
    (etc / "ssh").mkdir(parents=True, exist_ok=True)
    if not (etc / "machine-id").exists():
        write_whole(etc / "machine-id", uuid.uuid4().hex + "\n", 0o444)
    if not host.public_key.exists():
        private = host.public_key.with_suffix("")
        run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", host.name, "-f", private])
    write_whole(etc / "hostname", f"{host.name}\n")
    write_whole(etc / "hosts", f"127.0.0.1 localhost\n::1 localhost\n{record.address} {host.name}\n")
    for home in (host.directory / "upper/root", host.directory / "upper/root/.ssh"):
        home.mkdir(mode=0o700, exist_ok=True)
    public = host.settings.key.with_suffix(".pub").read_text()
    write_whole(host.directory / "upper/root/.ssh/authorized_keys", public, 0o600)
    write_whole(host.directory / "host.json", record.dump())


def _nspawn(host: Host, record: Record) -> list[str]:
    return [
        "systemd-nspawn",
        "--quiet",
        "--boot",
        f"--directory={host.directory}/root",
        f"--machine={host.machine}",
        f"--hostname={host.name}",
        # No machined and no systemd of this machine's is asked for anything.
        "--register=no",
        "--keep-unit",
        "--network-namespace-path=/proc/self/ns/net",
        "--console=pipe",
        "--resolv-conf=off",
        "--timezone=off",
        "--link-journal=no",
        *(f"--bind-ro={bind.source}:{bind.target}" for bind in record.binds),
    ]


def _spawn(host: Host, record: Record, base: template.Template) -> None:
    """Start the supervisor; it waits for its network before it boots the host, and goes when we die first."""
    ours, theirs = socket.socketpair()
    environment = {
        "PATH": PATH,
        "GROUPS": " ".join(map(str, host.group.directories)),
        "KEEPER": KEEPER,
        "MACHINE": host.machine,
        "LOWER": str(base.root),
        "SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": "1",
        "SYSTEMD_NSPAWN_TMPFS_TMP": "0",  # /tmp on the disk, as Debian has it
    }
    # Slave: what this machine unmounts later is not held by the host.
    words = ["unshare", "--mount", "--net", "--propagation", "slave", "sh", "-ec", SUPERVISOR, "testhosts"]
    with ours, theirs, host.console.open("wb") as console:
        child = subprocess.Popen(
            [*words, *_nspawn(host, record)],
            stdin=theirs.fileno(),
            stdout=console,
            stderr=console,
            cwd=host.directory,
            env=environment,
            start_new_session=True,
        )
        theirs.close()
        ours.settimeout(10)
        if ours.recv(16) != b"ready\n":
            raise Problem(f"the supervisor of {host.name} did not start: {_tail(host)}")
        network.attach(host.settings, host.name, record.address, child.pid)
        ours.sendall(b"go\n")


def _tail(host: Host) -> str:
    lines = host.console.read_text(errors="replace").strip().splitlines()
    return "\n".join(lines[-8:]) or f"nothing on its console ({host.console})"


def _wait(host: Host, timeout: float = 180.0) -> None:
    deadline = time.monotonic() + timeout
    while True:
        state = host.state()
        if state == "running":
            return
        if state == "degraded":
            leader = host.group.leader()
            words = ["systemctl", "--failed", "--no-legend", "--plain"]
            say(f"{host.name} is degraded: {run([*enter(leader), *words]).strip() if leader else 'gone'}")
            return
        if state == "stopped":
            raise Problem(f"{host.name} died while booting: {_tail(host)}")
        if time.monotonic() > deadline:
            raise Problem(f"{host.name} is still '{state}' after {timeout:.0f} s: {_tail(host)}")
        time.sleep(0.05)


def down(hosts: Sequence[Host], settings: Settings, *, keep: bool) -> None:
    """Stop hosts and leave nothing of them but, with `keep`, their disks; hosts not there are fine."""
    if keep:
        _power_off(hosts)
    with locked(settings.lock):
        for host in hosts:
            host.group.remove()
            network.detach(settings, host.name)
            if not keep:
                _discard(host)
        for leftover in settings.hosts.glob(".gone-*"):
            remove_tree(leftover)
        _write_known_hosts(settings)
        network.remove_idle_bridge(settings)


def _power_off(hosts: Sequence[Host], timeout: float = 20.0) -> None:
    """Let the hosts shut down in order, for the sake of what they still have to write."""
    for host in hosts:
        leader = host.group.leader()
        if leader is not None:
            os.kill(leader, signal.SIGRTMIN + 4)  # systemd(1): start poweroff.target
    deadline = time.monotonic() + timeout
    while any(host.running() for host in hosts):
        if time.monotonic() > deadline:
            late = " ".join(host.name for host in hosts if host.running())
            say(f"{late}: not powered off after {timeout:.0f} s, killed")
            return
        time.sleep(0.02)


def _discard(host: Host) -> None:
    """Remove the host's directory; a cut in the middle leaves no half disk under its name."""
    if host.directory.exists():
        gone = Path(mkdtemp(prefix=".gone-", dir=host.settings.hosts))
        host.directory.rename(gone / host.name)
        remove_tree(gone)


def _write_known_hosts(settings: Settings) -> None:
    lines = []
    for host in every(settings):
        record = host.record()
        if record is not None and host.public_key.exists():
            kind, key, *_ = host.public_key.read_text().split()
            lines.append(f"{record.address} {kind} {key}\n")
    write_whole(settings.known_hosts, "".join(lines), 0o600)


def execute(host: Host, command: Sequence[str]) -> None:
    """Become the command, inside the host, in its control group."""
    leader = host.group.leader()
    if leader is None:
        raise Problem(f"{host.name} is not up")
    # /proc/PID/cgroup of a cgroup v2 member: 0::/<host's group>/boot-1/payload/init.scope
    lines = Path(f"/proc/{leader}/cgroup").read_text().splitlines()
    own = next(line for line in lines if line.startswith("0::"))
    _, _, below = own.partition(f"/{host.group.directories[0].name}/")
    payload = host.group.directories[0] / Path(below).parent
    group = payload / "testhosts.exec"
    group.mkdir(exist_ok=True)
    (group / "cgroup.procs").write_text(str(os.getpid()))
    terminal = os.environ.get("TERM", "dumb")
    words = [*enter(leader), "env", f"TERM={terminal}", *command]
    os.execvp(words[0], words)
