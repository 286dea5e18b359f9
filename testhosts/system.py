"""What the tool asks of its machine: commands, locks, and plain words when something is missing."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

#: Command -> Debian package that brings it.
COMMANDS = {
    "mmdebstrap": "mmdebstrap",
    "systemd-nspawn": "systemd-container",
    "ip": "iproute2",
    "ssh-keygen": "openssh-client",
}
#: What mmdebstrap checks Debian's signatures with; on Ubuntu it is not there by itself.
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")


class Problem(Exception):
    """Something the user can act on; its text says what was found and what to change."""


def say(text: str) -> None:
    """Tell the user about progress, on stderr."""
    print(f"testhosts: {text}", file=sys.stderr, flush=True)


def run(argv: Sequence[str | Path], *, stdin: str = "") -> str:
    """Run a command and return its stdout; a failure becomes a Problem that carries its stderr."""
    words = [str(word) for word in argv]
    try:
        done = subprocess.run(words, input=stdin, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise Problem(f"there is no {words[0]} here; `testhosts deps` installs what is needed") from None
    if done.returncode:
        detail = done.stderr.strip() or done.stdout.strip() or "no message"
        raise Problem(f"`{' '.join(words)}` failed ({done.returncode}): {detail}")
    return done.stdout


def require_root() -> None:
    """Refuse to go on as anyone but root."""
    if os.geteuid() != 0:
        raise Problem(
            "this needs root (mounts, namespaces, cgroups), "
            f"and runs as user id {os.geteuid()}: use sudo or a root shell"
        )


def require_apt() -> None:
    """Refuse to go on where the hosts' packages cannot come from."""
    if shutil.which("apt-get") is None:
        raise Problem("this needs a Debian-family machine: there is no apt-get here")


def missing_packages() -> list[str]:
    """Return the packages of which this machine lacks what is used."""
    missing = [package for command, package in COMMANDS.items() if shutil.which(command) is None]
    return sorted(missing if KEYRING.exists() else [*missing, "debian-archive-keyring"])


def require_all() -> None:
    """Refuse to go on unless everything `up` and `template` use is here."""
    require_root()
    require_apt()
    if missing := missing_packages():
        raise Problem(f"missing packages: {' '.join(missing)}; install them with `testhosts deps`")
    probe = subprocess.run(
        ["unshare", "--mount", "--net", "true"], capture_output=True, text=True, check=False
    )
    if probe.returncode:
        raise Problem(
            "root may not make mount and network namespaces here "
            f"({probe.stderr.strip()}): run on a machine, or in a privileged container"
        )


def install_packages() -> list[str]:
    """Install what is missing and return its names."""
    require_root()
    require_apt()
    missing = missing_packages()
    if missing:
        os.environ["DEBIAN_FRONTEND"] = "noninteractive"
        run(["apt-get", "update", "-qq"])
        run(["apt-get", "install", "-y", "-qq", "--no-install-recommends", *missing])
    return missing


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file; the kernel lets go of it when the holder dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def write_whole(path: Path, text: str, mode: int = 0o644) -> None:
    """Write a file so that a reader sees the old text or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    part.write_text(text)
    part.chmod(mode)
    part.rename(path)


def remove_tree(path: Path) -> None:
    """Remove a directory without ever crossing into a mount below it."""
    run(["rm", "-rf", "--one-file-system", path])
