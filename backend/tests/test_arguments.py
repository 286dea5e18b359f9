"""Server arguments: what is refused and how it says so, in this process and through real launches."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine import MODELS, environment, launch_command, tree_flags
from sglang_ddtree.options import Options
from sglang_ddtree.versions import TESTED


def arguments(**changes: Any) -> SimpleNamespace:
    """SGLang's arguments as they are when a custom algorithm is asked to resolve them."""
    plain: dict[str, Any] = {
        "speculative_draft_model_path": str(MODELS / "draft"),
        "speculative_draft_model_revision": "main",
        "speculative_dflash_block_size": None,
        "speculative_num_draft_tokens": None,
        "speculative_num_steps": None,
        "speculative_eagle_topk": None,
        "speculative_adaptive": False,
        "speculative_draft_window_size": None,
        "speculative_draft_attention_backend": None,
        "attention_backend": "torch_native",
        "prefill_attention_backend": None,
        "decode_attention_backend": None,
        "context_length": 1024,
        "page_size": None,
        "pp_size": 1,
        "enable_dp_attention": False,
        "enable_lora": None,
        "enable_two_batch_overlap": False,
        "enable_hierarchical_cache": False,
        "disaggregation_mode": "null",
        "max_running_requests": None,
        "trust_remote_code": False,
        "json_model_override_args": "{}",
    }
    assert set(changes) <= set(plain)
    return SimpleNamespace(**{**plain, **changes})


def resolve(args: SimpleNamespace, options: Options) -> SimpleNamespace:
    from sglang_ddtree.algorithm import resolve_arguments

    resolve_arguments(args, options)
    return args


@pytest.mark.parametrize(("budget", "reserved"), [(4, 8), (7, 8), (8, 9), (48, 49)])
def test_the_reservation_covers_block_and_tree(budget: int, reserved: int) -> None:
    args = resolve(arguments(), Options(budget, 4))
    assert args.speculative_dflash_block_size == 8  # from the draft's configuration
    assert args.speculative_num_draft_tokens == reserved
    assert (args.speculative_num_steps, args.speculative_eagle_topk) == (1, 1)
    assert args.speculative_draft_attention_backend == "torch_native"


def test_the_block_can_be_given() -> None:
    assert (
        resolve(arguments(speculative_dflash_block_size=5), Options(3, 4)).speculative_num_draft_tokens == 5
    )


def test_without_a_choice_the_target_runs_on_triton() -> None:
    args = resolve(arguments(attention_backend=None), Options(8, 4))
    assert args.attention_backend == args.speculative_draft_attention_backend == "triton"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"speculative_draft_model_path": None}, "--speculative-draft-model-path"),
        ({"attention_backend": "fa3"}, "found --attention-backend fa3: expected one of triton, torch_native"),
        ({"decode_attention_backend": "flashinfer"}, "found --decode-attention-backend flashinfer"),
        ({"context_length": 9}, "--speculative-ddtree-budget 8 .* context length is 9"),
        ({"page_size": 16}, "--page-size 16: expected --page-size 1"),
        ({"pp_size": 2}, "--pp-size 2: expected --pp-size 1"),
        ({"enable_dp_attention": True}, "--enable-dp-attention"),
        ({"enable_lora": True}, "--enable-lora"),
        ({"enable_hierarchical_cache": True}, "--enable-hierarchical-cache"),
        ({"enable_two_batch_overlap": True}, "--enable-two-batch-overlap"),
        ({"disaggregation_mode": "prefill"}, "--disaggregation-mode prefill"),
        ({"speculative_adaptive": True}, "--speculative-adaptive"),
        ({"speculative_draft_window_size": 64}, "--speculative-draft-window-size 64"),
        ({"speculative_num_draft_tokens": 9}, "--speculative-num-draft-tokens 9"),
        ({"speculative_num_steps": 3}, "--speculative-num-steps 3"),
        ({"speculative_eagle_topk": 4}, "--speculative-eagle-topk 4"),
        ({"speculative_dflash_block_size": 1}, "block of 1 in --speculative-dflash-block-size"),
        (
            {"speculative_draft_model_path": str(MODELS / "target")},
            "no block size in the configuration of .*target",
        ),
    ],
)
def test_what_cannot_work_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve(arguments(**changes), Options(8, 4))


def test_widths_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """The target verifies the tree, the draft its block, whatever width is configured."""
    from sglang.srt import runtime_context
    from sglang_ddtree.algorithm import DDTreeAlgorithm

    monkeypatch.setenv("SGLANG_DDTREE_BUDGET", "4")
    spec = SimpleNamespace(speculative_dflash_block_size=8)
    monkeypatch.setattr(runtime_context, "get_spec", lambda: spec)
    algorithm = DDTreeAlgorithm("DDTREE", lambda _: object)
    width = algorithm.get_num_tokens_per_req_for_target_verify
    assert width(8, is_draft_worker=False) == 5
    assert width(8, is_draft_worker=True) == 8


def test_a_slow_start_is_spared() -> None:
    """Only files without a class that is needed are skipped, and none when something is unknown."""
    from sglang_ddtree.cpu.boot import unused_models

    skipped = unused_models(["Qwen3ForCausalLM", "DFlashDraftModel"])
    assert len(skipped) > 100
    assert not {"qwen3", "dflash"} & set(skipped)
    assert unused_models(["Qwen3ForCausalLM", "NoSuchModel"]) == []
    assert unused_models([]) == []


def run(command: list[str], **extra: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env=environment(extra), capture_output=True, text=True, timeout=200, check=False
    )


def test_help_shows_the_flags() -> None:
    done = run([sys.executable, "-m", "sglang.launch_server", "--help"])
    assert done.returncode == 0
    assert "--speculative-ddtree-budget N" in done.stdout
    assert "--speculative-ddtree-topk-cap N" in done.stdout
    assert "--speculative-ddtree-adaptive" in done.stdout


def test_a_server_with_a_budget_beyond_the_context_does_not_start() -> None:
    done = run(launch_command(31099, tree_flags(5000, 4)))
    assert done.returncode not in (0, None)
    assert "--speculative-ddtree-budget 5000 needs 5001 tokens per verify" in done.stderr


@pytest.fixture
def other_version(tmp_path: Path) -> str:
    """A directory that makes this environment's SGLang look like release 9.9.9."""
    info = tmp_path / "sglang-9.9.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 9.9.9\n")
    return str(tmp_path)


def test_an_untested_release_is_refused(other_version: str) -> None:
    done = run(launch_command(31099, tree_flags(8, 4)), PYTHONPATH=other_version)
    assert done.returncode == 1
    assert f"sglang 9.9.9 is installed, tested with {', '.join(TESTED)}" in done.stderr
    assert "SGLANG_DDTREE_ALLOW_UNTESTED=1" in done.stderr


def test_an_untested_release_is_tried_when_told_to(other_version: str) -> None:
    """Everything in the environment is as before but the number, so the budget is what it stops at."""
    allowed = {"PYTHONPATH": other_version, "SGLANG_DDTREE_ALLOW_UNTESTED": "1"}
    done = run(launch_command(31099, tree_flags(5000, 4)), **allowed)
    assert "--speculative-ddtree-budget 5000 needs 5001 tokens per verify" in done.stderr


def test_a_release_is_called_tested_when_make_test_runs_it() -> None:
    root = Path(__file__).resolve().parents[2]
    locks = [*root.glob("requirements/engine-*.txt"), root / "roles/sglang_engine/files/requirements-cpu.txt"]
    pinned = [re.findall(r"^sglang==(\S+)", lock.read_text(), re.M) for lock in locks]
    assert sorted(release for found in pinned for release in found) == list(TESTED)


def check(**extra: str) -> tuple[int, dict[str, Any], str]:
    done = run([sys.executable, "-m", "sglang_ddtree", "check"], **extra)
    report = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return done.returncode, json.loads(report[-1]), done.stderr


def test_check_accepts_this_environment() -> None:
    code, report, _ = check()
    assert code == 0
    assert report["registered"] is report["version_tested"] is report["entry_point"] is True
    assert report["sglang"] in TESTED
    assert report["error"] is None


def test_check_refuses_an_untested_release(other_version: str) -> None:
    code, report, errors = check(PYTHONPATH=other_version)
    assert code == 1
    assert report["sglang"] == "9.9.9"
    assert report["registered"] is report["version_tested"] is False
    assert "sglang 9.9.9 is installed" in errors


def test_check_refuses_when_the_plugin_is_not_loaded() -> None:
    code, report, errors = check(SGLANG_PLUGINS="another")
    assert code == 1
    assert report["registered"] is False
    assert "DDTREE is not registered" in errors


def test_the_wheel_is_complete(tmp_path: Path) -> None:
    """Built, unpacked and nothing else: entry point, .pth file, and a stand-in for the CPU engine only."""
    backend = Path(__file__).resolve().parents[1]
    built = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=backend,
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    subprocess.run([sys.executable, "-m", "zipfile", "-e", str(wheel), str(site)], check=True)
    (points,) = site.glob("*.dist-info/entry_points.txt")
    assert "ddtree = sglang_ddtree.plugin:activate" in points.read_text()
    script = (
        "import site, sys; site.addsitedir(sys.argv[1]); sys.path.append(sys.argv[2])\n"
        "import sglang_ddtree; print(sglang_ddtree.__file__)\n"
        "import sgl_kernel; print(sgl_kernel.__file__)"
    )
    torch_home = str(Path(torch.__file__).parents[1])
    command = [sys.executable, "-S", "-c", script, str(site), torch_home]
    plain = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(command, env=plain, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [line.startswith(str(site)) for line in done.stdout.split()] == [True, True]
    elsewhere = {**plain, "SGLANG_USE_CPU_ENGINE": "0"}
    done = subprocess.run(command, env=elsewhere, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "No module named 'sgl_kernel'" in done.stderr
