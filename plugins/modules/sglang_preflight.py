#!/usr/bin/python
"""Ansible module: is this host fit to run SGLang? Every problem at once, with what to change."""

from __future__ import annotations

import ipaddress
import json
import os
import pwd
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ansible.module_utils.arborist_sweep import SweptService
from ansible.module_utils.arborist_unit import Run, Unit, UnitError, unit_name
from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = r"""
---
module: sglang_preflight
short_description: Say whether a host is fit to run SGLang
description:
  - Looks at the host and changes nothing. Each check runs when its option is given.
  - Collects all problems and fails once, saying for each what was found, what was expected and which variable
    to set.
options:
  unit:
    description:
      - The systemd service, with or without C(.service). Checks that systemd is PID 1 and recent enough, and
        that no sweep holds the service.
      - The port may be held by this unit, and the memory it uses counts as available.
    type: str
  python:
    description: The interpreter that makes the virtual environment; 3.11 to 3.13 with venv.
    type: path
  root:
    description: Where releases are installed. Goes with O(disk_mb).
    type: path
  disk_mb:
    description: Free space that O(root) needs, in MiB.
    type: int
  memory_mb:
    description: Memory that must be available, in MiB.
    type: int
  shm_mb:
    description: Free space that C(/dev/shm) needs, in MiB.
    type: int
  host:
    description: The address that the service binds to. Goes with O(port). Only loopback is accepted.
    type: str
  port:
    description: The port that the service binds to.
    type: int
  user:
    description: The service's user, which must be able to read the models.
    type: str
    default: root
  model_path:
    description: The target model, a folder on the host, or a hub's name where the service may go online.
    type: str
  draft_model_path:
    description: The draft model, likewise. Checked to fit the target.
    type: str
  draft_required:
    description: Whether the configuration needs a draft model.
    type: bool
    default: false
  offline:
    description: Whether the service may not go online, so that a model must be a folder.
    type: bool
    default: true
  weights:
    description: Whether the models' weights must be there.
    type: bool
    default: true
  wheelhouse:
    description: A folder on the host with wheels. Goes with O(requirements).
    type: path
  requirements:
    description: What the wheelhouse must hold, as C(name==version).
    type: list
    elements: str
    default: []
  gpus:
    description: How many CUDA devices are needed.
    type: int
"""

EXAMPLES = r"""
- name: Check the host
  sglang_preflight:
    unit: sglang-ddtree
    host: 127.0.0.1
    port: 30000
    model_path: /srv/models/target
"""

RETURN = r"""
python:
  description: The interpreter's C(path) and C(version), the latter as C(major.minor).
  type: dict
  returned: when O(python) is given
gpus:
  description: What C(nvidia-smi) lists, a line for each device.
  type: list
  elements: str
  returned: success
"""

PYTHONS = ((3, 11), (3, 13))
SYSTEMD = 247  # the first with all that the unit asks for (ProtectProc=)
MIB = 1 << 20

_PROBE = (
    "import importlib.util as u, json, sys; "
    "print(json.dumps([list(sys.version_info[:2]), all(u.find_spec(m) for m in ('venv', 'ensurepip'))]))"
)
_HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf")


@dataclass(frozen=True)
class Problem:
    """One thing that keeps the service from running here, in words."""

    check: str
    found: str
    expected: str
    change: str

    def __str__(self) -> str:
        return f"{self.check}: found {self.found}; expected {self.expected}; {self.change}"


# --- the machine ---
def check_systemd(run: Run, root: Path) -> Iterator[Problem]:
    """PID 1 is a systemd that knows what the unit asks for."""
    expected = f"systemd {SYSTEMD} or newer as PID 1"
    comm = _text(root / "proc/1/comm").strip()
    if comm != "systemd":
        yield Problem(
            "systemd", f"PID 1 is {comm or 'unreadable'}", expected, "use a host that systemd boots"
        )
        return
    _, out, _ = run(["systemctl", "--version"])
    version = re.match(r"systemd (\d+)", out)
    if version is None or int(version[1]) < SYSTEMD:
        yield Problem("systemd", out.splitlines()[0] if out else "no systemctl", expected, "upgrade the host")


def check_python(run: Run, path: str, root: Path) -> tuple[list[Problem], dict[str, str]]:
    """The interpreter is one that SGLang's wheels exist for, and can make a virtual environment."""
    low, high = (".".join(map(str, version)) for version in PYTHONS)
    change = f"set sglang_python{_other_pythons(path, root)}"
    expected = f"Python {low} to {high} with venv"
    if not (root / path.lstrip("/")).exists():
        return [Problem("Python", f"no {path}", expected, change)], {}
    rc, out, err = run([path, "-I", "-c", _PROBE])
    if rc != 0:
        return [Problem("Python", f"{path} fails: {_last(err)}", expected, change)], {}
    version, venv = json.loads(out)
    name = ".".join(map(str, version))
    problems = []
    if not PYTHONS[0] <= tuple(version) <= PYTHONS[1]:
        problems.append(Problem("Python", f"{path} is {name}", expected, change))
    elif not venv:
        change = f"install the package python{name}-venv, or {change}"
        problems.append(Problem("Python", f"{path} ({name}) has no venv or no ensurepip", expected, change))
    return problems, {"path": path, "version": name}


def _other_pythons(path: str, root: Path) -> str:
    names = [f"python{major}.{minor}" for major, minor in ((3, 13), (3, 12), (3, 11))]
    paths = [f"{folder}/{name}" for folder in ("/usr/local/bin", "/usr/bin") for name in names]
    there = [other for other in paths if other != path and (root / other.lstrip("/")).exists()]
    return f" (found here: {', '.join(there)})" if there else ""


def check_space(folder: Path, need_mb: int, check: str, change: str) -> Iterator[Problem]:
    """The file system that holds ``folder``, or will hold it, has ``need_mb`` MiB free."""
    there = folder
    while not there.exists() and there != there.parent:
        there = there.parent
    free = shutil.disk_usage(there).free // MIB
    if free < need_mb:
        yield Problem(check, f"{free} MiB free in {there}", f"at least {need_mb} MiB", change)


def check_memory(run: Run, need_mb: int, unit: str, root: Path) -> Iterator[Problem]:
    """The machine has ``need_mb`` MiB available, the running service's own counted as available."""
    match = re.search(r"^MemAvailable:\s+(\d+) kB", _text(root / "proc/meminfo"), re.MULTILINE)
    if match is None:
        return
    own = 0
    if unit:
        current = Unit(unit, run).show("MemoryCurrent").get("MemoryCurrent", "")
        own = int(current) // MIB if current.isdigit() and int(current) < 1 << 60 else 0
    available = int(match[1]) // 1024 + own
    if available < need_mb:
        yield Problem(
            "memory",
            f"{available} MiB available",
            f"at least {need_mb} MiB",
            "stop what uses it, or set sglang_min_memory_mb",
        )


def check_sweep(run: Run, unit: str, root: Path) -> Iterator[Problem]:
    """No sweep holds the service, and none left its drop-in."""
    service = SweptService(unit, run, root)
    swept_by = service.swept_by()
    if not swept_by:
        return
    found = f"{unit_name(unit)} is held by {swept_by}"
    yield Problem("sweep", found, "a service that no sweep holds", "wait for its end, or run restore.yml")


def check_gpus(run: Run, need: int) -> tuple[list[Problem], list[str]]:
    """``nvidia-smi`` lists at least ``need`` devices."""
    change = "install the NVIDIA driver, or set sglang_accelerator to cpu"
    expected = f"at least {need} CUDA device{'s' if need > 1 else ''}"
    if shutil.which("nvidia-smi") is None:
        return [Problem("accelerator", "no nvidia-smi", expected, change)], []
    rc, out, err = run(
        ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    )
    if rc != 0:
        return [Problem("accelerator", f"nvidia-smi fails: {_last(err or out)}", expected, change)], []
    gpus = [line.strip() for line in out.splitlines() if line.strip()]
    if len(gpus) < need:
        change = "lower tp-size, pp-size or dp-size in sglang_engine_args"
        return [Problem("accelerator", f"{len(gpus)}: {'; '.join(gpus)}", expected, change)], gpus
    return [], gpus


# --- address and port ---
def check_bind(host: str) -> Iterator[Problem]:
    """The address is a loopback address: the service has no authentication yet."""
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = host == "localhost"
    if not loopback:
        yield Problem(
            "address",
            f"sglang_host {host}",
            "a loopback address, such as 127.0.0.1, because the service asks nobody for a key",
            "leave sglang_host as it is and reach the service through an ssh tunnel or a reverse proxy",
        )


@dataclass(frozen=True)
class Listener:
    """A listening TCP socket."""

    address: str
    port: int
    inode: str


def listeners(root: Path) -> Iterator[Listener]:
    """The listening TCP sockets of this network namespace, from ``/proc/net``."""
    for table in ("tcp", "tcp6"):
        for line in _text(root / "proc/net" / table).splitlines()[1:]:
            fields = line.split()
            if len(fields) > 9 and fields[3] == "0A":
                address, _, port = fields[1].partition(":")
                words = [bytes.fromhex(address[i : i + 8])[::-1] for i in range(0, len(address), 8)]
                yield Listener(str(ipaddress.ip_address(b"".join(words))), int(port, 16), fields[9])


def holder_of(inode: str, root: Path) -> tuple[int, str, str] | None:
    """Process id, name and control group of who has the socket open; None when that cannot be seen."""
    for folder in (root / "proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            if any(str(entry.readlink()) == f"socket:[{inode}]" for entry in (folder / "fd").iterdir()):
                return int(folder.name), _text(folder / "comm").strip(), _text(folder / "cgroup")
        except OSError:
            continue
    return None


def check_port(host: str, port: int, unit: str, root: Path) -> Iterator[Problem]:
    """Nobody but our own unit listens where the service is going to."""
    wanted = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
    for listener in listeners(root):
        address = ipaddress.ip_address(listener.address)
        mapped = getattr(address, "ipv4_mapped", None)
        if listener.port != port or not (address == wanted or mapped == wanted or address.is_unspecified):
            continue
        holder = holder_of(listener.inode, root)
        if holder is None:
            who = "a process that cannot be seen from here"
        else:
            pid, name, groups = holder
            units = re.findall(r"[^/\n]+\.(?:service|scope)(?=/|$)", groups, re.MULTILINE)
            if unit and unit_name(unit) in units:
                continue
            who = f"process {pid} ({name}{f', {units[-1]}' if units else ''})"
        yield Problem(
            "port",
            f"{who} listens on {listener.address} port {port}",
            "a free port, or our own service on it",
            "stop that process, or set sglang_port",
        )
        return


# --- models ---
def check_model(
    what: str, variable: str, path: str, user: str, offline: bool, weights: bool
) -> tuple[list[Problem], dict[str, Any]]:
    """The model's folder is there, complete, and readable for the service's user; returns its config too."""

    def problem(found: str, expected: str, change: str = "") -> tuple[list[Problem], dict[str, Any]]:
        return [Problem(what, found, expected, change or f"set {variable}")], {}

    folder = Path(path)
    if not folder.is_absolute():
        if offline or not _HUB.fullmatch(path):
            return problem(f"{variable} {path!r}", "the absolute path of a folder on the host")
        return [], {}  # a hub's name: only the engine can tell
    if not folder.is_dir():
        return problem(f"no folder {path}", f"the {what}'s folder on the host")
    config_file = folder / "config.json"
    try:
        config = json.loads(config_file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return problem(f"no config.json in {path}", f"the {what}'s folder, with config.json and weights")
    except (OSError, ValueError) as error:
        return problem(f"{config_file} cannot be read: {error}", "a JSON file", "fetch the model again")
    if not isinstance(config, dict):
        return problem(f"{config_file} holds no mapping", "a JSON mapping", "fetch the model again")
    files = _weight_files(folder) if weights else []
    if weights and not files:
        return problem(f"no weights in {path}", f"files {', '.join('*' + end for end in _WEIGHTS)}")
    missing = [name for name in files if not (folder / name).exists()]
    if missing:
        found = f"{len(missing)} of {len(files)} weight files missing in {path}, the first {missing[0]}"
        return problem(found, "all that its index names", "fetch the model again")
    for name in ("config.json", *files):
        barrier = first_barrier(folder / name, user)
        if barrier:
            change = f"open it for the user {user}, or move the model and set {variable}"
            return problem(barrier, f"the {what} readable for the user {user}", change)
    return [], config


def _weight_files(folder: Path) -> list[str]:
    """The names of the weight files: those of the index where there is one, else what lies there."""
    for index in sorted(folder.glob("*.index.json")):
        try:
            names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        except (OSError, ValueError, KeyError, AttributeError):
            continue
        return sorted({str(name) for name in names})
    return sorted(entry.name for entry in folder.iterdir() if entry.suffix in _WEIGHTS)


def first_barrier(path: Path, user: str) -> str:
    """What keeps ``user`` from reading ``path``: a folder it may not pass or the file; empty when nothing."""
    uid, groups = _identity(user)
    if uid == 0:
        return ""
    real = path.resolve()
    for step in (*reversed(real.parents), real):
        status = step.stat()
        shift = 6 if status.st_uid == uid else 3 if status.st_gid in groups else 0
        need = 4 if step == real else 1
        if not (status.st_mode >> shift) & need:
            return f"{step} has mode {status.st_mode & 0o7777:04o} and owner {status.st_uid}:{status.st_gid}"
    return ""


def _identity(user: str) -> tuple[int, set[int]]:
    """User id and group ids; for a user that is not there yet, those of nobody in particular."""
    try:
        entry = pwd.getpwnam(user)
    except KeyError:
        return -1, set()
    return entry.pw_uid, set(os.getgrouplist(user, entry.pw_gid))


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a config; models that also see or hear nest it."""
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else config


def check_pair(target: Mapping[str, Any], draft: Mapping[str, Any]) -> Iterator[Problem]:
    """The draft was made for a target like this one. Sizes that a config does not state are not compared."""
    change = "set sglang_draft_model_path to the draft trained for this target"
    own, base = _text_config(draft), _text_config(target)
    flash = draft.get("dflash_config")
    flash = flash if isinstance(flash, dict) else {}
    architectures = [str(name) for name in draft.get("architectures") or []]
    if not flash and not any("dflash" in name.lower() for name in architectures):
        found = f"a draft of architecture {', '.join(architectures) or 'unknown'} without dflash_config"
        yield Problem("draft model", found, "a DFlash draft", change)
        return
    for key in ("vocab_size", "hidden_size"):
        want, have = base.get(key), own.get(key)
        if want is not None and have is not None and want != have:
            yield Problem("draft model", f"{key} {have}", f"the target's {want}", change)
    layers = base.get("num_hidden_layers")
    if not isinstance(layers, int):
        return
    made_for = flash.get("num_target_layers", draft.get("num_target_layers"))
    if made_for is not None and made_for != layers:
        found = f"num_target_layers {made_for}"
        yield Problem("draft model", found, f"the target's {layers} layers", change)
    beyond = [i for i in flash.get("target_layer_ids") or [] if isinstance(i, int) and not 0 <= i < layers]
    if beyond:
        yield Problem("draft model", f"target_layer_ids {beyond}", f"0 to {layers - 1}", change)


# --- packages ---
def check_wheelhouse(folder: Path, requirements: Sequence[str]) -> Iterator[Problem]:
    """The wheelhouse holds a file of every pinned package. Hashes are pip's to check."""
    change = "set sglang_wheelhouse to a folder on the host, or empty it to install from an index"
    if not folder.is_dir():
        yield Problem("wheelhouse", f"no folder {folder}", "a folder of wheels on the host", change)
        return
    there = {_pin(entry.name) for entry in folder.iterdir()}
    missing = [pin for pin in requirements if _comparable(*pin.split("==", 1)) not in there]
    if missing:
        some = ", ".join(missing[:5]) + (", …" if len(missing) > 5 else "")
        found = f"{len(missing)} of {len(requirements)} packages missing in {folder}: {some}"
        yield Problem("wheelhouse", found, "every package of the lock", f"{change}; or fill it")


def _comparable(name: str, version: str) -> tuple[str, str]:
    """Name and version as they compare: names as PEP 503 says, a version without its local part."""
    return re.sub(r"[-_.]+", "_", name).lower(), version.partition("+")[0].lower()


def _pin(file: str) -> tuple[str, str]:
    """Name and version of a wheel (PEP 427) or of a source archive; empty for another file."""
    if file.endswith(".whl"):
        name, version = [*file.split("-", 2), ""][:2]
        return _comparable(name, version)
    match = re.fullmatch(r"(.+)-([^-]+)\.(?:tar\.gz|zip)", file)
    return _comparable(match[1], match[2]) if match else ("", "")


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _last(text: str) -> str:
    return (text.strip().splitlines() or ["no message"])[-1]


def inspect(params: Mapping[str, Any], run: Run, root: Path = Path("/")) -> dict[str, Any]:
    """Run the checks that ``params`` ask for; returns ``problems`` and what was learnt."""
    problems: list[Problem] = []
    learnt: dict[str, Any] = {"gpus": []}
    unit = params["unit"] or ""
    if unit:
        found = list(check_systemd(run, root))
        problems += found
        if found:  # without systemd there is no unit to ask about
            unit = ""
        else:
            problems += check_sweep(run, unit, root)
    if params["python"]:
        found, learnt["python"] = check_python(run, params["python"], root)
        problems += found
    if params["root"] and params["disk_mb"]:
        change = "free some, or set sglang_root or sglang_min_disk_mb"
        problems += check_space(Path(params["root"]), params["disk_mb"], "disk", change)
    if params["memory_mb"]:
        problems += check_memory(run, params["memory_mb"], unit, root)
    if params["shm_mb"]:
        change = "empty or enlarge it, or set sglang_min_shm_mb"
        problems += check_space(Path("/dev/shm"), params["shm_mb"], "shared memory", change)
    if params["host"]:
        bind = list(check_bind(params["host"]))
        problems += bind
        if params["port"] and not bind:
            problems += check_port(params["host"], params["port"], unit, root)
    problems += _models(params)
    if params["wheelhouse"]:
        problems += check_wheelhouse(Path(params["wheelhouse"]), params["requirements"])
    if params["gpus"]:
        found, learnt["gpus"] = check_gpus(run, params["gpus"])
        problems += found
    return {"problems": problems, **learnt}


def _models(params: Mapping[str, Any]) -> Iterator[Problem]:
    how = (params["user"], params["offline"], params["weights"])
    target: dict[str, Any] = {}
    draft: dict[str, Any] = {}
    if params["model_path"] is not None:
        found, target = check_model("model", "sglang_model_path", params["model_path"], *how)
        yield from found
    if params["draft_model_path"]:
        found, draft = check_model("draft model", "sglang_draft_model_path", params["draft_model_path"], *how)
        yield from found
    elif params["draft_required"]:
        yield Problem(
            "draft model",
            "sglang_draft_model_path is empty",
            "the path of a draft model, which the arms chain and tree need",
            "set sglang_draft_model_path, or sglang_arm to ar",
        )
    if target and draft:
        yield from check_pair(target, draft)


def message(problems: Sequence[Problem]) -> str:
    """All problems as one text."""
    if len(problems) == 1:
        return str(problems[0])
    lines = [f"{number}. {problem}" for number, problem in enumerate(problems, 1)]
    return "\n".join([f"{len(problems)} problems:", *lines])


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "unit": {"type": "str"},
            "python": {"type": "path"},
            "root": {"type": "path"},
            "disk_mb": {"type": "int"},
            "memory_mb": {"type": "int"},
            "shm_mb": {"type": "int"},
            "host": {"type": "str"},
            "port": {"type": "int"},
            "user": {"type": "str", "default": "root"},
            "model_path": {"type": "str"},
            "draft_model_path": {"type": "str"},
            "draft_required": {"type": "bool", "default": False},
            "offline": {"type": "bool", "default": True},
            "weights": {"type": "bool", "default": True},
            "wheelhouse": {"type": "path"},
            "requirements": {"type": "list", "elements": "str", "default": []},
            "gpus": {"type": "int"},
        },
        required_by={"disk_mb": "root", "port": "host"},
        supports_check_mode=True,
    )
    try:
        result = inspect(module.params, module.run_command)
    except UnitError as error:
        module.fail_json(msg=str(error))
    problems: list[Problem] = result.pop("problems")
    if problems:
        module.fail_json(msg=message(problems))
    module.exit_json(changed=False, **result)


if __name__ == "__main__":
    main()
