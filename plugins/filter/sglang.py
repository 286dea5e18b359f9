"""Filters of the deploying roles: the engine's command, systemd's quoting, what a host should run.

All are plain functions of their arguments. A wrong value raises ValueError with what was found, what was
expected and which variable to set; Ansible shows that text and stops.
"""

from __future__ import annotations

import difflib
import importlib.util
import ipaddress
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from ansible.utils.vars import load_extra_vars

#: Flags that have a variable of their own, so that ``sglang_engine_args`` may not set them as well.
OWNED_FLAGS = {
    "model-path": "sglang_model_path",
    "model": "sglang_model_path",
    "host": "sglang_host",
    "port": "sglang_port",
    "speculative-algorithm": "sglang_arm",
    "speculative-draft-model-path": "sglang_draft_model_path",
    "speculative-draft-model": "sglang_draft_model_path",
    "speculative-dflash-block-size": "sglang_block_size",
    "speculative-ddtree-budget": "sglang_budget",
    "speculative-ddtree-topk-cap": "sglang_topk",
}

ALGORITHMS = {"chain": "DFLASH", "tree": "DDTREE"}

_FLAG = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*", re.ASCII)
_ENVIRONMENT_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_BARE = re.compile(r"[A-Za-z0-9_@%+=:,./-]+", re.ASCII)
_SHELL_SPECIAL = re.compile(r'[\\"$`]')
_ESCAPES = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t", "\r": "\\r"}

MINIMUM_ANSIBLE = (2, 19)
MINIMUM_PYTHON = (3, 11)


def _plain(value: Any) -> Any:
    """The value in builtin types: Ansible hands over subclasses that template themselves lazily."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if value is None or isinstance(value, bool):
        return value
    for kind in (int, float, str):
        if isinstance(value, kind):
            return kind(value)
    raise ValueError(f"found {value!r}; expected text, a number, a list or a mapping")


def _integer(value: Any, variable: str) -> int:
    """A whole number of at least 1, also when ``-e`` made it text."""
    text = str(value).strip()
    if isinstance(value, bool) or not re.fullmatch(r"[0-9]+", text) or int(text) < 1:
        raise ValueError(f"{variable} is {value!r}; expected a whole number of at least 1")
    return int(text)


def _load(configuration: Any, where: str) -> dict[str, Any]:
    """A configuration with ``label`` and ``id``, checked by the model that every room shares."""
    from pydantic import ValidationError

    from tuning.models import Configuration

    try:
        return Configuration.model_validate(_plain(configuration)).model_dump(mode="json")
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        at = f"{where}: {key}" if key else where
        raise ValueError(f"{at}: {first['msg']}; found {configuration!r}") from None


def sglang_configuration(variables: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration that the inventory asks for, from ``arm``, ``budget`` and ``topk``.

    Budget and topk count for the arm ``tree`` alone. Returns arm, budget, topk, extra, label and id.
    """
    arm = str(variables["arm"])
    if arm not in ("ar", *ALGORITHMS):
        raise ValueError(f"sglang_arm is {arm!r}; expected ar, chain or tree")
    sizes = {
        name: _integer(variables.get(name), f"sglang_{name}") if arm == "tree" else None
        for name in ("budget", "topk")
    }
    return _load({"arm": arm, **sizes, "extra": {}}, "sglang_arm, sglang_budget, sglang_topk")


def _words(flag: str, value: Any) -> list[str]:
    """One flag as arguments. ``true`` is the bare flag, ``false`` and null leave it out, a list repeats."""
    if value is None or value is False:
        return []
    if value is True:
        return [f"--{flag}"]
    if isinstance(value, dict):
        return [f"--{flag}", json.dumps(value, separators=(",", ":"))]
    if isinstance(value, list):
        if not value:
            raise ValueError(f"flag {flag!r} has an empty list; use null to leave the flag out")
        return [f"--{flag}", *(str(item) for item in value)]
    return [f"--{flag}", str(value)]


def sglang_argv(configuration: Mapping[str, Any], settings: Mapping[str, Any]) -> list[str]:
    """The whole command of the engine under ``configuration``.

    ``settings`` holds python, model_path, draft_model_path, host, port, block_size and engine_args. A
    flag of the configuration's ``extra`` takes the place of the same flag, or comes last. Budget and topk cap
    stand next to each other, in this order, so that both can be edited in one go.
    """
    chosen, given = _plain(configuration), _plain(settings)
    flags: dict[str, Any] = {
        "model-path": given["model_path"],
        "host": given["host"],
        "port": _integer(given["port"], "sglang_port"),
    }
    for flag, value in given["engine_args"].items():
        if not _FLAG.fullmatch(flag):
            plain = flag.lstrip("-").replace("_", "-")
            raise ValueError(f"sglang_engine_args holds {flag!r}; write it without dashes, as {plain!r}")
        if flag in OWNED_FLAGS:
            raise ValueError(f"sglang_engine_args sets {flag!r}; set {OWNED_FLAGS[flag]} instead")
        flags[flag] = value
    _refuse_gpu_flags(flags)
    arm = chosen["arm"]
    if arm in ALGORITHMS:
        extra_draft = (chosen.get("extra") or {}).get("speculative-draft-model-path")
        if not (given.get("draft_model_path") or extra_draft):
            raise ValueError(f"sglang_draft_model_path is empty; arm {arm} needs the path of a draft model")
        flags["speculative-algorithm"] = ALGORITHMS[arm]
        flags["speculative-draft-model-path"] = given.get("draft_model_path")
        if given.get("block_size") is not None:
            flags["speculative-dflash-block-size"] = _integer(given["block_size"], "sglang_block_size")
    if arm == "tree":
        flags["speculative-ddtree-budget"] = chosen["budget"]
        flags["speculative-ddtree-topk-cap"] = chosen["topk"]
    flags.update(chosen.get("extra") or {})
    command = [given["python"], "-m", "sglang.launch_server"]
    for flag, value in flags.items():
        command += _words(flag, value)
    return command


def _refuse_gpu_flags(flags: Mapping[str, Any]) -> None:
    """On a CPU, raise ValueError for what makes the engine take all memory, or die once it has.

    Of the inventory's flags; what a row of a sweep adds is the row's own risk.
    """
    if flags.get("device") != "cpu":
        return
    kinds = ("attention-backend", "prefill-attention-backend", "decode-attention-backend")
    found = [f"{kind} {flags[kind]}" for kind in kinds if flags.get(kind) not in (None, "torch_native")]
    if flags.get("mem-fraction-static") is not None and flags.get("max-total-tokens") is None:
        found.append("mem-fraction-static without max-total-tokens")
    if found:
        raise ValueError(
            f"the device is cpu, and sglang_engine_args holds {' and '.join(found)}; expected attention by "
            "torch_native, and max-total-tokens in place of a share of all memory: take the "
            "sglang_engine_args of inventory/demo"
        )


def sglang_devices(engine_args: Mapping[str, Any]) -> int:
    """How many devices the engine takes under these flags: tensor-parallel times pipeline-parallel ranks.

    Data parallelism of attention shares the tensor-parallel ranks.
    """
    given = _plain(engine_args)
    count = 1
    for names in (("tp-size", "tensor-parallel-size", "tp"), ("pp-size", "pipeline-parallel-size")):
        sizes = [given[name] for name in names if given.get(name) is not None]
        if sizes:
            count *= _integer(sizes[0], f"sglang_engine_args: {names[0]}")
    return count


def _quoted(text: str) -> str:
    """``text`` in double quotes, with the escapes that systemd reads in units and environment files."""
    if "\0" in text:
        raise ValueError(f"{text!r} holds a NUL; neither a command line nor an environment can carry it")
    return '"' + "".join(_ESCAPES.get(c, c if c.isprintable() else _hex(c)) for c in text) + '"'


def _hex(character: str) -> str:
    return "".join(f"\\x{byte:02x}" for byte in character.encode())


def systemd_exec(argv: Sequence[Any]) -> str:
    """The arguments as one ExecStart value that systemd reads back as exactly these.

    ``%`` and ``$`` are doubled (specifiers, variables); what is not plainly harmless is quoted. Source:
    systemd.service(5), "Command lines", and systemd.syntax(7), "Quoting".
    """
    words = [str(word) for word in argv]
    if not words or not words[0].startswith("/"):
        raise ValueError(f"the command is {words[:1]}; expected an absolute path first")
    quoted = (word if _BARE.fullmatch(word) else _quoted(word) for word in words)
    return " ".join(word.replace("%", "%%").replace("$", "$$") for word in quoted)


def systemd_environment(variables: Mapping[str, Any]) -> str:
    """The variables as lines of an EnvironmentFile, by name; null leaves one out, true is 1 and false is 0.

    Source: systemd.exec(5), "EnvironmentFile=".
    """
    lines = []
    for name, value in sorted(_plain(variables).items()):
        if not _ENVIRONMENT_NAME.fullmatch(name):
            raise ValueError(f"sglang_environment holds {name!r}; expected a name of letters, digits and _")
        if isinstance(value, dict | list):
            raise ValueError(f"sglang_environment.{name} is {value!r}; expected text or a number")
        if value is None:
            continue
        text = str(int(value)) if isinstance(value, bool) else str(value)
        if "\n" in text or "\r" in text:
            raise ValueError(f"sglang_environment.{name} holds a line break; expected one line")
        # An environment file reads the shell's double quotes: only these four are special in them.
        quoted = _SHELL_SPECIAL.sub(r"\\\g<0>", text)
        lines.append(f'{name}="{quoted}"')
    return "\n".join(lines)


def sglang_base_url(host: str, port: Any) -> str:
    """Where the service answers, with brackets around an IPv6 address."""
    try:
        literal = f"[{host}]" if ipaddress.ip_address(str(host)).version == 6 else str(host)
    except ValueError:
        literal = str(host)
    return f"http://{literal}:{_integer(port, 'sglang_port')}"


def sglang_effective_configuration(
    inventory: Mapping[str, Any],
    fact: Any = None,
    promotion: Mapping[str, Any] | None = None,
    service: str | None = None,
    keep: bool = True,
) -> dict[str, Any]:
    """What the host should run. This is the one place that decides between inventory and promotion.

    ``inventory`` is the configuration that the variables ask for, ``fact`` the host's local fact (None where
    it was never deployed; one that speaks of another ``service`` is not read), ``promotion`` a configuration
    with the study that proved it, when one is being promoted now.

    A promotion stays in force while the inventory asks for what it asked for at the time of the promotion
    (``superseded``). Once the inventory has changed, or ``keep`` is False, the inventory wins, and
    ``dropped`` tells which promotion went.
    Returns ``configuration``, ``source`` (``inventory`` or ``promotion``), ``promoted`` and ``dropped``.
    """
    wanted = _load(inventory, "inventory")
    if promotion:
        configuration = _load(promotion["configuration"], "promotion")
        promoted = {"configuration": configuration, "study": str(promotion["study"]), "superseded": wanted}
        return {"configuration": configuration, "source": "promotion", "promoted": promoted, "dropped": None}
    before = None
    if fact is not None:
        if not isinstance(fact, Mapping):
            raise ValueError(
                f"the local fact sglang_ddtree is unreadable ({str(fact)[:120]}); expected JSON; remove "
                "/etc/ansible/facts.d/sglang_ddtree.fact to go on with the inventory's configuration"
            )
        if service is None or fact.get("service") == service:
            before = _plain(fact.get("promoted"))
    if not before:
        return {"configuration": wanted, "source": "inventory", "promoted": None, "dropped": None}
    if not keep or _load(before["superseded"], "local fact")["id"] != wanted["id"]:
        return {"configuration": wanted, "source": "inventory", "promoted": None, "dropped": before}
    configuration = _load(before["configuration"], "local fact")
    return {"configuration": configuration, "source": "promotion", "promoted": before, "dropped": None}


def sglang_fact(deployed: Mapping[str, Any], previous: Any, now: str) -> dict[str, Any]:
    """The local fact: what is deployed, and since when.

    ``deployed_at`` is ``now`` only if something else differs from ``previous``, so that a deployment that
    changes nothing leaves the fact as it is.
    """
    fresh = _plain(deployed)
    if isinstance(previous, Mapping):
        old = _plain(previous)
        since = old.pop("deployed_at", None)
        if old == fresh and since:
            return {**fresh, "deployed_at": since}
    return {**fresh, "deployed_at": str(now)}


def sglang_prunable(
    folders: Sequence[str], markers: Sequence[Mapping[str, Any]], current: str, keep: Any
) -> list[str]:
    """The releases to remove: half installed ones, and all but the ``keep`` that were completed last.

    ``folders`` are the releases' paths, ``markers`` the files that tell when each was complete (``path`` and
    ``mtime``), ``current`` the path of the current one, which counts as one to keep and always stays.
    """
    count = _integer(keep, "sglang_keep_releases")
    completed = {str(Path(str(item["path"])).parent): float(item["mtime"]) for item in markers}
    others = [str(folder) for folder in folders if str(folder) != str(current)]
    newest = sorted((f for f in others if f in completed), key=lambda f: (completed[f], f), reverse=True)
    return sorted(set(others) - set(newest[: count - 1]))


def sglang_last_words(result: Mapping[str, Any], lines: int = 4) -> str:
    """The end of what a failed command said, for a message; Ansible's own message where it said nothing.

    pip lists every hash that it would have accepted, which can be thousands: these lines are left out.
    """
    said = str(result.get("stderr") or "") or str(result.get("stdout") or "")
    kept = [line.rstrip() for line in said.splitlines() if line.strip()]
    kept = [line for line in kept if not re.match(r"\s*Expected +(or|sha256) [0-9a-f]{64}", line)]
    ends = [line if len(line) <= 400 else line[:399] + "…" for line in kept[-lines:]]
    return "\n  ".join(ends) or str(result.get("msg", "no message"))


def known_variables(roles: Path) -> set[str]:
    """Every variable that an argument spec of a role in the folder ``roles`` names."""
    known: set[str] = set()
    for file in roles.glob("*/meta/argument_specs.yml"):
        for entry in yaml.safe_load(file.read_text(encoding="utf-8"))["argument_specs"].values():
            known.update(entry.get("options", {}))
    return known


def _meant(name: str, known: set[str], cutoff: float) -> str:
    """The known variable that ``name`` is most like, empty when it is like none."""
    # Single words such as host, port or user may well be the inventory's own.
    for whole in (f"sglang_{name}", f"sweep_{name}"):
        if "_" in name and whole in known:
            return whole
    return next(iter(difflib.get_close_matches(name, sorted(known), n=1, cutoff=cutoff)), "")


def _misspelt(typed: Sequence[str], known: set[str]) -> list[str]:
    """What was typed and is much like a known variable. Others may be the inventory's own."""
    return [name for name in map(str, typed) if name not in known and _meant(name, known, 0.75)]


def sglang_gate(
    names: Sequence[str],
    roles: str,
    hosts: Sequence[str],
    ansible_version: str,
    python: Sequence[int] | None = None,
    typed: Sequence[str] | None = None,
) -> list[str]:
    """What keeps a run from starting, as texts for a person; empty when nothing does.

    ``names`` are the ``sglang_`` and ``sweep_`` variables that are set, ``roles`` the folder whose argument
    specs name the known ones, ``hosts`` the inventory's hosts, ``python`` the controller's version (default:
    this one), ``typed`` the variables of the command line (default: this run's).
    """
    found = tuple(python or sys.version_info[:2])
    problems = []
    if tuple(int(part) for part in re.findall(r"\d+", ansible_version)[:2]) < MINIMUM_ANSIBLE:
        problems.append(
            f"ansible-core: found {ansible_version}; expected {'.'.join(map(str, MINIMUM_ANSIBLE))} or "
            "newer; run `make setup` and use .venv/bin/ansible-playbook"
        )
    if found[:2] < MINIMUM_PYTHON:
        problems.append(
            f"Python of the controller: found {'.'.join(map(str, found))}; expected "
            f"{'.'.join(map(str, MINIMUM_PYTHON))} or newer; run `make setup PYTHON=python3.11`"
        )
    if importlib.util.find_spec("tuning") is None:
        problems.append(
            f"Python of the controller: {sys.executable} cannot import tuning; expected the project's own "
            "environment; run `make setup` and use .venv/bin/ansible-playbook"
        )
    if not hosts:
        problems.append(
            "inventory: found no host in the group sglang; expected at least one; "
            "name an inventory with -i, for example -i inventory/demo"
        )
    known = known_variables(Path(roles))
    if typed is None:
        # Where Ansible keeps what -e gave, files included; nothing that a play can ask for names it.
        typed = list(getattr(load_extra_vars, "extra_vars", {}))
    unknown = sorted({*map(str, names), *_misspelt(typed, known)} - known)
    for name in unknown:
        meant = _meant(name, known, 0.6)
        hint = f"did you mean {meant}?" if meant else "remove it, or correct its name"
        problems.append(f"unknown variable {name}; {hint}")
    if unknown:
        problems.append(f"known variables: {', '.join(sorted(known))}")
    return problems


class FilterModule:
    """What Ansible loads."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """The filters by name."""
        return {
            "sglang_argv": sglang_argv,
            "sglang_base_url": sglang_base_url,
            "sglang_configuration": sglang_configuration,
            "sglang_devices": sglang_devices,
            "sglang_effective_configuration": sglang_effective_configuration,
            "sglang_fact": sglang_fact,
            "sglang_gate": sglang_gate,
            "sglang_last_words": sglang_last_words,
            "sglang_prunable": sglang_prunable,
            "systemd_environment": systemd_environment,
            "systemd_exec": systemd_exec,
        }
