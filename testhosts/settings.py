"""Settings from the environment, and what the command line may say about hosts."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ipaddress import AddressValueError, IPv4Address, IPv4Network
from pathlib import Path

from .system import Problem

PREFIX = "ARBORIST_TESTHOSTS"
NAME = re.compile(r"[a-z]([a-z0-9-]{0,30}[a-z0-9])?")
# A link is named after the bridge plus 8 characters; the kernel allows 15.
BRIDGE = re.compile(r"[a-z][a-z0-9]{0,6}")
# Separators of overlay's mount options and of the shell's lists: nothing to gain by quoting them.
AWKWARD = re.compile(r"[\s:,\\]")

PACKAGES = (
    "ca-certificates",
    "dbus",
    "iproute2",
    "libgomp1",
    "libnss-systemd",
    "libnuma1",
    "libpam-systemd",
    "openssh-server",
    "procps",
    "python3",
    "python3-apt",
    "python3-venv",
    "systemd",
    "systemd-sysv",
)


@dataclass(frozen=True)
class Settings:
    """Where things live and what hosts are made of."""

    state: Path
    templates: Path
    bridge: str
    network: IPv4Network
    suite: str
    packages: tuple[str, ...]
    mirror: str

    @property
    def gateway(self) -> IPv4Address:
        """The machine's own address on the bridge: the first of the network."""
        return self.network[1]

    @property
    def lock(self) -> Path:
        """The file whose lock guards every change to hosts, bridge and records."""
        return self.state / "lock"

    @property
    def hosts(self) -> Path:
        """The directory with one directory per host."""
        return self.state / "hosts"

    @property
    def key(self) -> Path:
        """The private key that logs in to every host as root."""
        return self.state / "id_ed25519"

    @property
    def known_hosts(self) -> Path:
        """The ssh known_hosts file with the host keys of all hosts."""
        return self.state / "known_hosts"


@dataclass(frozen=True)
class Bind:
    """A directory of this machine shown read-only inside a host."""

    source: Path
    target: str


@dataclass(frozen=True)
class Request:
    """A host asked for."""

    name: str
    address: IPv4Address


def load(environment: Mapping[str, str] = os.environ) -> Settings:
    """Read the settings; a bad value is a Problem that names its variable."""
    cache = environment.get("XDG_CACHE_HOME") or str(Path("~/.cache").expanduser())
    state = _directory(PREFIX, environment.get(PREFIX) or f"{cache}/arborist/testhosts")
    bridge = environment.get(f"{PREFIX}_BRIDGE") or "arb0"
    if not BRIDGE.fullmatch(bridge):
        raise Problem(f"{PREFIX}_BRIDGE={bridge}: expected 1 to 7 of a-z0-9, a letter first")
    extra = (environment.get(f"{PREFIX}_PACKAGES") or "").replace(",", " ").split()
    return Settings(
        state=state,
        templates=_directory(
            f"{PREFIX}_TEMPLATES", environment.get(f"{PREFIX}_TEMPLATES") or f"{state}/templates"
        ),
        bridge=bridge,
        network=_network(environment.get(f"{PREFIX}_NETWORK") or "10.90.0.0/24"),
        suite=environment.get(f"{PREFIX}_SUITE") or "bookworm",
        packages=tuple(sorted({*PACKAGES, *extra})),
        mirror=environment.get(f"{PREFIX}_MIRROR") or "",
    )


def _directory(variable: str, value: str) -> Path:
    if not value.startswith("/") or AWKWARD.search(value):
        raise Problem(f"{variable}={value}: expected an absolute path without blanks, colons, commas or \\")
    return Path(value)


def _network(value: str) -> IPv4Network:
    try:
        network = IPv4Network(value)
    except ValueError as error:
        raise Problem(f"{PREFIX}_NETWORK={value}: {error}; expected something like 10.90.0.0/24") from None
    if network.prefixlen > 29:
        raise Problem(f"{PREFIX}_NETWORK={value}: too small for hosts, expected a prefix of /29 or wider")
    return network


def parse_name(text: str) -> str:
    """Check a host name."""
    if not NAME.fullmatch(text):
        raise Problem(f"bad host name {text!r}: expected 1 to 32 of a-z0-9 and -, a letter first, no - last")
    return text


def parse_requests(texts: Sequence[str], settings: Settings) -> list[Request]:
    """Parse NAME=ADDRESS words; every name and address must be new and the address usable."""
    requests: list[Request] = []
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise Problem(f"{text!r}: expected NAME=ADDRESS, for instance n1={settings.network[11]}")
        request = Request(parse_name(name), _address(text, value, settings))
        for other in requests:
            if other.name == request.name:
                raise Problem(f"{text!r}: the name {name} is given twice")
            if other.address == request.address:
                raise Problem(f"{text!r}: the address is {other.name}'s already")
        requests.append(request)
    return requests


def _address(text: str, value: str, settings: Settings) -> IPv4Address:
    network = settings.network
    try:
        address = IPv4Address(value)
    except AddressValueError as error:
        raise Problem(f"{text!r}: {error}; expected an IPv4 address in {network}") from None
    if address not in network:
        raise Problem(f"{text!r}: {address} is not in {network} (set {PREFIX}_NETWORK for another network)")
    if address == settings.gateway:
        raise Problem(f"{text!r}: {address} is this machine's own address on the bridge")
    if address in (network.network_address, network.broadcast_address):
        raise Problem(f"{text!r}: {address} is the network's own, expected a host address in {network}")
    return address


def parse_bind(text: str) -> Bind:
    """Parse SOURCE:TARGET, an existing directory here and an absolute path in the host."""
    source, colon, target = text.partition(":")
    if not colon or ":" in target or "\\" in text:
        raise Problem(f"--bind {text!r}: expected /directory/here:/directory/inside, no other : and no \\")
    path = Path(source)
    if not path.is_absolute() or not path.is_dir():
        raise Problem(f"--bind {text!r}: {source} is not the absolute path of a directory here")
    if not target.startswith("/") or ".." in Path(target).parts or Path(target) == Path("/"):
        raise Problem(f"--bind {text!r}: {target} is not an absolute path below / inside the host")
    return Bind(path.resolve(), str(Path(target)))
