"""Constrained decoding: the answer is the autoregressive one, and legal, whatever the tree."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import requests
import torch
from engine import Server, serve, tree_flags
from prompts import PROMPTS
from sglang_ddtree import hooks
from sglang_ddtree.grammar import Outline, constrain

VOCAB = 70
WORDS = ["abc", "abd", "bcd", "a", "bcx"]


class Words:
    """A grammar of a few words over letters: token ``i`` is the letter ``chr(97 + i)``, token 69 ends."""

    END = 69

    def __init__(self, words: list[str] = WORDS) -> None:
        self.words, self.taken, self.calls = words, "", 0

    def allowed(self, taken: str) -> set[int]:
        if taken.endswith("$"):
            return set()
        follow = {word[len(taken)] for word in self.words if word.startswith(taken) and word != taken}
        return {ord(letter) - 97 for letter in follow} | ({self.END} if taken in self.words else set())

    def is_terminated(self) -> bool:
        return self.taken.endswith("$")

    def accept_token(self, token: int) -> None:
        assert token in self.allowed(self.taken)
        self.taken += "$" if token == self.END else chr(97 + token)
        self.calls += 1

    def rollback(self, count: int) -> None:
        assert 0 < count <= len(self.taken)
        self.taken = self.taken[:-count]

    @staticmethod
    def allocate_vocab_mask(vocab_size: int, batch_size: int, device: str) -> torch.Tensor:
        return torch.full((batch_size, -(-vocab_size // 32)), -1, dtype=torch.int32, device=device)

    def fill_vocab_mask(self, mask: torch.Tensor, row: int) -> None:
        bits = [0] * mask.shape[1]
        for token in self.allowed(self.taken):
            bits[token // 32] |= 1 << token % 32
        mask[row] = torch.tensor([word - (word >> 31 << 32) for word in bits], dtype=torch.int32)

    @staticmethod
    def apply_vocab_mask(logits: torch.Tensor, vocab_mask: torch.Tensor) -> None:
        bits = (vocab_mask.unsqueeze(2) >> torch.arange(32)) & 1
        logits.masked_fill_(bits.flatten(1)[:, : logits.shape[1]] == 0, -torch.inf)


class Request:
    def __init__(self, grammar: Words | None) -> None:
        self.grammar = grammar


def outline(paths: list[str], last: int) -> Outline:
    """A tree of all prefixes of ``paths`` below the root, those before the others; ``last`` is in no use."""
    prefixes = sorted({path[:i] for path in paths for i in range(len(path) + 1)}, key=lambda p: (len(p), p))
    tokens = [ord(prefix[-1]) - 97 if prefix else 5 for prefix in prefixes]
    parents = [prefixes.index(prefix[:-1]) if prefix else 0 for prefix in prefixes]
    return Outline([tokens], [parents], [[i < len(prefixes) - last for i in range(len(prefixes))]])


def legal(logits: torch.Tensor) -> list[set[int]]:
    return [set((row > -torch.inf).nonzero().flatten().tolist()) for row in logits]


def test_each_node_allows_what_may_follow_its_path() -> None:
    """All paths of three letters: what is legal after each is asked of the words themselves."""
    paths = ["".join(path) for path in product("abcd", repeat=3)]
    grammar, tree = Words(), outline(paths, 0)
    logits = torch.zeros(len(tree.tokens[0]), VOCAB)
    constrain(logits, VOCAB, [Request(grammar)], tree)
    names = [""]
    for token, parent in zip(tree.tokens[0][1:], tree.parents[0][1:], strict=True):
        names.append(names[parent] + chr(97 + token))
    for name, found in zip(names, legal(logits), strict=True):
        reachable = any(word.startswith(name) for word in WORDS)
        assert found == (grammar.allowed(name) if reachable else set(range(VOCAB))), name
    assert grammar.taken == ""


def test_only_nodes_in_use_are_walked() -> None:
    grammar, tree = Words(), outline(["abc"], 2)
    logits = torch.zeros(4, VOCAB)
    constrain(logits, VOCAB, [Request(grammar)], tree)
    assert [len(found) for found in legal(logits)] == [2, 2, VOCAB, VOCAB]
    assert grammar.calls == 1


def test_requests_without_a_grammar_are_left_alone() -> None:
    tree = outline(["ab"], 0)
    both = Outline(tree.tokens * 3, tree.parents * 3, tree.used * 3)
    logits = torch.zeros(9, VOCAB)
    begun = Words()
    begun.accept_token(1)
    constrain(logits, VOCAB, [Request(None), Request(begun), Request(None)], both)
    assert [len(found) for found in legal(logits)] == [VOCAB] * 3 + [1] + [VOCAB] * 5
    constrain(logits := torch.zeros(3, VOCAB), VOCAB, [Request(None)], tree)
    assert [len(found) for found in legal(logits)] == [VOCAB] * 3


def test_a_grammar_at_its_end_allows_all() -> None:
    """SGLang cuts off what is committed after the end."""
    ended = Words()
    for token in (0, Words.END):
        ended.accept_token(token)
    logits = torch.zeros(3, VOCAB)
    constrain(logits, VOCAB, [Request(ended)], outline(["ab"], 0))
    assert [len(found) for found in legal(logits)] == [VOCAB] * 3


def test_an_end_inside_the_tree_is_taken_back() -> None:
    grammar = Words()
    tree = Outline([[5, 0, Words.END, 1]], [[0, 0, 1, 2]], [[True] * 4])
    logits = torch.zeros(4, VOCAB)
    constrain(logits, VOCAB, [Request(grammar)], tree)
    assert legal(logits)[1] == {1, Words.END}
    assert [len(found) for found in legal(logits)[2:]] == [VOCAB] * 2
    assert grammar.taken == ""


def test_where_nothing_can_follow_something_can_be_drawn() -> None:
    """SGLang ends such a request; a distribution of nothing would end the server."""
    grammar = Words([])
    logits = torch.zeros(1, VOCAB)
    constrain(logits, VOCAB, [Request(grammar)], outline([""], 0))
    assert legal(logits) == [set(range(VOCAB))]
    assert logits.unique().tolist() == [0.0]


def test_a_backend_that_cannot_go_back_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    constrained = SimpleNamespace(regex="a+", custom_params=None, min_p=0.0)
    req = SimpleNamespace(
        sampling_params=constrained,
        origin_input_ids=[5],
        vocab_size=9,
        top_logprobs_num=0,
        return_hidden_states=False,
    )
    monkeypatch.setattr(hooks, "_grammars_of", lambda: "outlines")
    assert "expected a server with --grammar-backend xgrammar" in str(hooks._refusal(req))
    monkeypatch.setattr(hooks, "_grammars_of", lambda: "xgrammar")
    assert hooks._refusal(req) is None


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "size": {"type": "integer"}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
GRAMMARS: dict[str, dict[str, Any]] = {
    "json schema": {"json_schema": json.dumps(SCHEMA)},
    "regex": {"regex": r"def [a-z]{2,8}_[a-z]{2,8}\((self|key)(, [a-z]{1,6}){0,3}\):"},
    "ebnf": {"ebnf": 'root ::= "the " word (", the " word){2,5} "."\nword ::= [a-z]{2,7}'},
}
POINTS = [(1, 1), (8, 4), (32, 8)]
XGRAMMAR = ["--grammar-backend", "xgrammar"]


@pytest.fixture(scope="module")
def ar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serve(XGRAMMAR, tmp_path_factory.mktemp("ar") / "log") as made:
        yield made


@pytest.fixture(scope="module", params=["1", ""], ids=["overlap", "no overlap"])
def tree(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("tree") / "log"
    environment = {"SGLANG_DDTREE_CPU_OVERLAP": request.param}
    with serve([*tree_flags(32, 8), *XGRAMMAR], log, environment) as made:
        yield made


def answers(server: Server, texts: list[str], sampling: list[dict[str, Any]]) -> list[dict[str, Any]]:
    usual = {"max_new_tokens": 48, "temperature": 0}
    body = {"text": texts, "sampling_params": [{**usual, **one} for one in sampling]}
    reply = requests.post(f"{server.url}/generate", json=body, timeout=300)
    reply.raise_for_status()
    made: list[dict[str, Any]] = reply.json()
    return made


def fits(name: str, answer: dict[str, Any]) -> bool:
    """Whether an answer, cut off or not, is what its grammar allows."""
    text, ended = answer["text"], answer["meta_info"]["finish_reason"]["type"] == "stop"
    if not ended:
        return name != "regex"
    if name == "json schema":
        return set(json.loads(text)) == {"name", "size"}
    if name == "regex":
        return re.fullmatch(GRAMMARS[name]["regex"], text) is not None
    return re.fullmatch(r"the [a-z]{2,7}(, the [a-z]{2,7}){2,5}\.", text) is not None


def point(budget: int, cap: int) -> dict[str, Any]:
    return {"custom_params": {"ddtree_budget": budget, "ddtree_topk_cap": cap}}


@pytest.mark.parametrize("name", GRAMMARS)
def test_the_answer_is_the_autoregressive_one(ar: Server, tree: Server, name: str) -> None:
    texts = PROMPTS[:4]
    expected = answers(ar, texts, [GRAMMARS[name]] * 4)
    assert all(fits(name, one) for one in expected)
    assert len({one["text"] for one in expected}) > 1
    for budget, cap in POINTS:
        made = answers(tree, texts, [{**GRAMMARS[name], **point(budget, cap)}] * 4)
        assert [one["output_ids"] for one in made] == [one["output_ids"] for one in expected]
        reasons = [[one["meta_info"]["finish_reason"] for one in some] for some in (made, expected)]
        assert reasons[0] == reasons[1]
    drafted = sum(one["meta_info"]["spec_num_correct_drafts"] for one in made)
    assert drafted > 0


def test_grammars_in_one_batch_with_requests_without(ar: Server, tree: Server) -> None:
    sampling: list[dict[str, Any]] = [{}, *GRAMMARS.values(), {}, {"max_new_tokens": 9}]
    texts = [PROMPTS[i] for i in range(len(sampling))]
    alone = [answers(ar, [text], [one])[0] for text, one in zip(texts, sampling, strict=True)]
    together = answers(tree, texts, sampling)
    assert [one["output_ids"] for one in together] == [one["output_ids"] for one in alone]


def test_sampled_answers_are_legal(tree: Server) -> None:
    for name, grammar in GRAMMARS.items():
        made = answers(tree, PROMPTS[:8], [{**grammar, "temperature": 1.0, "max_new_tokens": 90}] * 8)
        assert [fits(name, one) for one in made] == [True] * 8, [one["text"] for one in made]
        assert len({one["text"] for one in made}) > 4


def test_logprobs_are_of_what_is_allowed(ar: Server, tree: Server) -> None:
    body = {
        "text": PROMPTS[0],
        "sampling_params": {"max_new_tokens": 24, "temperature": 0, **GRAMMARS["regex"]},
        "return_logprob": True,
    }
    expected, got = (
        requests.post(f"{server.url}/generate", json=body, timeout=300).json()["meta_info"]
        for server in (ar, tree)
    )
    tokens = [[entry[1] for entry in meta["output_token_logprobs"]] for meta in (expected, got)]
    assert tokens[0] == tokens[1]
    values = [[entry[0] for entry in meta["output_token_logprobs"]] for meta in (expected, got)]
    assert values[1] == pytest.approx(values[0], abs=2e-3)


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize(
    "grammar",
    [
        {"regex": "ab", "min_new_tokens": 9},
        {"regex": "[a-d]{4}", "min_new_tokens": 9},
        {"ebnf": "root ::= root"},
    ],
)
def test_a_grammar_that_can_not_be_met_is_refused(
    tree: Server, grammar: dict[str, Any], temperature: float
) -> None:
    """At the prefill or in the tree: it may end a stock server, or give a 500 or an abort without reason."""
    body = {"text": "x", "sampling_params": {"max_new_tokens": 20, "temperature": temperature, **grammar}}
    reply = requests.post(f"{tree.url}/generate", json=body, timeout=60)
    assert reply.status_code == 400
    assert "allows none of the model's tokens" in reply.text
    assert answers(tree, ["x"], [{}])[0]["meta_info"]["completion_tokens"] > 0


@pytest.mark.parametrize("bad", [{"regex": "(a"}, {"json_schema": '{"type": 7}'}, {"ebnf": "root ::= ("}])
def test_a_grammar_that_is_none_is_refused(tree: Server, bad: dict[str, Any]) -> None:
    body = {"text": "x", "sampling_params": {"max_new_tokens": 8, **bad}}
    reply = requests.post(f"{tree.url}/generate", json=body, timeout=60)
    assert reply.status_code == 400
    assert answers(tree, ["x"], [{}])[0]["meta_info"]["completion_tokens"] > 0
