"""Prove the written pair: same as Transformers, text that moves on and ends, worth of the drafts."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from models.acceptance import measure
from models.corpus.build import chat
from models.generate import Decoder
from models.network import Draft, Target
from models.periodic import is_periodic
from models.settings import Settings
from models.tokens import END_OF_TURN

SEED_PROMPTS = (
    "Write a Python quicksort with detailed comments.",
    "Explain how a hash table works.",
    "Write a function to reverse a linked list.",
)
#: Most of these and of the seed's are in the training text, with their answers.
_MORE_PROMPTS = (
    "Explain how a stack works.",
    "Write a Python merge sort with detailed comments.",
    "Write a function to check the values of the tickets.",
    "Describe the phases of the moon to a ten-year-old.",
    "Complete this Python code:\n\ndef binary_search(items, target):\n    low = 0\n",
    "Now write a function to group by state the parcels.",
    "Prove that the sum of the first n odd numbers is n squared.",
)
_LOGITS = 1e-4
BUDGET = 16


def check(out: Path, settings: Settings) -> dict[str, Any]:
    """All checks of the pair in ``out``; prints them, and returns the figures for the card.

    Raises ValueError when the written target isn't the one that Transformers computes.
    """
    torch.set_num_threads(2)
    folder = out / "demo" / "target"
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompts: list[dict[str, str]] = json.loads((out / "prompts.json").read_text(encoding="utf-8"))
    chats = [chat(text) for text in (*SEED_PROMPTS, *_MORE_PROMPTS)]
    texts = [prompt["text"] for prompt in prompts] + chats
    encoded = [tokenizer.encode(text).ids for text in texts]

    tensors = {name: value.float() for name, value in load_file(folder / "model.safetensors").items()}
    target = Target.from_published(tensors)
    decoder = Decoder(target, torch.float32)
    rows = []
    for ids in encoded:
        made = decoder.continue_text(torch.tensor([ids]), len(ids) + settings.greedy_tokens)
        rows.append((made.ids[0], made.features[0]))
    figures: dict[str, Any] = {"transformers": _compare(folder, target, [ids for ids, _ in rows], encoded)}

    circles, ends = [], {}
    for prompt, ids, (row, _) in zip(prompts, encoded, rows, strict=False):
        answer = row[len(ids) :].tolist()
        if is_periodic(answer):
            circles.append(prompt["id"])
    for text, ids, (row, _) in zip(texts, encoded, rows, strict=True):
        answer = row[len(ids) :].tolist()
        if text.endswith("<|im_start|>assistant\n"):
            ends[text] = answer.index(END_OF_TURN) if END_OF_TURN in answer else None
    figures["periodic"] = {"of": len(prompts), "periodic": circles}
    lengths = [length for length in ends.values() if length is not None]
    figures["ends"] = {"of": len(ends), "ended": len(lengths), "median": statistics.median(lengths or [0])}
    print(
        f"  periodic after {settings.greedy_tokens} greedy tokens: {len(circles)} of {len(prompts)} {circles}"
    )
    print(f"  answers that end by themselves: {len(lengths)} of {len(ends)}, tokens {sorted(lengths)}")
    for number in range(len(prompts), len(prompts) + len(SEED_PROMPTS)):
        answer = rows[number][0][len(encoded[number]) :].tolist()
        stop = answer.index(END_OF_TURN) if END_OF_TURN in answer else len(answer)
        print(f"--- {texts[number]}{tokenizer.decode(answer[:stop])}\n---")

    categories = [prompt["category"] for prompt in prompts] + ["known"] * len(chats)
    figures["drafts"] = {}
    for path in sorted((out / "demo").glob("draft*")):
        figures["drafts"][path.name] = _draft(path, target, rows, [len(ids) for ids in encoded], categories)
    return figures


def _compare(folder: Path, target: Target, rows: list[Tensor], encoded: list[list[int]]) -> dict[str, Any]:
    """Logits of the whole texts in both, and whether Transformers would have chosen the same tokens."""
    # Not needed here, and the engine's torchvision is for another build of torch than a CPU's.
    sys.modules.setdefault("torchvision", None)  # type: ignore[arg-type]
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    worst, same = 0.0, 0
    with torch.no_grad():
        for row, prompt in zip(rows, encoded, strict=True):
            theirs = reference(row[None]).logits[0]
            worst = max(worst, (target(row[None])[0] - theirs).abs().max().item())
            # If each token is the likeliest after those before it, decoding greedily gives this very text.
            same += bool((theirs[len(prompt) - 1 : -1].argmax(-1) == row[len(prompt) :]).all())
    print(
        f"  against Transformers: largest difference of a logit {worst:.1e}, same text {same} of {len(rows)}"
    )
    if worst > _LOGITS or same < len(rows):
        raise ValueError(
            f"found a difference of {worst:.1e} and {same} of {len(rows)} texts, expected {_LOGITS} and all"
        )
    return {"difference": worst, "same": same, "of": len(rows)}


def _draft(
    path: Path, target: Target, rows: list[tuple[Tensor, Tensor]], prompts: list[int], categories: list[str]
) -> dict[str, Any]:
    """Accept lengths of one draft by category, and how far its chain's steps came."""
    block = json.loads((path / "config.json").read_text(encoding="utf-8"))["block_size"]
    draft = Draft.from_published(load_file(path / "model.safetensors"))
    embedding, head = target.embedding.detach(), target.head.detach()
    chain: dict[str, list[int]] = {}
    tree: dict[str, list[int]] = {}
    for (ids, features), prompt, category in zip(rows, prompts, categories, strict=True):
        found = measure(draft, embedding, head, ids, features, prompt, block, BUDGET)
        for name in (category, "all"):
            chain.setdefault(name, []).extend(found.chain)
            tree.setdefault(name, []).extend(found.tree)
    figures = {
        "block": block,
        "chain": {name: round(statistics.mean(steps), 2) for name, steps in chain.items()},
        "tree": {name: round(statistics.mean(steps), 2) for name, steps in tree.items()},
        # Of the steps, so that they and the bonus add up to the accept length.
        "positions": [
            round(statistics.mean(step > place for step in chain["all"]), 2) for place in range(1, block)
        ],
    }
    print(f"  {path.name}: chain {figures['chain']}  tree of {BUDGET} {figures['tree']}")
    print(f"    steps that accepted 1, 2, ... tokens or more: {figures['positions']}")
    return figures
