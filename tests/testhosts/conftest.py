"""The tool as its users call it, with a state directory, a bridge and a network of the tests' own."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from ipaddress import IPv4Interface, IPv4Network
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

LAUNCHER = ROOT / "testhosts" / "testhosts"


@dataclasses.dataclass(frozen=True)
class Tool:
    """Runs the tool; `front` are words that go in front of it."""

    environment: Mapping[str, str]
    network: IPv4Network
    front: tuple[str, ...] = ()

    def other(self, *front: str, **variables: str) -> Tool:
        """The same with other variables of the environment (the prefix left out)."""
        changed = {f"ARBORIST_TESTHOSTS{name}": value for name, value in variables.items()}
        return dataclasses.replace(self, environment={**self.environment, **changed}, front=front)

    @property
    def state(self) -> Path:
        return Path(self.environment["ARBORIST_TESTHOSTS"])

    @property
    def bridge(self) -> str:
        return self.environment["ARBORIST_TESTHOSTS_BRIDGE"]

    def argv(self, *words: str) -> list[str]:
        return [*self.front, sys.executable, str(LAUNCHER), *words]

    def run(self, *words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.argv(*words), input=stdin, env=self.environment, capture_output=True, text=True, check=False
        )

    def ok(self, *words: str, stdin: str = "") -> str:
        done = self.run(*words, stdin=stdin)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def refused(self, *words: str) -> str:
        """What it said when it refused."""
        done = self.run(*words)
        assert done.returncode == 1, done
        assert "Traceback" not in done.stderr
        return done.stderr

    def inside(self, name: str, script: str) -> str:
        return self.ok("exec", name, "sh", "-ec", script)

    def host(self, name: str) -> dict[str, Any]:
        return next(item for item in json.loads(self.ok("list", "--json")) if item["name"] == name)

    def address(self, number: int) -> str:
        return str(self.network[number])


def free_network() -> IPv4Network:
    shown = subprocess.run(["ip", "-json", "-4", "addr"], capture_output=True, text=True, check=True).stdout
    taken = [
        IPv4Interface(f"{info['local']}/{info['prefixlen']}").network
        for link in json.loads(shown)
        for info in link["addr_info"]
    ]
    candidates = (IPv4Network(f"10.90.{third}.0/24") for third in range(200, 250))
    return next(network for network in candidates if not any(network.overlaps(other) for other in taken))


@pytest.fixture(scope="session")
def tool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tool]:
    """The real tool on the real machine; without what it needs these tests fail, they are not left out."""
    state = tmp_path_factory.mktemp("state")
    from testhosts import settings

    environment = {
        **os.environ,
        "ARBORIST_TESTHOSTS": str(state),
        "ARBORIST_TESTHOSTS_TEMPLATES": str(settings.load().templates),
        "ARBORIST_TESTHOSTS_BRIDGE": f"t{os.getpid() % 10**6}",
    }
    ready = subprocess.run(
        [sys.executable, str(LAUNCHER), "template"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if ready.returncode:
        pytest.fail(f"these tests boot real hosts and cannot here: {ready.stderr}")
    network = free_network()
    found = Tool({**environment, "ARBORIST_TESTHOSTS_NETWORK": str(network)}, network)
    yield found
    found.ok("down", "--all")
