"""Hooks that let the DFLASH family run on SGLang's CPU engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from sglang_ddtree.cpu import attention, boot
from sglang_ddtree.hooks import add


def activate() -> None:
    """Register the CPU engine's hooks."""
    import torch
    from sglang.srt.arg_groups.choices import (
        add_deterministic_attention_backend_choices,
        add_draft_attention_backend_choices,
    )

    add_draft_attention_backend_choices(["torch_native"])
    # One sequence after the other, so it does not depend on the batch.
    add_deterministic_attention_backend_choices(["torch_native"])
    add("sglang.srt.arg_groups.speculative_hook._handle_dflash", _allow_cpu, HookType.AROUND)
    add("sglang.srt.models.dflash.DFlashDraftModel.forward", _keep_embedding_dtype, HookType.AROUND)
    add("sglang.srt.models.dflash.DFlashAttention.__init__", _no_fused_rope, HookType.AROUND)
    add("sglang.srt.server_args.ServerArgs.from_cli_args", boot.choose_flags, HookType.BEFORE)
    native = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"
    add(f"{native}.init_forward_metadata", attention.plan_verify, HookType.BEFORE)
    add(f"{native}.forward_extend", attention.forward_extend, HookType.AROUND)
    runner = "sglang.srt.model_executor.model_runner.ModelRunner"
    add(f"{runner}.maybe_enable_batch_invariant_mode", _no_accelerator_kernels, HookType.AROUND)
    add("sglang.srt.entrypoints.engine._set_envs_and_config", boot.after_environment, HookType.AFTER)
    # Not _execute_server_warmup itself: that one is bound as a default argument before any hook is applied.
    add("sglang.srt.entrypoints.http_server._wait_and_warmup", boot.warm_up_without_delay, HookType.AROUND)
    add(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager.sigterm_watchdog",
        boot.stop_without_delay,
        HookType.AROUND,
    )
    add("sglang.srt.managers.utils.GenerationBatchResult.copy_to_cpu", _without_label, HookType.AROUND)
    # Streams of a CPU are one; torch has no kernel for this method there.
    torch.Tensor.record_stream = lambda self, stream: None


def _no_accelerator_kernels(original: Callable[..., None], runner: Any) -> None:
    """Deterministic inference swaps in kernels for accelerators; seeded sampling is all that is left here."""


def _without_label(original: Callable[..., None], *args: Any, **arguments: Any) -> None:
    """Copy nothing from CPU to CPU without a label for profilers, which takes a hundred times as long."""
    getattr(original, "__wrapped__", original)(*args, **arguments)


class _CpuAllowed:
    """The platform as DFLASH's argument check sees it: one that supports DFLASH."""

    def __init__(self, platform: Any) -> None:
        self._platform = platform

    def __getattr__(self, name: str) -> Any:
        return getattr(self._platform, name)

    def is_out_of_tree(self) -> bool:
        return True

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        return algorithm == "DFLASH"

    def supports_speculative_draft_attention_backend(self, algorithm: str, backend: str) -> bool:
        return backend in ("triton", "torch_native")

    def get_default_speculative_draft_attention_backend(self, algorithm: str) -> str:
        return "torch_native"


def _allow_cpu(original: Callable[..., None], server_args: Any) -> None:
    """DFLASH refuses devices it was not tested on; its worker is plain torch."""
    from sglang.srt.arg_groups import speculative_hook

    platform = speculative_hook.current_platform
    speculative_hook.current_platform = _CpuAllowed(platform)
    try:
        original(server_args)
    finally:
        speculative_hook.current_platform = platform


def _keep_embedding_dtype(
    original: Callable[..., Any],
    model: Any,
    input_ids: Any,
    positions: Any,
    forward_batch: Any,
    input_embeds: Any = None,
    **arguments: Any,
) -> Any:
    """The runner casts input embeddings to bfloat16 whatever the model's type; cast them back."""
    if input_embeds is not None:
        input_embeds = input_embeds.to(model.layers[0].input_layernorm.weight.dtype)
    return original(model, input_ids, positions, forward_batch, input_embeds, **arguments)


def _no_fused_rope(original: Callable[..., None], layer: Any, *args: Any, **arguments: Any) -> None:
    """Keep bfloat16 drafts on the torch path instead of a Triton kernel."""
    original(layer, *args, **arguments)
    layer.use_table_qk_norm_rope = False
