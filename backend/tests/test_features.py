"""Every request feature of SGLang: the same answer as without speculation, or a 400 that says so."""

from __future__ import annotations

import concurrent.futures
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from engine import Server, serve, tree_flags
from prompts import PROMPTS

TOKENS = 40
POINTS = [(1, 1), (8, 4), (32, 8)]


@pytest.fixture(scope="module")
def ar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    # With overlap SGLang's own penalties lag behind by one token.
    with serve(["--disable-overlap-schedule"], tmp_path_factory.mktemp("ar") / "log") as made:
        yield made


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serve([*tree_flags(32, 8), "--enable-metrics"], tmp_path_factory.mktemp("tree") / "log") as made:
        yield made


def post(server: Server, **body: Any) -> requests.Response:
    return requests.post(f"{server.url}/generate", json=body, timeout=300)


def answer(server: Server, text: str, point: tuple[int, int] | None = None, **body: Any) -> dict[str, Any]:
    """One greedy answer; ``sampling_params`` of the body are added to the usual ones."""
    sampling = {"max_new_tokens": TOKENS, "temperature": 0, **body.pop("sampling_params", {})}
    if point:
        sampling["custom_params"] = {"ddtree_budget": point[0], "ddtree_topk_cap": point[1]}
    reply = post(server, text=text, sampling_params=sampling, **body)
    reply.raise_for_status()
    made: dict[str, Any] = reply.json()
    return made


def token_of(server: Server, index: int) -> int:
    return int(answer(server, PROMPTS[0])["output_ids"][index])


#: Sampling parameters whose greedy answer must not depend on the tree.
PARAMETERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "ignore eos": {"ignore_eos": True, "max_new_tokens": 100},
    "one token": {"max_new_tokens": 1},
    "two tokens": {"max_new_tokens": 2},
    "stop string": {"stop": ["e"]},
    "stop string of several tokens": {"stop": ["self."]},
    "stop regex": {"stop_regex": "[a-z]+\\("},
    "no stop trim": {"stop": ["e"], "no_stop_trim": True},
    "least tokens and a stop string": {"stop": ["e"], "min_new_tokens": 12},
    "repetition penalty": {"repetition_penalty": 1.3, "ignore_eos": True},
    "frequency penalty": {"frequency_penalty": 0.7, "ignore_eos": True},
    "presence penalty": {"presence_penalty": 0.9, "ignore_eos": True},
    "both additive penalties": {
        "frequency_penalty": 0.4,
        "presence_penalty": 0.4,
        "ignore_eos": True,
    },
    "logit bias": {"logit_bias": {"260": 4.0, "30": -100.0}, "ignore_eos": True},
    "special tokens shown": {"skip_special_tokens": False},
    "no spaces between": {"spaces_between_special_tokens": False},
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_answer_is_the_autoregressive_one(ar: Server, tree: Server, name: str) -> None:
    for prompt in PROMPTS[:4]:
        expected = answer(ar, prompt, sampling_params=PARAMETERS[name])
        for point in POINTS:
            got = answer(tree, prompt, point, sampling_params=PARAMETERS[name])
            assert got["output_ids"] == expected["output_ids"], (prompt, point)
            assert got["text"] == expected["text"]
            assert got["meta_info"]["finish_reason"] == expected["meta_info"]["finish_reason"]


@pytest.mark.parametrize("index", [0, 1, 5, 17])
def test_stop_tokens(ar: Server, tree: Server, index: int) -> None:
    stops = {"stop_token_ids": [token_of(ar, index)]}
    expected = answer(ar, PROMPTS[0], sampling_params=stops)
    for point in POINTS:
        got = answer(tree, PROMPTS[0], point, sampling_params=stops)
        assert got["output_ids"] == expected["output_ids"]
        assert got["meta_info"]["finish_reason"] == expected["meta_info"]["finish_reason"]


def test_the_least_length_puts_off_stop_tokens(ar: Server, tree: Server) -> None:
    stop = token_of(ar, 3)
    sampling = {"stop_token_ids": [stop], "min_new_tokens": 9}
    expected = answer(ar, PROMPTS[0], sampling_params=sampling)
    assert stop not in expected["output_ids"][:9]
    for point in POINTS:
        got = answer(tree, PROMPTS[0], point, sampling_params=sampling)
        assert got["output_ids"] == expected["output_ids"]


def test_penalties_of_neighbours_do_not_mix(ar: Server, tree: Server) -> None:
    """Requests with and without, of different lengths, that come and go."""
    sampling = [
        {"max_new_tokens": 10 + 9 * i, "temperature": 0, "ignore_eos": True, "frequency_penalty": penalty}
        for i, penalty in enumerate((0.0, 0.8, 0.0, 1.5, 0.3, 0.0, 2.0, 0.1))
    ]
    expected = post(ar, text=PROMPTS[:8], sampling_params=sampling).json()
    for _ in range(2):  # the slots are used again
        made = post(tree, text=PROMPTS[:8], sampling_params=sampling).json()
        assert [one["output_ids"] for one in made] == [one["output_ids"] for one in expected]


def test_logprobs(ar: Server, tree: Server) -> None:
    """Of the prompt, of the answer, the best of each place, and of named tokens."""
    wanted = {
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 3,
        "token_ids_logprob": [5, 7],
    }
    fields = ("token_logprobs", "top_logprobs", "token_ids_logprobs")
    for prompt in PROMPTS[:3]:
        expected = answer(ar, prompt, **wanted)["meta_info"]
        for point in POINTS:
            got = answer(tree, prompt, point, **wanted)["meta_info"]
            for name in (f"{side}_{field}" for side in ("input", "output") for field in fields):
                assert flat(expected[name]), name
                assert flat(got[name]) == pytest.approx(flat(expected[name]), abs=2e-3), (name, point)
                assert len(got[name]) == len(expected[name]), (name, point)


def flat(value: Any) -> list[float]:
    """All numbers of a nested answer, in order."""
    if isinstance(value, (int, float)):
        return [float(value)]
    if isinstance(value, list):
        return [number for part in value for number in flat(part)]
    return []


def test_several_answers_to_one_prompt(ar: Server, tree: Server) -> None:
    sampling = {"max_new_tokens": 20, "temperature": 0, "n": 3}
    expected = post(ar, text=PROMPTS[1], sampling_params=sampling).json()
    got = post(tree, text=PROMPTS[1], sampling_params=sampling).json()
    assert [one["output_ids"] for one in got] == [one["output_ids"] for one in expected]


def test_streaming(ar: Server, tree: Server) -> None:
    expected = answer(ar, PROMPTS[2])["text"]
    body = {
        "text": PROMPTS[2],
        "sampling_params": {"max_new_tokens": TOKENS, "temperature": 0},
        "stream": True,
    }
    with requests.post(f"{tree.url}/generate", json=body, stream=True, timeout=300) as reply:
        lines = [line[6:] for line in reply.iter_lines() if line.startswith(b"data: ")]
    assert lines[-1] == b"[DONE]"
    texts = [json.loads(line)["text"] for line in lines[:-1]]
    assert texts[-1] == expected
    assert all(expected.startswith(text.rstrip("\ufffd")) for text in texts)
    assert len(texts) > 1


def test_chat_completions(ar: Server, tree: Server) -> None:
    body = {
        "model": "any",
        "messages": [{"role": "user", "content": "Write a Python quicksort."}],
        "max_tokens": 24,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 2,
    }
    expected, got = (
        requests.post(f"{server.url}/v1/chat/completions", json=body, timeout=300).json()
        for server in (ar, tree)
    )
    assert got["choices"][0]["message"] == expected["choices"][0]["message"]
    assert got["choices"][0]["finish_reason"] == expected["choices"][0]["finish_reason"]
    assert got["usage"]["completion_tokens"] == expected["usage"]["completion_tokens"]


def test_seeded_requests_repeat_themselves(ar: Server, tmp_path: Path) -> None:
    """With deterministic inference, as SGLang wants it. Draws depend on seed and place alone: AR's text."""

    def drawn(server: Server, seed: int, point: tuple[int, int] | None = None) -> list[int]:
        sampling = {"temperature": 0.9, "top_p": 0.95, "sampling_seed": seed, "ignore_eos": True}
        found: list[int] = answer(server, PROMPTS[3], point, sampling_params=sampling)["output_ids"]
        return found

    flag = "--enable-deterministic-inference"
    with serve([flag], tmp_path / "ar") as plain:
        expected = drawn(plain, 7)
    with serve([*tree_flags(32, 8), flag], tmp_path / "tree") as seeded:
        for point in POINTS:
            assert drawn(seeded, 7, point) == expected
        assert drawn(seeded, 8) != expected
        reply = post(seeded, text="x", sampling_params={"temperature": 1.0, "min_p": 0.1})
        assert reply.status_code == 400
        assert "min_p" in reply.text
        assert drawn(seeded, 7) == expected


def test_greedy_beside_sampled_requests(ar: Server, tree: Server) -> None:
    expected = [answer(ar, prompt)["output_ids"] for prompt in PROMPTS[:4]]
    sampling = [
        {"max_new_tokens": TOKENS, "temperature": temperature} for temperature in (0, 1.0, 0, 0.7, 0, 1.5, 0)
    ]
    texts = [PROMPTS[i // 2] if i % 2 == 0 else PROMPTS[7] for i in range(7)]
    made = post(tree, text=texts, sampling_params=sampling).json()
    assert [one["output_ids"] for one in made[::2]] == expected


def test_spec_counts_in_the_response(tree: Server) -> None:
    meta = answer(tree, PROMPTS[0], sampling_params={"ignore_eos": True})["meta_info"]
    histogram = meta["spec_correct_drafts_histogram"]
    assert sum(histogram) == meta["spec_verify_ct"]
    assert sum(i * count for i, count in enumerate(histogram)) == meta["spec_num_correct_drafts"]


def test_abort(tree: Server) -> None:
    """An aborted request ends early; others are not disturbed."""
    body = {
        "text": PROMPTS[5],
        "rid": "to-abort",
        "sampling_params": {"max_new_tokens": 900, "temperature": 0, "ignore_eos": True},
        "stream": True,
    }
    with (
        concurrent.futures.ThreadPoolExecutor(1) as pool,
        requests.post(f"{tree.url}/generate", json=body, stream=True, timeout=300) as reply,
    ):
        lines = (line[6:] for line in reply.iter_lines() if line.startswith(b"data: "))
        next(lines)  # it runs
        expected = answer(tree, PROMPTS[4])["output_ids"]
        other = pool.submit(answer, tree, PROMPTS[4])
        requests.post(f"{tree.url}/abort_request", json={"rid": "to-abort"}, timeout=30).raise_for_status()
        rest = [json.loads(line) for line in lines if line != b"[DONE]"]
        assert rest[-1]["meta_info"]["finish_reason"]["type"] == "abort"
        assert rest[-1]["meta_info"]["completion_tokens"] < 900
        assert other.result()["output_ids"] == expected


@pytest.mark.parametrize(
    ("body", "words"),
    [
        # Of SGLang itself; with another backend grammars are served (test_grammar.py).
        ({"sampling_params": {"regex": "a+"}}, "--grammar-backend none"),
        ({"return_hidden_states": True}, "hidden states"),
        ({"sampling_params": {"custom_params": {"ddtree_budget": 33}}}, "ddtree_budget is 33"),
        ({"sampling_params": {"custom_params": {"ddtree_topk_cap": "x"}}}, "ddtree_topk_cap is 'x'"),
        ({"sampling_params": {"custom_params": {"ddtree_x": 1}}}, "ddtree_x is unknown"),
        # These end a server of stock SGLang.
        ({"text": ""}, "empty"),  # before 0.5.22 in SGLang's own words
        ({"text": None, "input_ids": [-1]}, "outside the vocabulary"),
        ({"text": None, "input_ids": [5, 10**9]}, "outside the vocabulary"),
        ({"return_logprob": True, "top_logprobs_num": 5000}, "top_logprobs_num is 5000"),
    ],
)
def test_what_is_not_served_is_refused(tree: Server, body: dict[str, Any], words: str) -> None:
    reply = post(tree, **{"text": "x", **body})
    assert reply.status_code == 400
    assert words in reply.text
    assert answer(tree, "x")["meta_info"]["completion_tokens"] > 0


@pytest.mark.parametrize("odd", [[1], "x"])
def test_custom_params_of_others_are_left_alone(tree: Server, odd: Any) -> None:
    reply = post(tree, text="x", sampling_params={"max_new_tokens": 8, "custom_params": odd})
    assert reply.status_code in (200, 400)
    assert answer(tree, "x")["meta_info"]["completion_tokens"] > 0


def test_a_stop_token_that_can_not_come(ar: Server, tree: Server) -> None:
    """Beside a least length it ends a server of stock SGLang."""
    expected = answer(ar, PROMPTS[0])["output_ids"]
    stops = {"stop_token_ids": [10**9], "min_new_tokens": 2}
    assert answer(tree, PROMPTS[0], sampling_params=stops)["output_ids"] == expected


def switch(server: Server, **values: Any) -> Any:
    reply = requests.post(f"{server.url}/set_internal_state", json={"server_args": values}, timeout=60)
    reply.raise_for_status()
    return reply.json()


def shown(server: Server) -> Any:
    return requests.get(f"{server.url}/server_info", timeout=60).json()["internal_states"][0]["ddtree"]


def test_the_switch_of_the_whole_server(ar: Server, tree: Server) -> None:
    """A hundred switches while requests run; the answers stay what they are."""
    expected = [answer(ar, prompt, sampling_params={"ignore_eos": True})["output_ids"] for prompt in PROMPTS]

    def load(number: int) -> list[list[int]]:
        point = POINTS[number % 3] if number % 2 else None
        return [answer(tree, p, point, sampling_params={"ignore_eos": True})["output_ids"] for p in PROMPTS]

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        runs = [pool.submit(load, number) for number in range(4)]
        for number in range(100):
            budget, cap = 1 + number * 7 % 32, 1 + number % 8
            assert switch(tree, ddtree_budget=budget, ddtree_topk_cap=cap) == [True]
            assert (shown(tree)["budget_in_force"], shown(tree)["topk_cap_in_force"]) == (budget, cap)
        assert [run.result() for run in runs] == [expected] * 4
    assert switch(tree, ddtree_budget=33) == [False]
    assert switch(tree, ddtree_budget=0) == [False]
    # Beside keys of SGLang's own: all or nothing.
    assert switch(tree, ddtree_budget=8, pp_max_micro_batch_size=0) == [False]
    assert shown(tree)["budget_in_force"] == budget
    assert switch(tree, ddtree_budget=8, pp_max_micro_batch_size=8) == [True]
    assert shown(tree)["budget_in_force"] == 8
    assert switch(tree, ddtree_budget=32, ddtree_topk_cap=8) == [True]
    assert shown(tree)["budget"] == 32


def test_adaptive_budgets(ar: Server, tree: Server) -> None:
    """Alone, in batches, with limits of their own and sampled neighbours: the text is the target's."""
    greedy = {"max_new_tokens": 60, "temperature": 0, "ignore_eos": True}
    expected = [one["output_ids"] for one in post(ar, text=PROMPTS, sampling_params=greedy).json()]
    assert switch(tree, ddtree_adaptive=1) == [True]
    try:
        one_by_one = [post(tree, text=prompt, sampling_params=greedy).json() for prompt in PROMPTS]
        assert [one["output_ids"] for one in one_by_one] == expected
        sampling: list[Any] = [dict(greedy) for _ in PROMPTS]
        sampling[1]["custom_params"] = {"ddtree_budget": 2}
        sampling[2]["custom_params"] = {"ddtree_budget": 5, "ddtree_topk_cap": 2}
        sampling[3]["temperature"] = 1.0
        together = post(tree, text=PROMPTS, sampling_params=sampling).json()
        wrong = [i for i, one in enumerate(together) if one["output_ids"] != expected[i] and i != 3]
        assert wrong == []
        now = shown(tree)
        assert now["adaptive"]
        # 0 as long as none was chosen; that the verify follows the choice is tried in test_adaptive.
        assert now["mean_budget"] > 0
        # A tree of two nodes commits three tokens at most.
        assert (
            max(i for i, n in enumerate(together[1]["meta_info"]["spec_correct_drafts_histogram"]) if n) <= 2
        )
    finally:
        assert switch(tree, ddtree_adaptive=0) == [True]
    assert shown(tree)["mean_budget"] == 32
    assert switch(tree, ddtree_adaptive=2) == [False]
    refused = post(tree, text="x", sampling_params={"custom_params": {"ddtree_adaptive": 1}})
    assert refused.status_code == 400


def test_a_server_that_starts_adaptive(ar: Server, tmp_path: Path) -> None:
    sampling = {"max_new_tokens": 40, "temperature": 0, "ignore_eos": True}
    expected = [one["output_ids"] for one in post(ar, text=PROMPTS[:3], sampling_params=sampling).json()]
    with serve([*tree_flags(24, 4), "--speculative-ddtree-adaptive"], tmp_path / "log") as server:
        made = post(server, text=PROMPTS[:3], sampling_params=sampling).json()
        assert [one["output_ids"] for one in made] == expected
        assert shown(server)["adaptive"]
        assert shown(server)["mean_budget"] > 0


def test_retraction_under_kv_pressure(ar: Server, tmp_path: Path) -> None:
    """A pool too small for all requests: some are sent back to the queue and start again, penalties too."""
    texts = PROMPTS[:6]
    sampling = [
        {"max_new_tokens": 260, "temperature": 0, "ignore_eos": True, "frequency_penalty": 0.4 * (i % 2)}
        for i in range(len(texts))
    ]
    expected = [one["output_ids"] for one in post(ar, text=texts, sampling_params=sampling).json()]
    flags = [*tree_flags(16, 4), "--max-total-tokens", "1000", "--schedule-conservativeness", "0.1"]
    # Let requests in that will not fit once they have grown.
    optimistic = {"SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "8"}
    with serve(flags, tmp_path / "log", optimistic) as small:
        made = post(small, text=texts, sampling_params=sampling).json()
        assert "Retract requests" in small.log.read_text()
        assert [one["output_ids"] for one in made] == expected


def counters(server: Server) -> dict[str, float]:
    """DDTREE's own, by name, with the label that tells them apart."""
    lines = requests.get(f"{server.url}/metrics", timeout=60).text.splitlines()
    found: dict[str, float] = {}
    for line in lines:
        if line.startswith("sglang:ddtree_") and "_total" in line:
            nodes = line.partition('nodes="')[2].partition('"')[0]
            found[line.partition("{")[0].removeprefix("sglang:ddtree_") + nodes] = float(line.split()[-1])
    return found


def test_metrics_are_exported(tree: Server) -> None:
    """They grow by what the responses say, and by nothing else."""
    before = counters(tree)
    answers = [answer(tree, prompt, sampling_params={"ignore_eos": True}) for prompt in PROMPTS[:3]]
    grown = {name: value - before.get(name, 0.0) for name, value in counters(tree).items()}
    counts = [one["meta_info"] for one in answers]
    steps = sum(count["spec_verify_ct"] for count in counts)
    assert steps > 3
    assert grown["verify_steps_total"] == steps
    nodes_in_all = sum(count["spec_num_correct_drafts"] for count in counts)
    assert grown["committed_tokens_total"] == steps + nodes_in_all
    for nodes in range(8):
        seen = sum((count["spec_correct_drafts_histogram"] + [0] * 8)[nodes] for count in counts)
        assert grown[f"accepted_nodes_steps_total{nodes}"] == seen
