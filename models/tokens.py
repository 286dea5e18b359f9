"""The tokenizer (byte-level BPE) and the encoded text, with the places where reading may start."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from models.corpus.build import Document
from models.network import VOCABULARY

END_OF_TEXT, START_OF_TURN, END_OF_TURN, MASK = range(4)
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>")


def train_tokenizer(documents: list[Document], path: Path) -> None:
    """Learn the merges and write tokenizer.json."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    plain = [segment for document in documents for segment in document]
    for mark in SPECIALS:
        plain = [segment.replace(mark, "\n") for segment in plain]
    tokenizer.train_from_iterator(plain, trainer)
    if tokenizer.get_vocab_size() != VOCABULARY:
        raise ValueError(
            f"{tokenizer.get_vocab_size()} tokens learnt, expected {VOCABULARY}: give it more text"
        )
    tokenizer.save(str(path))


@dataclass(frozen=True)
class Encoded:
    """A stream of token ids [N] and the indices [M] at which a document or a turn begins."""

    ids: np.ndarray
    starts: np.ndarray

    def save(self, path: Path) -> None:
        """Write both arrays to one .npz file, in one step."""
        new = path.with_suffix(".new.npz")
        np.savez(new, ids=self.ids, starts=self.starts)
        new.replace(path)

    @classmethod
    def load(cls, path: Path) -> Encoded:
        """Read what ``save`` wrote."""
        with np.load(path) as arrays:
            return cls(arrays["ids"], arrays["starts"])

    def windows(self, count: int, length: int, rng: np.random.Generator) -> torch.Tensor:
        """Windows [count, length] of ids, every other one from the beginning of a document or turn."""
        last = len(self.ids) - length
        anywhere = rng.integers(0, last + 1, count)
        begun = np.minimum(self.starts[rng.integers(0, len(self.starts), count)], last)
        places = np.where(np.arange(count) % 2 == 0, anywhere, begun)
        return torch.from_numpy(np.stack([self.ids[at : at + length] for at in places]).astype(np.int64))


def encode(documents: list[Document], tokenizer: Tokenizer) -> Encoded:
    """Join the documents, each after an end-of-text token."""
    ids: list[int] = []
    starts: list[int] = []
    for document in documents:
        ids.append(END_OF_TEXT)
        for segment in document:
            starts.append(len(ids))
            ids += tokenizer.encode(segment).ids
    ids.append(END_OF_TEXT)
    return Encoded(np.array(ids, dtype=np.uint16), np.array(starts, dtype=np.int64))


def load_documents(path: Path) -> list[Document]:
    """Documents written as JSON."""
    documents: list[Document] = json.loads(path.read_text(encoding="utf-8"))
    return documents
