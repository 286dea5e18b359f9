"""The stages in their order, each skipped when its result for the same settings is there."""

from __future__ import annotations

import fcntl
import hashlib
import inspect
import json
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

from tokenizers import Tokenizer

from models import convert, draft, generate, network, optimiser, target, tokens, training
from models.card import checksum, published, write_card
from models.check import check
from models.corpus.build import build
from models.draft import Recipe
from models.settings import Settings
from models.tokens import encode, load_documents, train_tokenizer
from models.training import PROCESSES, in_processes, quiet_compiler

STAGES = ("corpus", "tokenizer", "target", "generate", "draft", "convert", "check", "card")
#: What the targets depend on, every line of it; the generated text and the drafts depend on their own, too.
_TARGET_CODE = (tokens, network, optimiser, training, target)
_PLAIN, _BLOCK16, _WEAK, _MISMATCHED = "draft", "draft-block16", "draft-weak", "draft-mismatched"


class Pipeline:
    """One training: where its work lies, and how each stage is done."""

    def __init__(self, settings: Settings, work: Path, out: Path) -> None:
        self.settings, self.out = settings, out
        one = settings
        self.corpus = build(one.seed, one.library_characters, one.walks, one.talks)
        # The text itself, as it changes with its templates and with the Python whose library it quotes; and
        # the code, as shapes, rates and losses are in it.
        corpus = (_digest(json.dumps(asdict(self.corpus))), _code(*_TARGET_CODE))
        target = (*corpus, one.length, one.batch, one.shallow_steps, one.deep_steps)
        generated = (*target, _code(generate), one.generate_batches, one.generate_size)
        trained = (_code(draft), one.draft_batch, one.draft_blocks)
        other = (*corpus, one.length, one.batch, one.other_steps)
        other_generated = (*other, _code(generate), one.other_size)
        plain = Recipe(_PLAIN, 8, one.draft_steps)
        block16 = Recipe(_BLOCK16, 16, one.block16_steps, warm=True)
        weak = Recipe(_WEAK, 8, one.weak_steps)
        mismatched = Recipe(_MISMATCHED, 8, one.mismatched_steps)
        self.recipes = (plain, block16, weak, mismatched)
        # A folder's name tells the settings its content depends on, so another setting finds another folder.
        self.text = _folder(work, "text", *corpus)
        self._figures, self._lock = work / "figures.json", work / ".lock"
        self.target = _folder(work, "target", *target)
        self.generated = _folder(work, "generated", *generated)
        self.other = _folder(work, "other-target", *other)
        self.other_generated = _folder(work, "other-generated", *other_generated)
        self.drafts = {
            _PLAIN: _folder(work, _PLAIN, *generated, *trained, plain),
            _BLOCK16: _folder(work, _BLOCK16, *generated, *trained, plain, block16),
            _WEAK: _folder(work, _WEAK, *generated, *trained, weak),
            _MISMATCHED: _folder(work, _MISMATCHED, *other_generated, *trained, mismatched),
        }

    def run(self, stages: tuple[str, ...]) -> None:
        """Run these stages in their order.

        Raises ValueError if another training works in the same folder.
        """
        with self._lock.open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(
                    f"another training works in {self._lock.parent}: wait for it, or give another --work"
                ) from None
            self._run(stages)

    def _run(self, stages: tuple[str, ...]) -> None:
        quiet_compiler()
        self.out.mkdir(parents=True, exist_ok=True)
        jobs: dict[str, Callable[[], None]] = {stage: getattr(self, f"_{stage}") for stage in STAGES}
        for stage in STAGES:
            if stage in stages:
                began = time.perf_counter()
                print(f"{stage}", flush=True)
                jobs[stage]()
                print(f"{stage}: {time.perf_counter() - began:.0f} s", flush=True)

    def _corpus(self) -> None:
        for name in ("train", "held_out", "prompts"):
            content = json.dumps(getattr(self.corpus, name), indent=1, ensure_ascii=False)
            (self.text / f"{name}.json").write_text(content + "\n", encoding="utf-8")

    def _tokenizer(self) -> None:
        path = self.text / "tokenizer.json"
        if (self.text / "train.npz").exists():
            return
        train, held_out = (load_documents(self.text / f"{name}.json") for name in ("train", "held_out"))
        train_tokenizer(train, path)
        tokenizer = Tokenizer.from_file(str(path))
        encoded = encode(train, tokenizer)
        encode(held_out, tokenizer).save(self.text / "held_out.npz")
        encoded.save(self.text / "train.npz")
        characters = sum(len(segment) for document in train for segment in document)
        steps = self.settings.shallow_steps + self.settings.deep_steps
        epochs = steps * self.settings.batch * self.settings.length / len(encoded.ids)
        print(f"  {characters} characters, {len(encoded.ids)} tokens, {epochs:.1f} epochs")

    def _target(self) -> None:
        one = self.settings
        self._train_target(self.target, one.seed, one.shallow_steps, one.deep_steps)

    def _train_target(self, folder: Path, seed: int, shallow_steps: int, deep_steps: int) -> None:
        if not (folder / "target.safetensors").exists():
            in_processes(target.train, self.settings, self.text, folder, seed, shallow_steps, deep_steps)

    def _generate(self) -> None:
        one = self.settings
        self._continue(self.target, self.generated, one.seed, one.generate_batches, one.generate_size)

    def _continue(self, weights: Path, folder: Path, seed: int, batches: int, size: int) -> None:
        if len(list(folder.glob("*.pt"))) < PROCESSES * batches:
            weights = weights / "target.safetensors"
            in_processes(generate.generate, self.settings, self.text, weights, folder, seed, batches, size)

    def _draft(self) -> None:
        start = self.drafts[_PLAIN] / "draft.safetensors"
        for recipe in self.recipes:
            folder = self.drafts[recipe.name]
            if (folder / "draft.safetensors").exists():
                continue
            print(f"  {recipe.name}", flush=True)
            weights, generated = self.target, self.generated
            if recipe.name == _MISMATCHED:
                weights, generated = self._other_target()
            weights = weights / "target.safetensors"
            in_processes(draft.train, self.settings, recipe, weights, generated, start, folder)

    def _other_target(self) -> tuple[Path, Path]:
        """A target of another seed, left shallow, and its continuations."""
        one = self.settings
        self._train_target(self.other, one.seed + 1, one.other_steps, 0)
        self._continue(self.other, self.other_generated, one.seed + 1, 2, one.other_size)
        return self.other, self.other_generated

    def _convert(self) -> None:
        demo = self.out / "demo"
        convert.write_target(
            self.target / "target.safetensors", self.text / "tokenizer.json", demo / "target"
        )
        for recipe in self.recipes:
            convert.write_draft(
                self.drafts[recipe.name] / "draft.safetensors", recipe.block, demo / recipe.name
            )
        (self.out / "prompts.json").write_bytes((self.text / "prompts.json").read_bytes())

    def _check(self) -> None:
        figures = check(self.out, self.settings)
        self._figures.write_text(json.dumps({"of": self._checked(), **figures}, indent=1), encoding="utf-8")

    def _card(self) -> None:
        if not self._figures.exists():
            raise ValueError(f"{self.out} was not checked yet: run the stage check first")
        figures = json.loads(self._figures.read_text(encoding="utf-8"))
        if figures.get("of") != self._checked():
            raise ValueError(f"{self.out} holds other files than were checked: run the stage check first")
        write_card(self.out, self.settings, figures)

    def _checked(self) -> dict[str, Any]:
        """What figures are of: the settings, and the files by their check sums."""
        sums = {str(path.relative_to(self.out)): checksum(path) for path in published(self.out)}
        return {"settings": asdict(self.settings), "files": sums}


def _digest(*texts: str) -> str:
    return hashlib.sha256("".join(texts).encode()).hexdigest()


def _code(*modules: ModuleType) -> str:
    return _digest(*map(inspect.getsource, modules))


def _folder(work: Path, name: str, *settings: object) -> Path:
    folder = work / f"{name}-{_digest(repr(settings))[:10]}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder
