"""The grid: from what a person types to the list of configurations that will be tried."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from tuning.models import ARMS, Configuration

PRESETS: dict[str, str] = {
    "quick": "8:4, 16:4",
    "seed": "8:4, 16:4, 16:8, 24:6, 32:8, 48:8",
}
HOW = (
    "write budget:topk items such as '8:4, 16:4', a preset (" + ", ".join(PRESETS) + "), "
    "a list, {budget: [...], topk: [...]}, or the path of a .yml or .json file"
)
#: Ansible parts the words of -e KEY=VALUE at spaces; a grid that was cut is not to pass for a short one.
QUOTE = "with -e, a grid with spaces needs quotes inside quotes: -e 'grid=\"8:4, 16:4\"'"
_BASELINES = {"ar": Configuration(arm="ar"), "chain": Configuration(arm="chain")}
_ITEM_KEYS = ("arm", "budget", "topk", "extra")
_SCALARS = (str, bool, int, float, type(None))
_FILE = re.compile(r"\.(ya?ml|json)$", re.IGNORECASE)


class GridError(ValueError):
    """The grid can't be used; the message names the item and what was expected."""


class _Loader(yaml.SafeLoader):
    """YAML without base-60 numbers: an unquoted ``8:4`` stays the text it looks like."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, rx) for tag, rx in pairs if not tag.endswith((":int", ":float", ":timestamp"))]
    for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"[-+]?[0-9]+$"), list("-+0123456789"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+)([eE][-+]?[0-9]+)?$"),
    list("-+.0123456789"),
)


def parse_grid(
    spec: object, arms: str | Sequence[str] = ("ar", "chain"), base: Path | None = None
) -> list[Configuration]:
    """Expand ``spec`` into configurations: ar first, then chain, then trees in the order given.

    ``spec`` is a preset name, items as text (``"8:4, 16:4"``, ``"8 4;16 4"``), a list of texts or
    dicts, a dict whose values are lists (their product), or the path of a file that holds one of
    those (relative to ``base``, or to the working directory). ``arms`` are the baseline arms to
    add. Duplicates are dropped. Raises GridError naming the item and what was expected.
    """
    found = [*_baselines(arms), *_expand(spec, base, depth=0)]
    unique: dict[str, Configuration] = {}
    for configuration in found:
        unique.setdefault(configuration.id, configuration)
    return sorted(unique.values(), key=lambda c: ARMS.index(c.arm))


def _baselines(arms: str | Sequence[str]) -> list[Configuration]:
    # Also a list as text, which is what -e sweep_arms=[] gives.
    text = arms.strip().removeprefix("[").removesuffix("]").strip() if isinstance(arms, str) else None
    names = list(arms) if text is None else re.split(r"[,\s]+", text)
    made = []
    for name in names:
        if name in _BASELINES:
            made.append(_BASELINES[name])
        elif name != "":
            raise GridError(f"baseline arm {name!r} is unknown; sweep_arms takes ar and chain")
    return made


def _expand(spec: object, base: Path | None, depth: int) -> list[Configuration]:
    if isinstance(spec, str):
        return _from_text(spec, base, depth)
    if isinstance(spec, Mapping):
        return _from_mapping(spec)
    if isinstance(spec, Sequence) and not isinstance(spec, (bytes, bytearray)):
        if not spec:
            raise GridError(f"the grid is an empty list; {HOW}")
        return [_item(one, number) for number, one in enumerate(spec, 1)]
    if spec is None:
        raise GridError(f"the grid is empty; {HOW}")
    raise GridError(f"the grid is {_show(spec)}{_base60(spec)}; {HOW}")


def _from_text(text: str, base: Path | None, depth: int) -> list[Configuration]:
    spec = text.strip()
    if not spec:
        raise GridError(f"the grid is empty; {HOW}")
    if spec == "auto":
        raise GridError("grid 'auto' is not available yet; use a preset (quick, seed) or a list")
    if spec in PRESETS:
        return _from_text(PRESETS[spec], base, depth)
    if spec[0] in "[{":
        return _expand(_load(spec, "the grid"), base, depth + 1)
    if _FILE.search(spec) and "\n" not in spec:
        return _from_file(spec, base, depth)
    if re.fullmatch(r"[A-Za-z_][\w.-]*", spec) and spec not in ARMS:
        raise GridError(f"grid {spec[:60]!r} is not a preset; known presets: {', '.join(PRESETS)}; or {HOW}")
    return [_item(one, number) for number, one in enumerate(_split(spec), 1)]


def _split(text: str) -> list[str]:
    """Items between commas, semicolons or line breaks; spaces also part items that carry a colon."""
    parts = [part.strip() for part in re.split(r"[,;\n]", text)]
    if len(parts) > 1 and parts[-1] == "":
        if not re.search(r"\s", text):  # a grid that was cut at its first space has none
            raise GridError(f"the grid {text!r} ends with a separator, as if its rest were lost; {QUOTE}")
        parts.pop()
    items: list[str] = []
    for part in parts:
        words = part.split()
        if len(words) > 1 and all(":" in word for word in words):
            items.extend(words)
        else:
            items.append(part)
    if not items:
        raise GridError(f"the grid has no item; {HOW}")
    return items


def _from_file(name: str, base: Path | None, depth: int) -> list[Configuration]:
    if depth:
        raise GridError(f"grid file {name!r} is named inside another grid file; put its items there")
    path = Path(name).expanduser()
    if not path.is_absolute() and base is not None:
        path = base / path
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it isn't UTF-8 text"
        raise GridError(f"grid file {path} can't be read: {reason}; {HOW}") from error
    content = _load(text, f"grid file {path}")
    if content is None or content == "":
        raise GridError(f"grid file {path} is empty; expected a list of items such as '8:4'")
    try:
        return _expand(content, None, depth + 1)
    except GridError as error:
        raise GridError(f"{path}: {error}") from error


def _load(text: str, what: str) -> object:
    try:
        return yaml.load(text, Loader=_Loader)  # a SafeLoader
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        first = str(error).strip().splitlines() or ["unreadable"]
        raise GridError(f"{what} is neither YAML nor JSON: {first[0][:120]}; {HOW}; {QUOTE}") from error


def _from_mapping(spec: Mapping[Any, Any]) -> list[Configuration]:
    if not spec:
        raise GridError(f"the grid is an empty dict; {HOW}")
    lists = {key: value for key, value in spec.items() if key != "extra" and _is_list(value)}
    if not lists:
        return [_item(spec, 1)]
    for key, value in lists.items():
        if not value:
            raise GridError(f"grid {key!r} is an empty list; give at least one value")
    keys = [key for key in spec if key != "extra"]
    axes: list[list[Any]] = [list(spec[key]) if _is_list(spec[key]) else [spec[key]] for key in keys]
    shared = {"extra": spec["extra"]} if "extra" in spec else {}
    return [
        _item(dict(zip(keys, values, strict=True)) | shared, number)
        for number, values in enumerate(itertools.product(*axes), 1)
    ]


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray))


def _item(item: object, number: int) -> Configuration:
    name = f"grid item {number} {_show(item)}"
    if isinstance(item, str):
        return _text_item(item, name)
    if isinstance(item, Mapping):
        return _dict_item(item, name)
    raise GridError(f"{name}: expected budget:topk such as 16:4, or a dict{_base60(item)}")


def _text_item(item: str, name: str) -> Configuration:
    text = item.strip()
    if text in _BASELINES:
        return _BASELINES[text]
    parts = [p.strip() for p in text.split(":")] if ":" in text else text.split()
    example = "write budget:topk such as 16:4"
    if not parts or not any(parts):
        raise GridError(f"{name}: it is empty; {example}")
    if len(parts) > 2:
        raise GridError(
            f"{name}: expected two numbers, found {len(parts)}; {example}, items parted by ',' or ';'"
        )
    values = dict(zip(("budget", "topk"), parts, strict=False))
    for key in ("budget", "topk"):
        if not values.get(key):
            cut = f"; {QUOTE}" if len(parts) == 1 and ":" not in text else ""
            raise GridError(f"{name}: {key} is missing; {example}{cut}")
    budget, topk = (_whole(values[key], key, name) for key in ("budget", "topk"))
    return Configuration(arm="tree", budget=budget, topk=topk)


def _dict_item(item: Mapping[Any, Any], name: str) -> Configuration:
    for key in item:
        if key not in (*_ITEM_KEYS, "label", "id"):
            raise GridError(f"{name}: unknown key {key!r}; known keys: {', '.join(_ITEM_KEYS)}")
    data = {str(key): value for key, value in item.items() if value is not None}
    arm = data.setdefault("arm", "tree")
    if arm not in ARMS:
        raise GridError(f"{name}: arm {arm!r} is unknown; expected one of {', '.join(ARMS)}")
    for key in ("budget", "topk"):
        if key in data:
            data[key] = _whole(data[key], key, name)
        elif arm == "tree":
            raise GridError(f"{name}: {key} is missing; write {{budget: 16, topk: 4}}")
    extra = data.get("extra", {})
    if not isinstance(extra, Mapping) or not all(isinstance(flag, str) for flag in extra):
        raise GridError(f"{name}: extra must map engine flags to values, such as {{page-size: 1}}")
    for flag, value in extra.items():
        if not all(isinstance(one, _SCALARS) for one in (value if _is_list(value) else [value])):
            raise GridError(
                f"{name}: extra flag {flag!r} is {_show(value)}; expected text, a number, true, false, null "
                "or a list of texts and numbers"
            )
    data["extra"] = dict(extra)
    try:
        return Configuration.model_validate(data)
    except ValidationError as error:
        raise GridError(f"{name}: {_reason(error)}") from error


def _reason(error: ValidationError) -> str:
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"] if isinstance(part, str))
    message = first["msg"].removeprefix("Value error, ")
    return f"{where}: {message}" if where and first["type"] != "value_error" else message


def _whole(value: object, key: str, name: str) -> int:
    """A whole number >= 1, from an int or from its decimal digits (Ansible hands over text)."""
    number = 0
    if isinstance(value, str):
        number = int(value) if re.fullmatch(r"\s*[-+]?[0-9]{1,9}\s*", value, re.ASCII) else 0
    elif isinstance(value, int) and not isinstance(value, bool):
        number = int(value)
    if number < 1:
        raise GridError(f"{name}: {key} is {_show(value)}; expected a whole number of at least 1")
    return number


def _base60(value: object) -> str:
    """YAML 1.1 reads an unquoted 8:4 as the base-60 number 484; say so when it looks like that."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 60:
        budget, topk = divmod(value, 60)
        return f" (an unquoted {budget}:{topk} in YAML is the number {value}: quote it, '{budget}:{topk}')"
    return ""


def _show(value: object) -> str:
    """The value as typed, short."""
    if isinstance(value, str):
        shown = repr(value)
    else:
        try:
            shown = json.dumps(value)
        except (TypeError, ValueError):
            shown = repr(value)
    return shown if len(shown) <= 80 else shown[:77] + "..."


def to_json(configurations: Iterable[Configuration]) -> list[dict[str, Any]]:
    """The configurations as plain data: arm, budget, topk, extra, label, id."""
    return [configuration.model_dump(mode="json") for configuration in configurations]
