"""DDTREE as a speculative algorithm of SGLang: its registration and its server arguments."""

from __future__ import annotations

import json
from typing import Any

from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo, get_spec

from sglang_ddtree import hooks
from sglang_ddtree.options import BUDGET_FLAG, TOPK_CAP_FLAG, Options, from_environment

NAME = "DDTREE"
#: Attention backends whose target verify was seen to honour a tree mask. Others silently verify causally.
TARGET_BACKENDS = ("triton", "torch_native")


class DDTreeAlgorithm(CustomSpecAlgo):
    """A member of the DFLASH family whose target verifies a tree instead of the draft's block.

    Three widths are told apart: the target verifies ``budget + 1`` tokens, the draft runs its block, and KV
    is reserved for the larger of the two, which is what SGLang calls ``speculative_num_draft_tokens``.
    """

    def is_dflash(self) -> bool:
        """True: SGLang prepares hidden state capture, draft KV and decode batches as for DFLASH."""
        return True

    def is_dflash_family(self) -> bool:
        """True, as :meth:`is_dflash`."""
        return True

    def supports_target_verify_for_draft(self) -> bool:
        """True: the draft block runs in the target-verify forward mode."""
        return True

    # The scheduler asks these of every algorithm although CustomSpecAlgo of 0.5.23 lacks them.
    def carries_draft_hidden_states(self) -> bool:
        """False: the draft reads its own KV."""
        return False

    def need_topk(self) -> bool:
        """False: no top-k travels between steps."""
        return False

    def supports_grammar_overlap(self) -> bool:
        """True: a step lets grammars take the last step's tokens while the target runs."""
        return True

    def get_platform_worker_cls(self) -> None:
        """No out-of-tree platform replaces the worker."""

    def create_future_map(
        self,
        device: Any,
        req_to_token_pool: Any,
        needs_cpu_seq_lens: bool = True,
        needs_confidence_relay: bool = False,
    ) -> Any:
        """The relay between overlapped steps; the stock one carries all that DDTREE needs."""
        from sglang.srt.managers.overlap_utils import FutureMap

        return FutureMap(device, self, req_to_token_pool, needs_cpu_seq_lens, needs_confidence_relay)

    def get_num_tokens_per_req_for_target_verify(self, num_draft_tokens: int, is_draft_worker: bool) -> int:
        """Tokens per request of a verify forward: the block for the draft, ``budget + 1`` for the target.

        ``num_draft_tokens``, the reservation, is neither; falling back to it is how a verify goes wrong
        silently.
        """
        from sglang.srt.runtime_context import get_spec as spec_config

        if is_draft_worker:
            return int(spec_config().speculative_dflash_block_size)
        return from_environment().width

    def handle_server_args(self, server_args: Any) -> None:
        """Check the arguments and fill in what follows from them. Writes are recorded by SGLang."""
        resolve_arguments(server_args, from_environment())


def register() -> None:
    """Make ``--speculative-algorithm DDTREE`` known. Safe to call again."""
    if get_spec(NAME) is not None:
        return

    @SpeculativeAlgorithm.register(NAME, supports_overlap=True, spec_class=DDTreeAlgorithm)
    def factory(server_args: Any) -> type:
        from sglang_ddtree.worker import DDTreeWorker

        return DDTreeWorker


def resolve_arguments(args: Any, options: Options) -> None:
    """Refuse what DDTREE cannot do and fill in what it needs.

    Args:
        args: SGLang's arguments; attributes are read and written.
        options: of DDTREE.

    Raises:
        ValueError: naming what was found, what was expected and the flag to change.
    """
    hooks.require_applied()
    if not args.speculative_draft_model_path:
        raise ValueError(
            "DDTREE needs a draft model and found none: give the path of a DFlash draft with "
            "--speculative-draft-model-path"
        )
    _refuse_combinations(args)
    block = _block_size(args)
    if args.context_length is not None and options.width >= args.context_length:
        raise ValueError(context_message(options, args.context_length))
    _resolve_backends(args)
    args.speculative_dflash_block_size = block
    args.speculative_num_draft_tokens = max(options.width, block)
    args.speculative_num_steps = 1
    args.speculative_eagle_topk = 1
    if args.max_running_requests is None:
        args.max_running_requests = 48  # what SGLang gives DFLASH


def context_message(options: Options, context: int) -> str:
    """What to say when a tree does not fit into the context."""
    return (
        f"{BUDGET_FLAG} {options.budget} needs {options.width} tokens per verify, but the context length is "
        f"{context}: expected a budget below {context - 1}; lower {BUDGET_FLAG} or raise --context-length"
    )


def _refuse_combinations(args: Any) -> None:
    refused: list[tuple[bool, str, str]] = [
        (args.page_size not in (None, 1), f"--page-size {args.page_size}", "--page-size 1"),
        (args.pp_size != 1, f"--pp-size {args.pp_size}", "--pp-size 1"),
        (bool(args.enable_dp_attention), "--enable-dp-attention", "no DP attention"),
        (bool(args.enable_lora), "--enable-lora", "no LoRA"),
        (bool(args.enable_two_batch_overlap), "--enable-two-batch-overlap", "no two-batch overlap"),
        (bool(args.enable_hierarchical_cache), "--enable-hierarchical-cache", "no hierarchical cache"),
        (bool(args.speculative_adaptive), "--speculative-adaptive", "no adaptive speculation"),
        (
            args.disaggregation_mode not in (None, "null"),
            f"--disaggregation-mode {args.disaggregation_mode}",
            "prefill and decode in one server",
        ),
        (
            args.speculative_draft_window_size is not None,
            f"--speculative-draft-window-size {args.speculative_draft_window_size}",
            "the draft's whole context",
        ),
        (
            args.speculative_num_draft_tokens is not None,
            f"--speculative-num-draft-tokens {args.speculative_num_draft_tokens}",
            f"the width to follow from {BUDGET_FLAG}",
        ),
        (
            args.speculative_num_steps not in (None, 1),
            f"--speculative-num-steps {args.speculative_num_steps}",
            "one draft pass per step",
        ),
        (
            args.speculative_eagle_topk not in (None, 1),
            f"--speculative-eagle-topk {args.speculative_eagle_topk}",
            f"the ranks to follow from {TOPK_CAP_FLAG}",
        ),
    ]
    for hit, found, expected in refused:
        if hit:
            raise ValueError(f"DDTREE does not support {found}: expected {expected}; leave the flag out")


def _block_size(args: Any) -> int:
    if args.speculative_dflash_block_size is not None:
        block = int(args.speculative_dflash_block_size)
        source = "--speculative-dflash-block-size"
    else:
        from sglang.srt.speculative.dflash_utils import parse_dflash_draft_config
        from sglang.srt.utils.hf_transformers_utils import get_config

        config = get_config(
            args.speculative_draft_model_path,
            trust_remote_code=args.trust_remote_code,
            revision=args.speculative_draft_model_revision,
            model_override_args=json.loads(args.json_model_override_args),
        )
        found = parse_dflash_draft_config(draft_hf_config=config).resolve_block_size(default=None)
        if found is None:
            raise ValueError(
                f"DDTREE found no block size in the configuration of {args.speculative_draft_model_path}: "
                "expected a DFlash draft; give its block with --speculative-dflash-block-size"
            )
        block, source = int(found), "the draft's configuration"
    if block < 2:
        raise ValueError(
            f"DDTREE found a draft block of {block} in {source}: expected at least 2, the bonus token and "
            "one drafted position; change --speculative-dflash-block-size"
        )
    return block


def _resolve_backends(args: Any) -> None:
    chosen = {
        "--attention-backend": args.attention_backend,
        "--prefill-attention-backend": args.prefill_attention_backend,
        "--decode-attention-backend": args.decode_attention_backend,
    }
    for flag, backend in chosen.items():
        if backend is not None and backend not in TARGET_BACKENDS:
            raise ValueError(
                f"DDTREE needs an attention backend that honours a tree mask and found {flag} {backend}: "
                f"expected one of {', '.join(TARGET_BACKENDS)}; set --attention-backend triton"
            )
    if args.attention_backend is None:
        args.attention_backend = "triton"
    if args.speculative_draft_attention_backend is None:
        args.speculative_draft_attention_backend = args.attention_backend
