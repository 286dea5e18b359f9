"""The real server on SGLang's own Triton attention backend, its kernels interpreted on the CPU.

The backend that a GPU runs, for target and draft: greedy output is the autoregressive one, and the verify's
metadata have the width of the tree, those of the draft its block. Interpreted kernels are slow, so this is
two short prompts; test_triton.py tries the kernel alone at more widths.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import pytest
from engine import serve, tree_flags
from prompts import PROMPTS
from verify_metadata import Verify, plugged_in, read

BUDGET, TOPK, BLOCK = 12, 4, 8
#: Of 61 and 113 tokens; the draft does well on them, and a wrong verify soon shows.
ASKED = [PROMPTS[3], PROMPTS[7]]
TOKENS = 20
TRITON = ["--attention-backend", "triton", "--speculative-draft-attention-backend", "triton"]


@dataclass(frozen=True)
class Run:
    outputs: list[list[int]]
    histograms: list[list[int]]
    target: list[Verify]
    draft: list[Verify]


def interpreted(folder: Path, extra_env: dict[str, str] | None = None) -> Run:
    """Both prompts as one batch on a server with the tree, and the metadata of all of its verifies."""
    environment = {"TRITON_INTERPRET": "1", **plugged_in(folder), **(extra_env or {})}
    with serve([*tree_flags(BUDGET, TOPK), *TRITON], folder / "log", environment) as server:
        answers = server.generate(ASKED, TOKENS)
    verifies = read(environment)
    return Run(
        outputs=[answer["output_ids"] for answer in answers],
        histograms=[answer["meta_info"]["spec_correct_drafts_histogram"] for answer in answers],
        target=[verify for verify in verifies if not verify.draft],
        draft=[verify for verify in verifies if verify.draft],
    )


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """The autoregressive answers, of another attention backend."""
    with serve([], tmp_path_factory.mktemp("autoregressive") / "log") as server:
        return [answer["output_ids"] for answer in server.generate(ASKED, TOKENS)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return interpreted(tmp_path_factory.mktemp("tree"))


def test_greedy_output_is_the_autoregressive_one(run: Run, expected: list[list[int]]) -> None:
    assert [len(output) for output in expected] == [TOKENS, TOKENS]
    assert run.outputs == expected


def test_paths_of_several_nodes_were_accepted(run: Run) -> None:
    """Else the output would be right whatever the other nodes saw."""
    for histogram in run.histograms:
        assert sum(histogram) > 2
        assert sum(histogram[2:]) > 0


def test_metadata_carry_the_width_of_the_tree_and_the_block(run: Run) -> None:
    for verifies, width in ((run.target, BUDGET + 1), (run.draft, BLOCK)):
        assert {len(verify.prefixes) for verify in verifies} == {1, 2}
        for verify in verifies:
            assert verify.max_extend_len == width
            assert verify.qo_indptr == [width * request for request in range(len(verify.prefixes) + 1)]
            sizes = [width * (prefix + width) for prefix in verify.prefixes]
            assert verify.mask_indptr == [0, *accumulate(sizes)]
    assert all(verify.mask is not None and verify.mask >= verify.mask_indptr[-1] for verify in run.target)
    assert all(verify.mask is None for verify in run.draft)


def test_the_block_planted_as_width_is_noticed(expected: list[list[int]], tmp_path: Path) -> None:
    """The block is narrower than this tree: rows are left out, none are written out of bounds."""
    run = interpreted(tmp_path, {"SGLANG_DDTREE_PLANT": "width", "SGLANG_DDTREE_TEST": "1"})
    assert {verify.max_extend_len for verify in run.target} == {BLOCK}
    assert run.outputs != expected
