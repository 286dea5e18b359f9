"""What DDTREE changes in SGLang, all through its plugin hooks.

Hooks on class methods receive the class or the instance first.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_ddtree import limits, options, record
from sglang_ddtree.compat import Switches, logprob_settings, state_hooks
from sglang_ddtree.grammar import leave_something
from sglang_ddtree.metrics import StepMetrics, current, install, tree_head

_registered: list[str] = []


def add(target: str, hook: Callable[..., Any], kind: HookType) -> None:
    """Register a hook and remember its target for :func:`require_applied`."""
    HookRegistry.register(target, hook, kind)
    _registered.append(target)


def require_applied() -> None:
    """Make sure that SGLang applied every hook: it only logs when it cannot.

    Raises:
        ValueError: naming the targets that are missing.
    """
    missing = [target for target in _registered if target not in HookRegistry._patched]
    if missing:
        raise ValueError(
            f"sglang-ddtree: SGLang did not apply the hooks on {', '.join(missing)} (see 'Failed to apply "
            "hooks' in the log): expected all of them; this SGLang is not one this package was tested with"
        )


def register() -> None:
    """Register the hooks that every server with the plugin gets. Safe to call again."""
    if _registered:
        return
    add("sglang.srt.server_args.ServerArgs.add_cli_args", _add_cli_args, HookType.AROUND)
    add("sglang.srt.server_args.ServerArgs.from_cli_args", _from_cli_args, HookType.AROUND)
    add("sglang.srt.managers.scheduler.validate_dflash_request", _validate_request, HookType.AROUND)
    processor = (
        "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
    )
    add(f"{processor}._resolve_spec_v2_tokens", _count_step, HookType.AROUND)
    for step in ("_accept_grammar_tokens", "_apply_prefill_grammar"):
        add(f"{processor}.{step}", _blame_the_request, HookType.AROUND)
    mask = "sglang.srt.constrained.base_grammar_backend.GrammarMask.apply"
    add(mask, lambda _, mask, logits: leave_something(logits), HookType.AFTER)
    streamer = "sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer"
    add(f"{streamer}.stream_output", _flush_when_done, HookType.BEFORE)
    add("sglang.srt.managers.scheduler.Scheduler.on_idle", _flush_when_idle, HookType.BEFORE)
    for target, hook in state_hooks(_switches, _show_limits).items():
        add(target, hook, HookType.AROUND)
    add(
        "sglang.srt.mem_cache.kv_cache_configurator.get_req_to_token_extra_context_len",
        _row_headroom,
        HookType.AROUND,
    )
    add(
        "sglang.srt.speculative.dflash_utils.resolve_dflash_verify_mask_policy",
        _capture_with_mask,
        HookType.AROUND,
    )


def _add_cli_args(original: Callable[..., Any], parser: argparse.ArgumentParser) -> None:
    original(parser)
    options.add_flags(parser)


def _from_cli_args(original: Callable[..., Any], cls: type, args: argparse.Namespace) -> Any:
    options.store_flags(args)
    return original(cls, args)


def _seeded() -> bool:
    from sglang.srt.runtime_context import get_exec

    return bool(get_exec().deterministic.enable_deterministic_inference)


def _grammars_of() -> str:
    from sglang.srt.runtime_context import get_exec

    return str(get_exec().kernel.grammar_backend)


def _ddtree_runs() -> bool:
    from sglang.srt.runtime_context import get_spec

    return bool(get_spec().speculative_algorithm == "DDTREE")


def _validate_request(original: Callable[..., Any], req: Any, enable_overlap: bool) -> str | None:
    """Answer a request that DDTREE cannot serve with a 400 instead of serving it wrongly."""
    if _ddtree_runs():
        parameters = req.sampling_params
        if stops := parameters.stop_token_ids:
            # What is outside the vocabulary never comes; beside a least length it would end the server.
            parameters.stop_token_ids = {token for token in stops if 0 <= token < req.vocab_size}
        if (refusal := _refusal(req)) is not None:
            # SGLang takes a refused request through its prefill all the same, as one harmless token.
            parameters.min_p = 0.0
            parameters.min_new_tokens = 0
            logprob_settings(req).top_logprobs_num = 0
            return refusal
    answer: str | None = original(req, enable_overlap)
    return answer


def _refusal(req: Any) -> str | None:
    """Why DDTREE can't serve a request, or why it would end the server, with any algorithm."""
    parameters = req.sampling_params
    if len(req.origin_input_ids) == 0:
        return "The prompt is empty; expected at least one token."
    if not 0 <= min(req.origin_input_ids) <= max(req.origin_input_ids) < req.vocab_size:
        return f"input_ids has a token outside the vocabulary of {req.vocab_size}."
    if (wanted := logprob_settings(req).top_logprobs_num) > req.vocab_size:
        return f"top_logprobs_num is {wanted}, expected at most the vocabulary of {req.vocab_size}."
    constraints = ("json_schema", "regex", "ebnf", "structural_tag")
    used = [name for name in constraints if getattr(parameters, name, None)]
    if used and _grammars_of() == "outlines":
        return (
            f"{', '.join(used)}: DDTREE takes grammars back and forth in a tree, which outlines can't do; "
            "expected a server with --grammar-backend xgrammar or llguidance."
        )
    if req.return_hidden_states:
        return "DDTREE does not support return_hidden_states."
    if parameters.min_p > 0 and _seeded():
        return "min_p is not supported with --enable-deterministic-inference, whose sampler lacks it."
    if isinstance(parameters.custom_params, dict):
        asked = limits.current().refusal(parameters.custom_params)
        return f"custom_params: {asked}" if asked is not None else None
    return None


def _switches() -> Switches:
    """What ``/set_internal_state`` can change: what is in force, and what is recorded."""
    if not _ddtree_runs():
        return {}
    now, recorder = limits.current(), record.current()

    def set_limit(key: str, value: float) -> None:
        now.set(key, value)
        if (metrics := current()) is not None:
            metrics.retitle(tree_head(now.budget, now.topk_cap))

    switches: dict[str, Any] = {
        key: (partial(now.switch_refusal, key), partial(set_limit, key))
        for key in (*limits.KEYS, limits.ADAPTIVE_KEY)
    }
    if recorder is not None:
        from sglang.srt.runtime_context import get_parallel

        writes = get_parallel().tp_rank == 0
        switches[record.KEY] = (recorder.refusal, partial(recorder.switch, writes=writes))
    return switches


def _show_limits(state: dict[str, Any]) -> None:
    """Show in ``/server_info`` what the server was started for and what is in force."""
    if not _ddtree_runs():
        return
    now = limits.current()
    state["ddtree"] = {
        "budget": now.most.budget,
        "topk_cap": now.most.topk_cap,
        "budget_in_force": now.budget,
        "topk_cap_in_force": now.topk_cap,
        "verify_width": now.most.width,
        "adaptive": now.adaptive,
        "mean_budget": round(now.chooser.mean, 1) if now.adaptive else now.budget,
    }
    if (recorder := record.current()) is not None:
        state["ddtree"]["record"] = recorder.mode
        state["ddtree"]["record_path"] = str(recorder.path) if recorder.path is not None else None


def _blame_the_request(original: Callable[..., Any], processor: Any, *args: Any, **arguments: Any) -> Any:
    """Answer 400 where nothing is left that a grammar takes (see ``grammar.leave_something``).

    SGLang gives up such a request with a 500, before 0.5.23 with an abort that gives no reason.
    """
    req = arguments["req"] if "req" in arguments else args[0]
    before = req.to_finish
    taken = original(processor, *args, **arguments)
    if (end := req.to_finish) is not before:
        end.message = (
            "The grammar has come to where it allows none of the model's tokens, or only an end that "
            f"min_new_tokens puts off. {end.message}"
        )
        end.status_code, end.err_type = HTTPStatus.BAD_REQUEST, "BadRequestError"
    return taken


def _count_step(original: Callable[..., Any], processor: Any, result: Any, batch: Any) -> Any:
    """Feed the metrics with the requests of a step whose tokens are being committed."""
    metrics = current() or _chain_metrics()
    running = [not (req.is_retracted or req.finished()) for req in batch.reqs]
    tokens = original(processor, result, batch)
    step, recorder = getattr(result, "ddtree_step", None), record.current()
    if step is not None and recorder is not None:
        recorder.add(batch.reqs, running, step)
    if metrics is not None:
        accepted = result.num_correct_drafts_per_req_cpu
        metrics.add([nodes for nodes, counts in zip(accepted, running, strict=True) if counts])
    return tokens


def _chain_metrics() -> StepMetrics | None:
    """Metrics of a DFLASH server: the same line for the flat chain, so that both arms are counted alike.

    SGLang's own ``Decode batch`` lines leave out the last, partial window.
    """
    from sglang.srt.runtime_context import get_observability, get_parallel, get_spec

    if get_spec().speculative_algorithm != "DFLASH":
        return None
    return install(
        StepMetrics(
            "DFLASH metrics:",
            longest=int(get_spec().speculative_num_draft_tokens) - 1,
            interval=get_observability().decode_log_interval,
            enabled=get_parallel().tp_rank == 0,
            stages=(),
        )
    )


def _flush_when_done(streamer: Any, reqs: Any, *args: Any, **kwargs: Any) -> None:
    """Write the line before the last answer leaves, so that whoever has all answers finds all steps."""
    if all(req.finished() for req in reqs):
        _flush_when_idle()


def _flush_when_idle(*_: Any) -> None:
    if (metrics := current()) is not None:
        metrics.flush()


def _row_headroom(original: Callable[..., int]) -> int:
    """Room beyond the context in a row of the token table.

    A decode step reserves twice its width past the committed tokens; the stock headroom holds one width, and
    a request near the end of its context would write into its neighbour's row.
    """
    headroom = original()
    if _ddtree_runs():
        from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode

        headroom = max(headroom, get_alloc_reserve_per_decode() + 4)
    return headroom


def _capture_with_mask(original: Callable[..., tuple[str, bool]], backend: Any) -> tuple[str, bool]:
    """Have CUDA graphs of the target captured with the mask; without it a replay would verify causally."""
    name, build = original(backend)
    return name, build or _ddtree_runs()
