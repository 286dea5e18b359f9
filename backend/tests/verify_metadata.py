"""A plugin for a test's server: writes down what SGLang's Triton attention backend made of each verify.

One JSON object per verify forward, in the file that the environment names. SGLang finds plugins among the
packages of its environment; :func:`plugged_in` makes this file look like one.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FILE_ENV = "DDTREE_TEST_VERIFY_METADATA"


@dataclass(frozen=True)
class Verify:
    """Metadata of one verify forward."""

    draft: bool
    prefixes: list[int]
    """Of each request, as the kernel reads them from the KV cache."""
    max_extend_len: int
    qo_indptr: list[int]
    mask_indptr: list[int]
    mask: int | None
    """Elements of the tree mask; None without one."""


def plugged_in(folder: Path) -> dict[str, str]:
    """Environment of a server that loads this plugin and writes into ``folder``."""
    package = folder / f"{__name__}-0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {__name__}\nVersion: 0\n")
    (package / "entry_points.txt").write_text(f"[sglang.srt.plugins]\nmetadata = {__name__}:activate\n")
    return {
        "PYTHONPATH": os.pathsep.join([str(folder), str(Path(__file__).parent)]),
        FILE_ENV: str(folder / "verify_metadata"),
    }


def read(environment: dict[str, str]) -> list[Verify]:
    """What a server with that environment has written."""
    return [Verify(**json.loads(line)) for line in Path(environment[FILE_ENV]).read_text().splitlines()]


def activate() -> None:
    """Entry point of the plugin."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    backend = "sglang.srt.layers.attention.triton_backend.TritonAttnBackend"
    HookRegistry.register(f"{backend}.init_forward_metadata", _write, HookType.AFTER)


def _write(result: Any, backend: Any, forward_batch: Any) -> None:
    if not forward_batch.forward_mode.is_target_verify():
        return
    made = backend.forward_metadata
    verify = Verify(
        draft=backend.is_draft_runner,
        prefixes=made.kv_indptr.diff().tolist(),
        max_extend_len=made.max_extend_len,
        qo_indptr=made.qo_indptr.tolist(),
        mask_indptr=made.mask_indptr.tolist(),
        mask=made.custom_mask.numel() if made.custom_mask is not None else None,
    )
    with Path(os.environ[FILE_ENV]).open("a") as file:
        file.write(json.dumps(asdict(verify)) + "\n")
