"""The one tree that every host is an overlay of: built once by mmdebstrap, cached outside the repository."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp

from .settings import PREFIX, Settings
from .system import Problem, locked, remove_tree, say

#: Raise it when RECIPE changes what ends up in the tree.
VERSION = 1

MASKED = (
    "systemd-firstboot.service getty.target console-getty.service systemd-timesyncd.service apt-daily.timer"
    " apt-daily-upgrade.timer dpkg-db-backup.timer e2scrub_all.timer fstrim.timer"
)
# Nobody reads these in a throw-away host. The dpkg settings are there only for the second of mmdebstrap's two
# rounds: given as --dpkgopt they send the first one, archive by archive, through a slow filter.
UNREAD = ("man", "doc", "locale", "info", "lintian")
EXCLUDES = "".join(f"path-exclude=/usr/share/{name}/*\\n" for name in UNREAD)
RECIPE = (
    "--mode=root",
    "--variant=minbase",
    '--aptopt=Apt::Install-Recommends "false"',
    # The tree is thrown away when its build is cut short, so dpkg need not sync each file.
    "--dpkgopt=force-unsafe-io",
    f"--extract-hook=printf '{EXCLUDES}' > \"$1\"/etc/dpkg/dpkg.cfg.d/unread",
    f'--customize-hook=cd "$1"/usr/share && rm -rf {" ".join(f"{name}/*" for name in UNREAD)}',
    # Each host gets its own name, machine id and host key.
    '--customize-hook=rm -f "$1"/etc/hostname "$1"/etc/resolv.conf "$1"/etc/ssh/ssh_host_*',
    '--customize-hook=: > "$1"/etc/machine-id',
    '--customize-hook=echo "HostKey /etc/ssh/ssh_host_ed25519_key" > "$1"/etc/ssh/sshd_config.d/10-key.conf',
    # journald keeps its journal on the disk as soon as this directory is there.
    '--customize-hook=mkdir -p "$1"/var/log/journal',
    f'--customize-hook=chroot "$1" systemctl --quiet mask {MASKED}',
)
# Makes the merged /usr at once, where else a package full of Perl converts it later.
MERGED_USR = Path("/usr/share/mmdebstrap/hooks/merged-usr")
# dpkg syncs its files at every step: on a busy disk that is most of the time, in memory it is nothing.
IN_MEMORY = """\
cd "$0"
mkdir memory
mount -t tmpfs -o mode=755 testhosts memory
"$@"
cp -a memory/root root
umount memory
rmdir memory
sync -f root
"""


@dataclass(frozen=True)
class Template:
    """A finished tree; `identity` changes with every build."""

    root: Path
    identity: str


def _directory(settings: Settings) -> Path:
    parts = [VERSION, settings.suite, settings.packages, settings.mirror, RECIPE]
    digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
    return settings.templates / f"{settings.suite}-{digest[:12]}"


def ensure(settings: Settings) -> Template:
    """Return the template for these settings, building it when it is not there yet.

    A directory under its final name is complete: it gets there by one rename after the build. A second
    process waits for the first one's build.
    """
    directory = _directory(settings)
    if not directory.is_dir():
        with locked(settings.templates / "lock"):
            if not directory.is_dir():
                _build(settings, directory)
    facts = json.loads((directory / "template.json").read_text())
    return Template(directory / "root", facts["identity"])


def _build(settings: Settings, directory: Path) -> None:
    for leftover in settings.templates.glob(".build-*"):
        remove_tree(leftover)
    begun = time.monotonic()
    say(f"building the {settings.suite} template (once) in {directory}")
    part = Path(mkdtemp(prefix=".build-", dir=settings.templates))
    part.chmod(0o755)
    # In namespaces of its own, and tied to this process: however the build ends, no mount or process stays.
    words = ["setpriv", "--pdeathsig", "KILL"]
    words += ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    words += ["sh", "-ec", IN_MEMORY, str(part)]
    words += ["mmdebstrap", "--quiet", *RECIPE, f"--include={','.join(settings.packages)}"]
    words += [f"--hook-dir={MERGED_USR}"] if MERGED_USR.is_dir() else []
    words += [settings.suite, f"{part}/memory/root", *([settings.mirror] if settings.mirror else [])]
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        shutil.rmtree(part, ignore_errors=True)
        tail = "\n".join((done.stderr + done.stdout).strip().splitlines()[-15:])
        raise Problem(
            f"mmdebstrap could not build the template ({done.returncode}):\n{tail}\n"
            f"For packages from another mirror than the suite's usual one set {PREFIX}_MIRROR."
        )
    seconds = round(time.monotonic() - begun, 1)
    facts = {
        "identity": uuid.uuid4().hex,
        "suite": settings.suite,
        "packages": settings.packages,
        "seconds": seconds,
    }
    (part / "template.json").write_text(json.dumps(facts, indent=2) + "\n")
    part.rename(directory)
    say(f"template built in {seconds} s")
