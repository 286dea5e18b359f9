"""Records of steps: what a trace says of a run, and what a probe says of runs that were not made."""

from __future__ import annotations

import stat
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import requests
import torch
from engine import Server, serve, tree_flags
from prompts import PROMPTS
from sglang_ddtree.options import Options
from sglang_ddtree.record import COST, OFF, PROBE, TRACE, Recorder, Step
from sglang_ddtree.tree import build_tree_from_topk

# The reader lies with the controller's tools, and needs nothing but Python.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tuning import trace as reader

TOKENS, DEPTH = 60, 7
POINTS = [(1, 1), (3, 2), (8, 4), (13, 3), (16, 4), (16, 8), (24, 6), (32, 8), (48, 8), (48, 16)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("records")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("log") / "log"
    with serve(tree_flags(48, 16), log, {"SGLANG_DDTREE_RECORD_DIR": str(folder)}) as made:
        yield made


def switch(server: Server, mode: int) -> Any:
    body = {"server_args": {"ddtree_record": mode}}
    return requests.post(f"{server.url}/set_internal_state", json=body, timeout=60).json()


def recorded(server: Server, mode: int, tokens: int, **parameters: Any) -> tuple[reader.Trace, list[Any]]:
    """A run of all prompts in that mode: its file and its answers."""
    assert switch(server, mode) == [True]
    answers = server.generate(PROMPTS, tokens, **parameters)
    shown = requests.get(f"{server.url}/server_info", timeout=60).json()["internal_states"][0]["ddtree"]
    assert switch(server, OFF) == [True]
    return reader.read(shown["record_path"]), answers


def of_answer(trace: reader.Trace, answer: Any) -> reader.Request:
    (found,) = [request for request in trace.requests if request.rid == answer["meta_info"]["id"]]
    return found


def test_a_trace_tells_what_was_committed(server: Server) -> None:
    point = {"custom_params": {"ddtree_budget": 16, "ddtree_topk_cap": 4}}
    trace, answers = recorded(server, TRACE, TOKENS, **point)
    assert trace.whole
    assert (trace.header.mode, trace.header.depth, trace.header.ranks) == (TRACE, DEPTH, 16)
    for answer in answers:
        request, counts = of_answer(trace, answer), answer["meta_info"]
        assert [answer["output_ids"][0], *request.output][:TOKENS] == answer["output_ids"]
        assert len(request.steps) == counts["spec_verify_ct"]
        assert len(request.output) == counts["spec_num_correct_drafts"] + counts["spec_verify_ct"]
        assert request.prompt_tokens == counts["prompt_tokens"]
        assert request.steps[0].before == counts["prompt_tokens"]
        assert Counter(len(step.committed) - 1 for step in request.steps) == Counter(
            {i: n for i, n in enumerate(counts["spec_correct_drafts_histogram"]) if n}
        )
    steps = sum(answer["meta_info"]["spec_verify_ct"] for answer in answers)
    tokens = sum(answer["meta_info"]["spec_num_correct_drafts"] for answer in answers) + steps
    assert trace.accept_length() == tokens / steps


def replay(trace: reader.Trace, request: reader.Request, first: int, budget: int, cap: int) -> list[int]:
    """Draft nodes that each step of that tree would accept, for ``TOKENS`` tokens."""
    said = [first, *request.output]
    depth, ranks = trace.header.depth, trace.header.ranks
    accepted: list[int] = []
    place = 0
    while place + 1 < TOKENS:
        step = request.steps[place]
        tokens = torch.tensor(step.tokens).view(1, depth, ranks).to(torch.int64)
        log_probs = torch.tensor(step.log_probs).view(1, depth, ranks)
        tree = build_tree_from_topk(log_probs[..., :cap], tokens[..., :cap], budget)
        children = {
            (int(parent), int(token)): node
            for node, (parent, token) in enumerate(zip(tree.parents[0], tree.tokens[0], strict=True), 1)
            if node <= int(tree.count[0])
        }
        node = nodes = 0
        while (node, said[place + nodes + 1]) in children:
            node = children[node, said[place + nodes + 1]]
            nodes += 1
        accepted.append(nodes)
        place += nodes + 1
    return accepted


def test_a_probe_says_what_every_tree_would_accept(server: Server) -> None:
    """Request by request, steps and histogram, at ten points; in fp32 nothing is left to chance."""
    trace, probed = recorded(server, PROBE, TOKENS + DEPTH)
    expected = server.generate(PROMPTS, TOKENS)
    for answer in probed:
        request = of_answer(trace, answer)
        assert all(len(step.committed) == 1 for step in request.steps)
        # Every position from the first token of the answer on.
        start = answer["meta_info"]["prompt_tokens"]
        assert [step.before for step in request.steps] == list(range(start, start + TOKENS + DEPTH - 1))
    assert [one["output_ids"][:TOKENS] for one in probed] == [one["output_ids"] for one in expected]
    for budget, cap in POINTS:
        made = server.generate(
            PROMPTS, TOKENS, custom_params={"ddtree_budget": budget, "ddtree_topk_cap": cap}
        )
        for answer, probe in zip(made, probed, strict=True):
            accepted = replay(trace, of_answer(trace, probe), probe["output_ids"][0], budget, cap)
            counts = answer["meta_info"]
            assert len(accepted) == counts["spec_verify_ct"], (budget, cap)
            histogram = counts["spec_correct_drafts_histogram"]  # as long as its largest entry needs
            assert [accepted.count(i) for i in range(len(histogram))] == histogram


@pytest.mark.parametrize("point", [(8, 4), (24, 6)])
def test_a_probe_predicts_a_server_of_its_own(server: Server, point: tuple[int, int], tmp_path: Path) -> None:
    trace, probed = recorded(server, PROBE, TOKENS + DEPTH)
    with serve(tree_flags(*point), tmp_path / "log") as other:
        made = other.generate(PROMPTS, TOKENS)
    for answer, probe in zip(made, probed, strict=True):
        accepted = replay(trace, of_answer(trace, probe), probe["output_ids"][0], *point)
        assert len(accepted) == answer["meta_info"]["spec_verify_ct"]


def test_costs_are_of_many_widths_and_the_text_is_the_same(server: Server) -> None:
    expected = [answer["output_ids"] for answer in server.generate(PROMPTS[:3], TOKENS)]
    assert switch(server, COST) == [True]
    made = server.generate(PROMPTS[:3], TOKENS)
    path = requests.get(f"{server.url}/server_info", timeout=60).json()["internal_states"][0]["ddtree"][
        "record_path"
    ]
    assert switch(server, OFF) == [True]
    assert [answer["output_ids"] for answer in made] == expected
    trace = reader.read(path)
    assert {2, 3, 5, 9, 17, 33, 49} == {cost.width for cost in trace.costs}
    assert all(1 <= cost.requests <= 3 for cost in trace.costs)
    assert all(min(cost.draft, cost.build, cost.verify, cost.commit) > 0 for cost in trace.costs)
    # Sums of prefixes only grow while the same requests run.
    assert trace.costs[-1].before > 0


def test_only_the_service_may_read_it(server: Server) -> None:
    assert switch(server, TRACE) == [True]
    path = requests.get(f"{server.url}/server_info", timeout=60).json()["internal_states"][0]["ddtree"][
        "record_path"
    ]
    assert switch(server, OFF) == [True]
    assert stat.S_IMODE(Path(path).stat().st_mode) == 0o600
    assert switch(server, 4) == [False]


def test_a_server_without_a_folder_records_nothing() -> None:
    recorder = Recorder(Options(8, 4), 7, {})
    assert "start the server with SGLANG_DDTREE_RECORD_DIR" in (recorder.refusal(TRACE) or "")
    assert recorder.refusal(OFF) is None
    assert "expected a folder" in (
        Recorder(Options(8, 4), 7, {"SGLANG_DDTREE_RECORD_DIR": "/nowhere"}).refusal(TRACE) or ""
    )
    assert "expected 0 (off)" in (recorder.refusal(7) or "")


SECONDS = dict.fromkeys(("draft", "build", "verify", "commit"), 0.5)


def recorder_in(folder: Path, megabytes: int = 1) -> Recorder:
    settings = {"SGLANG_DDTREE_RECORD_DIR": str(folder), "SGLANG_DDTREE_RECORD_MB": str(megabytes)}
    return Recorder(Options(8, 4), DEPTH, settings)


def step_of(requests: int) -> Step:
    return Step(
        tokens=torch.zeros(requests, DEPTH, 16, dtype=torch.int32),
        log_probs=torch.zeros(requests, DEPTH, 16),
        before=torch.full((requests,), 9),
        committed=torch.ones(requests, 8, dtype=torch.int64),
        lengths=torch.full((requests,), 3, dtype=torch.int32),
    )


def test_a_full_file_ends_the_recording(tmp_path: Path) -> None:
    recorder = recorder_in(tmp_path)
    recorder.switch(COST)
    for _ in range(50_000):
        recorder.cost((9, 1, 20), SECONDS)
    assert recorder.mode == OFF
    trace = reader.read(str(recorder.path))
    assert trace.whole
    assert 900_000 < Path(str(recorder.path)).stat().st_size <= 1_000_000
    assert trace.costs[0] == reader.Cost(9, 1, 20, 0.5, 0.5, 0.5, 0.5)


def test_a_file_may_be_full_in_the_middle_of_a_step(tmp_path: Path) -> None:
    recorder = recorder_in(tmp_path)
    recorder.switch(TRACE)
    reqs = [SimpleNamespace(rid=f"r{i}" + "x" * 70_000, origin_input_ids=[1] * 9) for i in range(64)]
    for _ in range(40):
        recorder.add(reqs, [True] * 64, step_of(64))
    assert recorder.mode == OFF
    trace = reader.read(str(recorder.path))
    assert trace.whole
    assert trace.requests[0].steps[0].committed == (1, 1, 1)


def test_an_id_that_is_used_again_is_another_request(tmp_path: Path) -> None:
    recorder = recorder_in(tmp_path)
    recorder.switch(TRACE)
    for before, prompt in ((9, 9), (12, 9), (4, 4), (7, 4)):
        step = step_of(1)
        step.before[0] = before
        recorder.add([SimpleNamespace(rid="same", origin_input_ids=[1] * prompt)], [True], step)
    recorder.switch(OFF)
    found = reader.read(str(recorder.path)).requests
    assert [(one.prompt_tokens, [step.before for step in one.steps]) for one in found] == [
        (9, [9, 12]),
        (4, [4, 7]),
    ]


def test_a_disk_that_is_full_ends_the_recording_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = recorder_in(tmp_path)
    recorder.switch(COST)
    recorder._file = Path("/dev/full").open("wb", buffering=0)  # noqa: SIM115  # the recorder closes it
    recorder.cost((9, 1, 20), SECONDS)
    assert recorder.mode == OFF
    assert "No space left" in caplog.text


def test_a_folder_that_is_gone_ends_the_recording_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = recorder_in(tmp_path / "gone")
    recorder.switch(TRACE)
    assert recorder.mode == OFF
    assert "No such file" in caplog.text
    recorder.add([SimpleNamespace(rid="r", origin_input_ids=[1])], [True], step_of(1))


def test_a_torn_file_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    recorder = recorder_in(tmp_path)
    recorder.switch(COST)
    for _ in range(3):
        recorder.cost((9, 1, 20), SECONDS)
    path = Path(str(recorder.path))
    recorder.switch(OFF)
    path.write_bytes(path.read_bytes()[:-5])
    trace = reader.read(path)
    assert (trace.whole, len(trace.costs)) == (False, 2)
    path.write_bytes(b"PK..")
    with pytest.raises(reader.TraceError, match="not a record"):
        reader.read(path)
