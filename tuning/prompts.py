"""The prompts of a workload: packaged ones, or a file of one's own."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, ValidationError

from tuning.models import FileName, Frozen


class PromptError(ValueError):
    """The prompts can't be used; the message names the item."""


class Prompt(Frozen):
    """One prompt: what a user would type. ``id`` is unique in its workload."""

    id: FileName
    category: FileName
    text: str = Field(min_length=1)


def load_prompts(path: Path | str | None = None, limit: int = 0) -> list[Prompt]:
    """The prompts of a YAML or JSON file, or the packaged ones.

    The file is a list; an item is a text, or ``{id, category, text}``. ``limit`` keeps that
    many, taken from the categories in turn so that they stay balanced; 0 keeps all. Raises PromptError.
    """
    if path:
        name = str(path)
        try:
            text = Path(path).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise PromptError(f"prompts file {name} can't be read: {error}; check sweep_prompts") from error
    else:
        name = "the packaged prompts"
        text = (files("tuning") / "data" / "prompts.json").read_text(encoding="utf-8")
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise PromptError(f"{name} is neither YAML nor JSON: {str(error).splitlines()[0]}") from error
    if not isinstance(data, list) or not data:
        raise PromptError(f"{name}: expected a list of texts or of {{id, category, text}}, found none")
    prompts = [_prompt(item, number, name) for number, item in enumerate(data, 1)]
    seen: set[str] = set()
    for prompt in prompts:
        if prompt.id in seen:
            raise PromptError(f"{name}: two prompts have the id {prompt.id!r}; ids must differ")
        seen.add(prompt.id)
    return balanced(prompts, limit)


def _prompt(item: Any, number: int, name: str) -> Prompt:
    data = {"id": f"p{number:03d}", "category": "custom", "text": item} if isinstance(item, str) else item
    try:
        return Prompt.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise PromptError(f"{name}: prompt {number}: {where}: {first['msg']}") from error


def balanced(prompts: Sequence[Prompt], limit: int) -> list[Prompt]:
    """The first ``limit`` prompts, taking one of each category in turn; all of them for 0."""
    if limit < 0:
        raise PromptError(f"the prompt limit is {limit}; expected 0 (all) or more, check sweep_prompt_limit")
    if limit == 0 or limit >= len(prompts):
        return list(prompts)
    groups: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        groups.setdefault(prompt.category, []).append(prompt)
    turns = itertools.chain.from_iterable(itertools.zip_longest(*groups.values()))
    chosen = [prompt.id for prompt in turns if prompt is not None][:limit]
    return [prompt for prompt in prompts if prompt.id in chosen]
