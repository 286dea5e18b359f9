"""The bridge, and each host's link to it. Hosts get an address and no route beyond the bridge."""

from __future__ import annotations

import hashlib
import json
from ipaddress import IPv4Address, IPv4Interface
from pathlib import Path

from .settings import PREFIX, Settings
from .system import Problem, run

LINKS = Path("/sys/class/net")


def link_name(settings: Settings, name: str) -> str:
    """Return the name, on this machine, of a host's link; it begins with the bridge's."""
    return settings.bridge + hashlib.sha256(name.encode()).hexdigest()[:8]


def hardware_address(address: IPv4Address) -> str:
    """Return a fixed hardware address: neighbours need not learn anew when a host is made again."""
    return "02:61:" + ":".join(f"{byte:02x}" for byte in address.packed)


def ensure_bridge(settings: Settings) -> None:
    """Make the bridge unless it is there; refuse one that belongs to something else."""
    address = f"{settings.gateway}/{settings.network.prefixlen}"
    if (LINKS / settings.bridge).exists():
        owner = _owner(settings)
        if owner != str(settings.state):
            raise Problem(
                f"the link {settings.bridge} is there and belongs to {owner or 'something else'}, "
                f"not to {settings.state}: set {PREFIX}_BRIDGE and {PREFIX}_NETWORK to others"
            )
        present = [address for name, address in _addresses() if name == settings.bridge]
        if IPv4Interface(address) not in present:
            raise Problem(
                f"the bridge {settings.bridge} is up with {' '.join(map(str, present)) or 'no address'}, "
                f"not with {address}: `testhosts down --all` first, or set {PREFIX}_NETWORK as it was"
            )
        return
    for name, taken in _addresses():
        if taken.network.overlaps(settings.network):
            raise Problem(
                f"{settings.network} overlaps {taken.network} of this machine's {name}: "
                f"set {PREFIX}_NETWORK to a free network"
            )
    # A hardware address of its own: else the bridge takes one of its links', and another as they come and go.
    batch = f"""\
link add name {settings.bridge} address {hardware_address(settings.gateway)} type bridge
link set dev {settings.bridge} alias {settings.state}
link set dev {settings.bridge} addrgenmode none
addr add {address} dev {settings.bridge}
link set dev {settings.bridge} up
"""
    run(["ip", "-batch", "-"], stdin=batch)


def _owner(settings: Settings) -> str:
    return (LINKS / settings.bridge / "ifalias").read_text().strip()


def _addresses() -> list[tuple[str, IPv4Interface]]:
    links = json.loads(run(["ip", "-json", "-4", "addr", "show"]))
    return [
        (link["ifname"], IPv4Interface(f"{info['local']}/{info['prefixlen']}"))
        for link in links
        for info in link["addr_info"]
    ]


def attach(settings: Settings, name: str, address: IPv4Address, pid: int) -> None:
    """Give the network namespace of a process its eth0 with the address, linked to the bridge."""
    link = link_name(settings, name)
    detach(settings, name)
    batch = f"""\
link add name {link} type veth peer name eth0 address {hardware_address(address)} netns {pid}
link set dev {link} alias {name}
link set dev {link} addrgenmode none
link set dev {link} master {settings.bridge} up
"""
    run(["ip", "-batch", "-"], stdin=batch)
    inside = f"""\
link set dev lo up
addr add {address}/{settings.network.prefixlen} dev eth0
link set dev eth0 up
"""
    run(["nsenter", "--target", str(pid), "--net", "ip", "-batch", "-"], stdin=inside)


def detach(settings: Settings, name: str) -> None:
    """Remove a host's link; nothing to do when there is none."""
    link = link_name(settings, name)
    if (LINKS / link).exists():
        try:
            run(["ip", "link", "delete", "dev", link])
        except Problem:  # it also goes by itself, a moment after its namespace
            if (LINKS / link).exists():
                raise


def remove_idle_bridge(settings: Settings) -> None:
    """Remove the bridge, if it is ours, once no link uses it."""
    bridge = LINKS / settings.bridge
    if not bridge.exists() or _owner(settings) != str(settings.state):
        return
    if not any((bridge / "brif").iterdir()):
        run(["ip", "link", "delete", "dev", settings.bridge])
