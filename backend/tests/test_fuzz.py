"""Random requests, legal and illegal, eight at a time: the server answers them all and forgets them all."""

from __future__ import annotations

import concurrent.futures
import random
import time
from pathlib import Path
from typing import Any

import requests
from engine import serve, tree_flags
from prompts import PROMPTS

REQUESTS = 500
CONCURRENCY = 8


def request(draw: random.Random) -> dict[str, Any]:
    """A body for ``/generate``: mostly sensible, with a wrong value now and then."""

    def maybe(chance: float, *values: Any) -> dict[str, Any] | Any:
        return draw.choice(values) if draw.random() < chance else None

    sampling: dict[str, Any] = {
        "max_new_tokens": draw.choice((0, 1, 2, 7, 30, 60)),
        "temperature": draw.choice((0, 0, 0.3, 1.0, 2.5)),
        "top_p": maybe(0.3, 0.1, 0.9, 1.0, 0.0, 1.5),
        "top_k": maybe(0.3, 1, 5, 50, -1, 0),
        "min_p": maybe(0.2, 0.0, 0.05, 0.9, 2.0),
        "repetition_penalty": maybe(0.2, 0.5, 1.0, 1.3, 2.0, 5.0),
        "frequency_penalty": maybe(0.2, -2.0, 0.4, 2.0, 9.0),
        "presence_penalty": maybe(0.2, -2.0, 0.4, 2.0),
        "min_new_tokens": maybe(0.2, 0, 3, 20, 100),
        "stop": maybe(0.3, "e", ["a", "self."], ""),
        "stop_token_ids": maybe(0.2, [5], [1, 2, 3], [10**9]),
        "ignore_eos": maybe(0.4, True, False),
        "n": maybe(0.1, 1, 2, 3),
        "logit_bias": maybe(0.15, {"260": 5.0}, {"1": -100.0}, {"99999999": 1.0}, {"x": 1}),
        "json_schema": maybe(0.1, '{"type": "object"}', '{"type": "integer"}', '{"type": 7}', "{"),
        "regex": maybe(0.1, "a+", "(yes|no)!", "[a-z ]{5,200}", "(a", "\u00e9{3}"),
        "ebnf": maybe(0.05, 'root ::= "a" root | "b"', "root ::= root", "x"),
        "sampling_seed": maybe(0.2, 1, 2**62),
        "custom_params": maybe(
            0.4,
            {"ddtree_budget": 1, "ddtree_topk_cap": 1},
            {"ddtree_budget": 7},
            {"ddtree_budget": 33},
            {"ddtree_topk_cap": "x"},
            {"ddtree_budget": None},
            {"other": [1, 2]},
            [1],
            "x",
        ),
    }
    body: dict[str, Any] = {
        "text": draw.choice((*PROMPTS, "", "x", "y " * 400, "z " * 3000)),
        "sampling_params": {key: value for key, value in sampling.items() if value is not None},
        "return_logprob": draw.random() < 0.2,
        "top_logprobs_num": draw.choice((0, 0, 2, 5, 5000)),
        "logprob_start_len": draw.choice((-1, 0, 5, 10**6)),
        "return_hidden_states": draw.random() < 0.03,
        "stream": draw.random() < 0.3,
    }
    if draw.random() < 0.1:
        del body["text"]
        body["input_ids"] = draw.choice(([], [1], [5] * 50, [10**9], [-1], list(range(4, 900))))
    return body


def send(url: str, seed: int) -> int:
    """Ask; the status. Some clients hang up in the middle."""
    draw = random.Random(seed)
    body = request(draw)
    with requests.post(f"{url}/generate", json=body, stream=True, timeout=300) as reply:
        if body["stream"] and draw.random() < 0.3:
            next(reply.iter_lines(), None)
        else:
            reply.content  # noqa: B018  # read to the end
        return reply.status_code


def test_random_requests(tmp_path: Path) -> None:
    flags = [*tree_flags(32, 8), "--chunked-prefill-size", "128", "--grammar-backend", "xgrammar"]
    with serve(flags, tmp_path / "log") as server:
        before = [one["output_ids"] for one in server.generate(PROMPTS[:4], 32)]
        with concurrent.futures.ThreadPoolExecutor(CONCURRENCY) as pool:
            statuses = list(pool.map(lambda seed: send(server.url, seed), range(REQUESTS)))
        assert len(statuses) == REQUESTS
        assert set(statuses) <= {200, 400}, sorted(set(statuses))
        assert min(statuses.count(200), statuses.count(400)) > REQUESTS // 10
        assert requests.get(f"{server.url}/health_generate", timeout=60).status_code == 200
        assert [one["output_ids"] for one in server.generate(PROMPTS[:4], 32)] == before
        # What clients that hung up had asked for may still be on its way out.
        for _ in range(100):
            flushed = requests.post(f"{server.url}/flush_cache", timeout=60)
            if flushed.status_code == 200:
                break
            time.sleep(0.1)
        assert flushed.status_code == 200, flushed.text
        loads = requests.get(f"{server.url}/v1/loads", timeout=60).json()["loads"]
        used = [
            (load["num_running_reqs"], load["num_waiting_reqs"], load["num_used_tokens"]) for load in loads
        ]
        assert used == [(0, 0, 0)]
        assert "leak" not in server.log.read_text().lower()
