"""What the tool makes of its command line, its environment and a machine that lacks something."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from ipaddress import IPv4Address
from pathlib import Path

import pytest

from testhosts import cli, settings, system
from testhosts.settings import Bind, Request
from testhosts.system import Problem

LAUNCHER = Path(__file__).resolve().parents[2] / "testhosts" / "testhosts"


@pytest.fixture
def plain(tmp_path: Path) -> settings.Settings:
    return settings.load({"ARBORIST_TESTHOSTS": str(tmp_path)})


def test_requests_are_parsed(plain: settings.Settings) -> None:
    assert settings.parse_requests(["n1=10.90.0.11", "gpu-b2=10.90.0.254"], plain) == [
        Request("n1", IPv4Address("10.90.0.11")),
        Request("gpu-b2", IPv4Address("10.90.0.254")),
    ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["n1"], "'n1': expected NAME=ADDRESS, for instance n1=10.90.0.11"),
        (["N1=10.90.0.11"], "bad host name 'N1'"),
        (["1n=10.90.0.11"], "bad host name '1n'"),
        (["n-=10.90.0.11"], "bad host name 'n-'"),
        (["../x=10.90.0.11"], "bad host name '../x'"),
        ([f"{'n' * 33}=10.90.0.11"], "expected 1 to 32"),
        (["=10.90.0.11"], "bad host name ''"),
        (["n1=10.90.0.256"], "expected an IPv4 address in 10.90.0.0/24"),
        (["n1=ten"], "expected an IPv4 address in 10.90.0.0/24"),
        (["n1="], "expected an IPv4 address in 10.90.0.0/24"),
        (["n1=10.91.0.11"], "10.91.0.11 is not in 10.90.0.0/24 (set ARBORIST_TESTHOSTS_NETWORK"),
        (["n1=10.90.0.1"], "this machine's own address"),
        (["n1=10.90.0.0"], "the network's own"),
        (["n1=10.90.0.255"], "the network's own"),
        (["n1=10.90.0.11", "n1=10.90.0.12"], "the name n1 is given twice"),
        (["n1=10.90.0.11", "n2=10.90.0.11"], "the address is n1's already"),
    ],
)
def test_a_bad_request_is_named(plain: settings.Settings, words: list[str], said: str) -> None:
    with pytest.raises(Problem) as caught:
        settings.parse_requests(words, plain)
    assert said in str(caught.value)


def test_a_bind_is_parsed(tmp_path: Path) -> None:
    assert settings.parse_bind(f"{tmp_path}:/srv/models") == Bind(tmp_path.resolve(), "/srv/models")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{here}", "expected /directory/here:/directory/inside"),
        ("{here}:/a:ro", "expected /directory/here:/directory/inside"),
        ("{here}/gone:/srv", "/gone is not the absolute path of a directory here"),
        ("srv:/srv", "srv is not the absolute path of a directory here"),
        ("{here}:srv", "srv is not an absolute path below / inside the host"),
        ("{here}:/", "/ is not an absolute path below / inside the host"),
        ("{here}:/srv/../..", "is not an absolute path below / inside the host"),
    ],
)
def test_a_bad_bind_is_named(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(Problem) as caught:
        settings.parse_bind(text.format(here=tmp_path))
    assert said in str(caught.value)


def test_places_follow_the_environment() -> None:
    assert settings.load({"XDG_CACHE_HOME": "/c"}).state == Path("/c/arborist/testhosts")
    assert settings.load({}).state == Path("~/.cache/arborist/testhosts").expanduser()
    own = settings.load({"XDG_CACHE_HOME": "/c", "ARBORIST_TESTHOSTS": "/s"})
    assert (own.state, own.templates, own.bridge) == (Path("/s"), Path("/s/templates"), "arb0")
    assert (str(own.network), str(own.gateway)) == ("10.90.0.0/24", "10.90.0.1")
    assert settings.load({"ARBORIST_TESTHOSTS_TEMPLATES": "/t"}).templates == Path("/t")
    assert "g++" in settings.load({"ARBORIST_TESTHOSTS_PACKAGES": "g++, git"}).packages


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("ARBORIST_TESTHOSTS", "relative", "expected an absolute path"),
        ("ARBORIST_TESTHOSTS", "/a b", "without blanks"),
        ("ARBORIST_TESTHOSTS_TEMPLATES", "/a:b", "without blanks, colons"),
        ("ARBORIST_TESTHOSTS_BRIDGE", "bridge-too-long", "expected 1 to 7 of a-z0-9"),
        ("ARBORIST_TESTHOSTS_NETWORK", "10.90.0.1/24", "has host bits set"),
        ("ARBORIST_TESTHOSTS_NETWORK", "10.90.0.0/30", "too small"),
        ("ARBORIST_TESTHOSTS_NETWORK", "fd00::/64", "expected something like 10.90.0.0/24"),
    ],
)
def test_a_bad_variable_is_named(variable: str, value: str, said: str) -> None:
    with pytest.raises(Problem) as caught:
        settings.load({variable: value})
    assert f"{variable}={value}: " in str(caught.value)
    assert said in str(caught.value)


def test_it_runs_from_anywhere_without_a_virtual_environment(tmp_path: Path) -> None:
    """With Python's isolated mode: no site packages of a user's, no PYTHONPATH."""
    words = [sys.executable, "-I", "-S", str(LAUNCHER), "--help"]
    shown = subprocess.run(words, cwd=tmp_path, env={}, capture_output=True, text=True, check=True).stdout
    for command in ("deps", "template", "key", "up", "down", "list", "exec"):
        assert f"\n    {command} " in shown


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["down"], "expected either names of hosts or --all"),
        (["down", "--all", "n1"], "expected either names of hosts or --all"),
        (["down", "N1"], "bad host name 'N1'"),
        (["up", "n1=1.2.3.4"], "is not in"),
    ],
)
def test_a_bad_command_line_is_refused(
    words: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("ARBORIST_TESTHOSTS", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert cli.main(words) == 1
    assert said in capsys.readouterr().err


def test_exec_tells_its_own_failures_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ARBORIST_TESTHOSTS", str(tmp_path))
    monkeypatch.setenv("ARBORIST_TESTHOSTS_BRIDGE", "none0")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert cli.main(["exec", "n1", "true"]) == 125
    assert "n1 is not up" in capsys.readouterr().err
    assert cli.main(["exec", "n1"]) == 125
    assert "expected a command" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [["up", "n1=10.90.0.11"], ["down", "n1"], ["list"], ["key"], ["deps"], ["template"]]
)
def test_it_says_that_it_needs_root(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert cli.main(words) == 1
    assert (
        "this needs root (mounts, namespaces, cgroups), and runs as user id 1000" in capsys.readouterr().err
    )


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine's commands, all made up here: none at first."""
    directory = tmp_path / "bin"
    directory.mkdir()
    monkeypatch.setenv("PATH", str(directory))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(system, "KEYRING", tmp_path)
    return directory


def make_command(directory: Path, name: str, script: str = "") -> None:
    (directory / name).write_text(f"#!/bin/sh\n{script}\n")
    (directory / name).chmod(0o755)


def test_it_says_that_it_needs_apt(commands: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["up", "n1=10.90.0.11"]) == 1
    assert "this needs a Debian-family machine: there is no apt-get here" in capsys.readouterr().err
    assert cli.main(["deps"]) == 1
    assert "there is no apt-get here" in capsys.readouterr().err


def test_it_names_the_missing_packages(commands: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_command(commands, "apt-get")
    make_command(commands, "ip")
    assert cli.main(["up", "n1=10.90.0.11"]) == 1
    said = capsys.readouterr().err
    assert (
        "missing packages: mmdebstrap openssh-client systemd-container; install them with `testhosts deps`"
        in said
    )


def test_it_says_when_root_may_not_make_namespaces(
    commands: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("apt-get", *system.COMMANDS):
        make_command(commands, name)
    make_command(commands, "unshare", "echo unshare failed: Operation not permitted >&2; exit 1")
    assert cli.main(["template"]) == 1
    assert "root may not make mount and network namespaces here (unshare failed" in capsys.readouterr().err


def test_deps_installs_only_what_is_missing(commands: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    make_command(commands, "apt-get", f'echo "$DEBIAN_FRONTEND $*" >> {log}')
    make_command(commands, "ip")
    make_command(commands, "ssh-keygen")
    assert cli.main(["deps"]) == 0
    assert log.read_text().splitlines() == [
        "noninteractive update -qq",
        "noninteractive install -y -qq --no-install-recommends mmdebstrap systemd-container",
    ]


def test_deps_leaves_a_complete_machine_alone(commands: Path) -> None:
    make_command(commands, "apt-get", "exit 1")
    for name in system.COMMANDS:
        make_command(commands, name)
    assert cli.main(["deps"]) == 0


# mmdebstrap's stand-in: it takes as long and ends as the tests need. The real one builds the template that
# the hosts of the other tests run on.
SLOW = """\
target=$(printf '%s\\n' "$@" | grep /memory/root)
mkdir "$target" && echo begun >> {log}
echo half > "$target/file"
sleep {seconds}
echo whole > "$target/file"
"""


@pytest.fixture
def slow(tmp_path: Path) -> dict[str, str]:
    """An environment in which the template's build is the stand-in, and takes `seconds`."""
    binaries = tmp_path / "bin"
    binaries.mkdir()
    return {
        **os.environ,
        "PATH": f"{binaries}:{os.environ['PATH']}",
        "ARBORIST_TESTHOSTS": str(tmp_path / "state"),
        "LOG": str(tmp_path / "log"),
    }


def stand_in(environment: dict[str, str], script: str) -> None:
    make_command(Path(environment["PATH"].split(":")[0]), "mmdebstrap", script)


def build(environment: dict[str, str]) -> subprocess.Popen[str]:
    words = [sys.executable, str(LAUNCHER), "template"]
    return subprocess.Popen(words, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_two_at_once_build_the_template_once(slow: dict[str, str]) -> None:
    stand_in(slow, SLOW.format(log=slow["LOG"], seconds=0.5))
    first, second = build(slow), build(slow)
    paths = {process.communicate()[0].strip() for process in (first, second)}
    assert (first.returncode, second.returncode) == (0, 0)
    assert Path(slow["LOG"]).read_text() == "begun\n"
    assert len(paths) == 1
    assert (Path(paths.pop()) / "file").read_text() == "whole\n"


def test_a_killed_build_leaves_no_template_no_process_and_no_mount(slow: dict[str, str]) -> None:
    stand_in(slow, SLOW.format(log=slow["LOG"], seconds=1234.5))
    process = build(slow)
    while not Path(slow["LOG"]).exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and any("1234.5" in line for line in command_lines()):
        time.sleep(0.01)
    assert not any("1234.5" in line for line in command_lines())
    templates = Path(slow["ARBORIST_TESTHOSTS"]) / "templates"
    assert not list(templates.glob("[!.]*-*"))
    assert str(templates) not in Path("/proc/self/mountinfo").read_text()

    stand_in(slow, SLOW.format(log=slow["LOG"], seconds=0))
    shown, said = build(slow).communicate()
    assert (Path(shown.strip()) / "file").read_text() == "whole\n", said
    assert [path.name for path in templates.iterdir() if path.name != "lock"] == [Path(shown).parent.name]


def command_lines() -> list[str]:
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue  # it has ended
    return lines


def test_a_failed_build_shows_why_and_leaves_nothing(slow: dict[str, str]) -> None:
    stand_in(slow, "echo E: unable to fetch this and that >&2; exit 25")
    process = build(slow)
    _, said = process.communicate()
    assert process.returncode == 1
    assert "mmdebstrap could not build the template (25):\nE: unable to fetch this and that\n" in said
    assert "ARBORIST_TESTHOSTS_MIRROR" in said
    templates = Path(slow["ARBORIST_TESTHOSTS"]) / "templates"
    assert [path.name for path in templates.iterdir()] == ["lock"]


def test_another_recipe_is_another_template(slow: dict[str, str]) -> None:
    stand_in(slow, SLOW.format(log=slow["LOG"], seconds=0))
    changes: tuple[dict[str, str], ...] = (
        {},
        {"ARBORIST_TESTHOSTS_PACKAGES": "git"},
        {"ARBORIST_TESTHOSTS_SUITE": "trixie"},
        {"ARBORIST_TESTHOSTS_MIRROR": "/etc/apt/sources.list"},
    )
    paths = [build({**slow, **change}).communicate()[0] for change in (*changes, {})]
    assert len(set(paths)) == len(changes)
    assert paths[0] == paths[-1]
