"""The command line."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence

from . import hosts, template
from .settings import PREFIX, Settings, load, parse_bind, parse_name, parse_requests
from .system import Problem, install_packages, require_all, require_root, say

VARIABLES = f"""\
variables:
  {PREFIX}            state directory: hosts, ssh key, template
                                (default: ${{XDG_CACHE_HOME:-~/.cache}}/arborist/testhosts)
  {PREFIX}_TEMPLATES  where the templates are cached (default: in the state directory)
  {PREFIX}_BRIDGE     the bridge's name (default: arb0); one state directory, one bridge
  {PREFIX}_NETWORK    the hosts' network (default: 10.90.0.0/24); its first address is this machine's
  {PREFIX}_SUITE      the hosts' Debian or Ubuntu release (default: bookworm)
  {PREFIX}_PACKAGES   packages to add to the template
  {PREFIX}_MIRROR     a mirror's address or an apt sources file (default: the release's usual mirror)
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="testhosts",
        description="Throw-away Debian hosts: PID 1 a real systemd, sshd, an address of their own.",
        epilog=VARIABLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("deps", help="install the packages this tool needs")
    commands.add_parser("template", help="build the cached tree unless it is there, and print its path")
    commands.add_parser("key", help="print the path of the private ssh key (user root)")
    start = commands.add_parser("up", help="boot hosts and wait until they are up")
    start.add_argument("hosts", nargs="+", metavar="NAME=ADDRESS")
    bind_help = "show a directory of this machine read-only inside (repeatable)"
    start.add_argument("--bind", action="append", default=[], metavar="HERE:INSIDE", help=bind_help)
    stop = commands.add_parser("down", help="stop hosts and discard their disks")
    stop.add_argument("names", nargs="*", metavar="NAME")
    stop.add_argument("--all", action="store_true", help="all hosts of this state directory")
    stop.add_argument("--keep", action="store_true", help="shut down in order, keep the disk for `up`")
    show = commands.add_parser("list", help="show the hosts: name, address, state")
    show.add_argument("--json", action="store_true", help="all that is known, for programs")
    inside = commands.add_parser("exec", help="run a command inside a host, as root, exit as it does")
    inside.add_argument("name", metavar="NAME")
    inside.add_argument("words", nargs=argparse.REMAINDER, metavar="COMMAND ...")
    return parser


def _up(settings: Settings, arguments: argparse.Namespace) -> None:
    requests = parse_requests(arguments.hosts, settings)
    binds = [parse_bind(text) for text in arguments.bind]
    require_all()
    begun = time.monotonic()
    started = hosts.up(settings, requests, binds)
    for request in requests:
        word = "started" if started[request.name] else "already up"
        print(f"{request.name} {request.address} {word}")
    say(f"up after {time.monotonic() - begun:.1f} s")


def _down(settings: Settings, arguments: argparse.Namespace) -> None:
    if arguments.all == bool(arguments.names):
        raise Problem("down: expected either names of hosts or --all")
    asked = [hosts.Host(settings, parse_name(name)) for name in arguments.names]
    hosts.down(asked or hosts.every(settings), settings, keep=arguments.keep)


def _list(settings: Settings, arguments: argparse.Namespace) -> None:
    found = [host.describe() for host in hosts.every(settings)]
    if arguments.json:
        print(json.dumps(found, indent=2))
        return
    for item in found:
        lone = item["state"] != "stopped" and not item["supervised"]
        note = "  (its supervisor is gone: it ends at its next reboot)" if lone else ""
        print(f"{item['name']:<20} {item['address'] or '-':<15} {item['state']}{note}")


def _run(settings: Settings, arguments: argparse.Namespace) -> None:
    if arguments.command == "deps":
        done = install_packages()
        say(f"installed {' '.join(done)}" if done else "nothing is missing")
    elif arguments.command == "template":
        require_all()
        print(template.ensure(settings).root)
    elif arguments.command == "key":
        require_root()
        print(hosts.ensure_key(settings))
    elif arguments.command == "up":
        _up(settings, arguments)
    else:
        require_root()
        if arguments.command == "down":
            _down(settings, arguments)
        elif arguments.command == "list":
            _list(settings, arguments)
        else:
            _exec(settings, arguments)


def _exec(settings: Settings, arguments: argparse.Namespace) -> None:
    words: list[str] = arguments.words
    if words[:1] == ["--"]:
        words = words[1:]
    if not words:
        raise Problem("exec: expected a command after the host's name")
    hosts.execute(hosts.Host(settings, parse_name(arguments.name)), words)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code: 0, 1 for a problem (125 for exec), 2 for a bad command line."""
    arguments = _parser().parse_args(argv)
    os.umask(0o022)
    try:
        _run(load(), arguments)
    except Problem as problem:
        say(str(problem))
        return 125 if arguments.command == "exec" else 1
    except OSError as error:
        say(f"the system refused: {error}")
        return 125 if arguments.command == "exec" else 1
    except KeyboardInterrupt:
        say("interrupted")
        return 130
    sys.stdout.flush()
    return 0
