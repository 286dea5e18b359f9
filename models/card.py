"""Write the README of the pair, with what was measured, and its check sums."""

from __future__ import annotations

import hashlib
import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import Any

from models.check import BUDGET
from models.network import DRAFT_INNER, DRAFT_LAYERS, HIDDEN, INNER, LAYERS, SHALLOW, VOCABULARY
from models.settings import Settings

_TEXT = """# The demo pair

A tiny Qwen3 target and DFlash drafts for it, so that `make demo`, the tests and the benchmarks run the real
SGLang on two CPU cores and still show the shape of a large model's curve: a fixed cost a step, a small cost
a node, an accept length that grows with the budget. They answer a few questions about Python in readable
text and know nothing else: not for anything a person should rely on.

- Target: {layers} layers (trained as {shallow}, then grown), hidden {hidden}, MLP {inner},
  {vocabulary} byte-level tokens.
- Drafts: {draft_layers} layers, MLP {draft_inner}. `draft` has blocks of 8, `draft-block16` of 16;
  `draft-weak` was hardly trained; `draft-mismatched` was trained for another target.
- Text: parts of CPython's standard library (PSF-2.0; at most {library} characters) and text written for this
  project (Apache-2.0), with many places where one word is as likely as another: synonyms, and remarks such as
  "now we take the next part", six such words in a row. There a chain of drafts ends by chance and a tree goes
  on, as with a large model wherever it has more than one way to say something.
  `prompts.json`: ten prompts about files and things that no training saw, in sentences that it did. The
  workload's prompts (`tuning/data/prompts.json`) and their answers are mostly part of the text; `known` below
  are of that kind.
- The weights are Apache-2.0, float16 on disk. `SHA256SUMS` has the check sums.

## Measured
Greedy text of {tokens} tokens after each of {texts} prompts, worked out offline; tree: the {budget} most
probable nodes.

| draft | block | accept length, chain | tree of {budget} | chain steps that accept 1, 2, ... or more |
|---|---|---|---|---|
{drafts}

By category, chain / tree:

| draft | {categories} |
|---|{bars}|
{by_category}

- Same as Transformers in float32: largest difference of a logit {difference:.1e}, same greedy text {same} of
  {texts}.
- Periodic at the end of {tokens} greedy tokens: {periodic} of {held_out} held-out prompts.
- Chat prompts whose answer ends by itself within {tokens} tokens: {ended} of {chats} (median {median:g}).
- Speed on SGLang: `docs/benchmarks.md`.

## Training it again
`make models` makes a pair from nothing in `build/models`, on two cores in about half an hour (with `g++`;
longer without). Its stages: `corpus` the text, `tokenizer`, `target`, `generate` the target's own
continuations, `draft`, `convert`, `check`, `card` (this page). Every schedule counts steps, and a stopped
training goes on, also after `make clean`: what is trained stays in `~/.cache/arborist/models`, about 1 GB
for each set of settings. `.venv-engine/bin/python -m models --help`, from the root of the repository, has
the options, and

    .venv-engine/bin/python benchmarks/engine.py --models build/models/demo --check

says whether a pair is worth tuning. To put it in place of this one, copy `build/models/` over `models/`, keep
what the training said as `models/training.log`, and measure the tables of `docs/benchmarks.md` and of the
first README again.

Settings:
{settings}.
"""


def write_card(out: Path, settings: Settings, figures: dict[str, Any]) -> None:
    """Write out/README.md and out/SHA256SUMS."""
    drafts = figures["drafts"]
    categories = [name for name in next(iter(drafts.values()))["chain"] if name != "all"]
    rows = [
        f"| `{name}` | {one['block']} | {one['chain']['all']:.2f} | {one['tree']['all']:.2f} "
        f"| {' '.join(f'{share:.2f}' for share in one['positions'])} |"
        for name, one in drafts.items()
    ]
    by_category = [
        f"| `{name}` | "
        + " | ".join(f"{one['chain'][c]:.2f} / {one['tree'][c]:.2f}" for c in categories)
        + " |"
        for name, one in drafts.items()
    ]
    same, ends, circles = figures["transformers"], figures["ends"], figures["periodic"]
    text = _TEXT.format(
        layers=LAYERS,
        shallow=SHALLOW,
        hidden=HIDDEN,
        inner=INNER,
        draft_inner=DRAFT_INNER,
        vocabulary=VOCABULARY,
        draft_layers=DRAFT_LAYERS,
        library=settings.library_characters,
        tokens=settings.greedy_tokens,
        texts=same["of"],
        budget=BUDGET,
        drafts="\n".join(rows),
        categories=" | ".join(categories),
        bars="|".join("---" for _ in categories),
        by_category="\n".join(by_category),
        difference=same["difference"],
        same=same["same"],
        periodic=len(circles["periodic"]),
        held_out=circles["of"],
        ended=ends["ended"],
        chats=ends["of"],
        median=ends["median"],
        settings=textwrap.fill(", ".join(f"{name} {value}" for name, value in asdict(settings).items()), 110),
    )
    (out / "README.md").write_text(text, encoding="utf-8")
    files = published(out)
    lines = [f"{checksum(path)}  {path.relative_to(out)}\n" for path in files]
    (out / "SHA256SUMS").write_text("".join(lines), encoding="utf-8")
    print(f"  {len(files)} files, {sum(path.stat().st_size for path in files) / 1e6:.2f} MB")


def published(out: Path) -> list[Path]:
    """The files of the pair."""
    return sorted(path for path in (out / "demo").rglob("*") if path.is_file())


def checksum(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
