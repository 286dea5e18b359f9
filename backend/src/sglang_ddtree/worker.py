"""The DDTREE worker: drafts a block, builds a tree of it, verifies the tree in one target pass, commits a
path.

Everything between the draft's hidden states and the committed path stays on the device; no step waits for a
result to reach the host, so that the scheduler can prepare the next batch meanwhile (overlap scheduling).
"""

from __future__ import annotations

import logging
import time
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from sglang.kernels.ops.speculative.cache_locs import assign_extend_cache_locs_func
from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.layers.logprob_processor import compute_spec_logprobs
from sglang.srt.layers.sampler import apply_custom_logit_processor
from sglang.srt.lora.layers import unwrap_lora_layer
from sglang.srt.managers.scheduler import GenerationBatchResult
from sglang.srt.model_executor.cuda_graph_config import Backend
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
    enable_num_token_non_padded,
)
from sglang.srt.runtime_context import get_exec, get_observability, get_parallel, get_spec
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.dflash_utils import is_dense_head_weight
from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_tp_sync import SpecTpSyncSite
from torch import Tensor

from sglang_ddtree import limits, record
from sglang_ddtree.accept import Acceptance, accept, verify_mask
from sglang_ddtree.algorithm import context_message
from sglang_ddtree.clock import StageClock
from sglang_ddtree.compat import draft_scope, gathered_later, logits_processor, planned, window_plan
from sglang_ddtree.grammar import Outline, constrain
from sglang_ddtree.graph_check import GraphCheck
from sglang_ddtree.metrics import STAGES, StepMetrics, install, prometheus, tree_head
from sglang_ddtree.options import ADAPTIVE_FLAG, from_environment
from sglang_ddtree.penalties import OutputCounts
from sglang_ddtree.sampling import answer_nodes
from sglang_ddtree.tree import RootedTree, best_log_probs, grow_tree

logger = logging.getLogger(__name__)


class DDTreeWorker(DFlashWorkerV2):
    """DFLASH's worker with a tree between draft and verify. Prefill is DFLASH's own."""

    def __init__(self, **arguments: Any) -> None:
        """Build the draft as DFLASH does.

        Raises:
            ValueError: a target or draft that DDTREE cannot serve.
        """
        self.options = from_environment()
        self._block = int(get_spec().speculative_dflash_block_size)
        with self._draft_widths():
            super().__init__(**arguments)
        self._refuse_models()
        self._limits = limits.current()
        #: With graphs every verify has the captured width, and a lower budget leaves nodes unused.
        self._one_width = get_exec().graph.cuda_graph_config.decode.backend != Backend.DISABLED
        self._refuse_adaptive()
        self._graph_check = GraphCheck(self.model_runner)
        #: KV slots of a step: both the draft's block and the tree start at the committed prefix.
        self._window = max(self.options.width, self._block)
        self._draft_offsets = torch.arange(self._block, device=self.device)
        self._masked = torch.full((1, self._block - 1), int(self._mask_token_id), device=self.device)
        #: Whether a pass has to know how many of its tokens are no padding.
        self._counts_padding = enable_num_token_non_padded()
        self._counts = OutputCounts(self.model_runner.model_config.vocab_size, self.device)
        self._recorder = record.install(record.Recorder(self.options, self._block - 1))
        self._clock = StageClock(str(self.device), STAGES)
        self._step_metrics = install(
            StepMetrics(
                tree_head(self.options.budget, self.options.topk_cap),
                longest=min(self.options.budget, self._block - 1),
                interval=get_observability().decode_log_interval,
                enabled=get_parallel().tp_rank == 0,
            )
        )
        if get_parallel().tp_rank == 0 and get_observability().enable_metrics:
            self._step_metrics.export = prometheus(
                {"model_name": self.server_args.served_model_name}, min(self.options.budget, self._block - 1)
            )
        if get_parallel().tp_rank == 0:
            logger.info(
                "DDTREE worker: budget=%d topk=%d verify_width=%d draft_block=%d kv_window=%d",
                self.options.budget,
                self.options.topk_cap,
                self.options.width,
                self._block,
                self._window,
            )
            if self.options.plant is not None:
                logger.warning(
                    "DDTREE: PLANTED FAULT %s, the output of this server is wrong", self.options.plant
                )

    def _draft_widths(self) -> AbstractContextManager[Any]:
        """Have the draft sized by its block: the configured width is the reservation of both models."""
        bag: AbstractContextManager[Any] = get_spec().override(speculative_num_draft_tokens=self._block)
        return bag

    def _refuse_models(self) -> None:
        config = self.model_runner.model_config
        if mambaish_config(config) is not None:
            raise ValueError(
                "DDTREE verifies trees, and found a target with recurrent (Mamba-like) layers: expected "
                "attention layers only; use --speculative-algorithm DFLASH for this model"
            )
        if self.options.width >= config.context_len:
            raise ValueError(context_message(self.options, config.context_len))
        kinds = {
            "Domino": self._is_domino,
            "candidate selector": self.selector is not None,
            "LiLiCorr": self.lilicorr is not None,
        }
        for kind, found in kinds.items():
            if found:
                raise ValueError(
                    f"DDTREE needs independent distributions per drafted position, and found a draft with a "
                    f"{kind} head: expected a plain DFlash draft; change --speculative-draft-model-path"
                )

    def _refuse_adaptive(self) -> None:
        """Say why a server can't choose its budgets step by step; at start, if that is what it was told to.

        Raises:
            ValueError: with the flag to change.
        """
        if self._one_width:
            self._limits.adaptive_refusal = (
                "with CUDA graphs every verify has the captured width; expected --disable-cuda-graph"
            )
        elif int(get_parallel().tp_group.world_size) != 1:
            self._limits.adaptive_refusal = "ranks would choose differently; expected --tp-size 1"
        if self._limits.adaptive and self._limits.adaptive_refusal is not None:
            raise ValueError(f"{ADAPTIVE_FLAG}: {self._limits.adaptive_refusal}; or leave the flag out")

    def init_attention_backends(self) -> None:
        """Build the draft's attention for its block."""
        with self._draft_widths():
            super().init_attention_backends()

    def init_cuda_graphs(self) -> None:
        """Capture the draft for its block."""
        with self._draft_widths():
            super().init_cuda_graphs()

    def _maybe_build_draft_sampler(self) -> None:
        """DFLASH's sampler folds an argmax into the draft's graph; a tree needs the distributions."""

    def prewarm_sampling(self) -> Any:
        """Sampling runs through the target's own sampler."""
        return self.model_runner.prewarm_sampling()

    def _validate_phase1_sampling_support(self, batch: Any) -> None:
        """DFLASH warns here that it falls back to greedy; DDTREE samples."""

    def forward_batch_generation(
        self, batch: Any, on_publish: Any = None, grammar_barrier: Any = None, pp_proxy_tensors: Any = None
    ) -> Any:
        """Run one scheduler step: DFLASH's prefill, or draft, tree, verify and commit."""
        if (
            batch.forward_mode.is_extend()
            or batch.is_extend_in_batch
            or batch.spec_info is None
            or batch.forward_mode.is_idle()
        ):
            result = super().forward_batch_generation(batch, on_publish, grammar_barrier, pp_proxy_tensors)
            if batch.forward_mode.is_extend() and result.next_token_ids is not None:
                pool = self.model_runner.req_to_token_pool.req_to_token
                self._counts.begin(len(pool), batch.req_pool_indices, batch.reqs, result.next_token_ids)
            return result

        self._clock.start(always=self._recorder.mode == record.COST or self._limits.adaptive)
        state, prefix_lens = batch.spec_info, batch.seq_lens
        if prefix_lens.is_cuda:
            # Made on the scheduler's stream; keep its memory until this stream has read it.
            prefix_lens.record_stream(torch.cuda.current_stream())
        locations = assign_extend_cache_locs_func(
            req_pool_indices=batch.req_pool_indices,
            req_to_token=self.model_runner.req_to_token_pool.req_to_token,
            start_offset=prefix_lens,
            end_offset=prefix_lens + self._window,
            batch_size=prefix_lens.shape[0],
            draft_token_num=self._window,
            device=self.device,
        )
        host_lens = batch.seq_lens_cpu if batch.seq_lens_cpu is not None else state.nxt_kv_lens_cpu
        # Of all prefixes, as the host knows them.
        total = int(host_lens.sum())
        plan = window_plan(
            self.model_runner,
            locations,
            self._window,
            req_pool_indices=batch.req_pool_indices,
            seq_lens=prefix_lens,
            seq_lens_cpu=host_lens,
        )

        log_probs, candidates = self._draft(batch, state.bonus_tokens, host_lens, total, plan)
        self._clock.mark()
        tree = self._grow(batch, log_probs, candidates, state.bonus_tokens)
        self._clock.mark()
        positions = (prefix_lens.unsqueeze(1) + tree.depths).flatten()
        outline = Outline.of(tree) if batch.has_grammar else None
        target = self._verify(batch, host_lens, total, plan, locations, tree, positions)
        if outline is not None and grammar_barrier is not None:
            # With overlap, the grammars take the tokens of the step before only now.
            grammar_barrier()
        answers = self._answers(batch, target.logits_output, tree, positions, outline)
        self._clock.mark()
        # No step commits more tokens than the shorter of the two.
        path = accept(tree, answers, min(tree.width, self._block))
        result = self._commit(batch, target, plan, path, answers, on_publish)
        self._clock.mark()
        if self._recorder.keeps_steps:
            result.ddtree_step = self._step_of(log_probs, candidates, prefix_lens, path)
        if self._limits.adaptive:
            learned = (tree.scores[:, 1:], path.nodes, path.lengths)
            self._limits.chooser.learn(*(tensor.cpu().numpy() for tensor in learned))
        for of_step, seconds in self._clock.finished((tree.width, prefix_lens.shape[0], total)):
            self._step_metrics.time(**seconds)
            self._recorder.cost(of_step, seconds)
            if self._limits.adaptive:
                self._limits.chooser.took(of_step[0], of_step[1], sum(seconds.values()))
        return result

    def _step_of(
        self, log_probs: Tensor, candidates: Tensor, prefix_lens: Tensor, path: Acceptance
    ) -> record.Step:
        """What is recorded of a step, on its way to the host; there before its result is looked at."""
        pad = (0, record.RANKS - candidates.shape[-1])
        marginals = torch.nn.functional.pad(log_probs, pad, value=-torch.inf)
        tensors = (
            torch.nn.functional.pad(candidates, pad).to(torch.int32),
            marginals,
            prefix_lens.clone(),
            path.tokens,
            path.lengths,
        )
        return record.Step(*(tensor.to("cpu", non_blocking=True) for tensor in tensors))

    def _draft(
        self, batch: Any, bonus: Tensor, host_lens: Tensor, total: int, plan: Any
    ) -> tuple[Tensor, Tensor]:
        """One pass of the draft over ``[bonus, mask, ..]``.

        Returns:
            the best tokens of each drafted position, best first: log-probabilities float32 and ids int64,
            both ``[batch, block - 1, ranks]``.
        """
        prefix_lens, block = batch.seq_lens, self._block
        size = prefix_lens.shape[0]
        ids = torch.cat([bonus.unsqueeze(1), self._masked.expand(size, -1)], 1)
        lens = (host_lens + block).to(torch.int32)
        forward = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=size,
            input_ids=ids.flatten(),
            req_pool_indices=batch.req_pool_indices,
            seq_lens=prefix_lens,
            out_cache_loc=plan.virtual_write_ids(cols=slice(0, block)),
            seq_lens_sum=total + size * block,
            seq_lens_cpu=lens,
            positions=(prefix_lens.unsqueeze(1) + self._draft_offsets).flatten(),
            input_embeds=self._embed(ids),
            spec_algorithm=SpeculativeAlgorithm.DFLASH,
            spec_info=self._draft_block_spec_info,
            capture_hidden_mode=CaptureHiddenMode.NULL,
            num_token_non_padded=(
                torch.full((), size * block, dtype=torch.int32, device=self.device)
                if self._counts_padding
                else None
            ),
            global_num_token_non_padded_cpu=size * block,
            can_run_decode_cuda_graph=batch.can_run_decode_cuda_graph,
        )
        plan.bind(forward, self.draft_model_runner.kv_index_translator, cols=slice(0, block))
        with torch.inference_mode(), draft_scope(self):
            hidden = self.draft_model_runner.forward(forward).logits_output.hidden_states
            hidden = hidden.view(size, block, -1)[:, 1:]
            return self._best_tokens(hidden)

    def _embed(self, ids: Tensor) -> Tensor:
        """Input of the draft: the target's embeddings of ``ids``, flattened to ``[tokens, hidden]``."""
        if self._full_embed_gpu is not None:
            embedding = torch.nn.functional.embedding(ids, self._full_embed_gpu)
        else:
            embedding = unwrap_lora_layer(self.model_runner.model.get_input_embeddings())(ids)
        if self._noise_embed_scale != 1.0:
            embedding = embedding * self._noise_embed_scale
        return embedding.view(-1, embedding.shape[-1])

    def _best_tokens(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Best tokens per position through the target's head, log-probabilities over the whole vocabulary."""
        head = unwrap_lora_layer(self.model_runner.model.lm_head)
        shard = getattr(head, "shard_indices", None)
        # One product for all requests: of a slice, torch makes one each, and each reads the whole head.
        rows = hidden.flatten(0, 1)
        if is_dense_head_weight(getattr(head, "weight", None)):
            count = int(shard.num_org_elements) if shard is not None else head.weight.shape[0]
            logits = rows.to(head.weight.dtype) @ head.weight[:count].T
        else:
            logits = head.quant_method.apply(head, rows, None)
            logits = logits[..., : int(getattr(head, "org_vocab_size", logits.shape[-1]))]
        logits = logits.unflatten(0, hidden.shape[:2])
        logits = logits.float()
        processor = logits_processor(self)
        if processor is not None and processor.logit_scale is not None:
            logits = logits * processor.logit_scale
        if processor is not None and processor.final_logit_softcapping:
            cap = processor.final_logit_softcapping
            logits = torch.tanh(logits / cap) * cap
        group = get_parallel().tp_group
        ranks = min(self.options.topk_cap, self.options.budget)
        if self._recorder.keeps_steps:
            ranks = min(max(ranks, record.RANKS), self.model_runner.model_config.vocab_size)
        if shard is None or int(group.world_size) == 1:
            return best_log_probs(logits, ranks)
        first = int(shard.org_vocab_start_index)
        return best_log_probs(logits, ranks, first, partial(group.all_gather, dim=-1))

    def _grow(self, batch: Any, log_probs: Tensor, candidates: Tensor, bonus: Tensor) -> RootedTree:
        """The trees of a step, each within its request's own budget and topk cap."""
        budgets, caps = self._limits.of_requests(req.sampling_params.custom_params for req in batch.reqs)
        if (wanted := self._recorder.budget()) is not None:
            budgets = [wanted] * len(budgets)
        adaptive = self._limits.adaptive and wanted is None
        budget = self.options.budget if self._one_width else max(budgets)
        if adaptive:
            budget = min(budget, self._limits.chooser.start(len(budgets), time.perf_counter()))
        ranks = max(caps)
        log_probs, candidates = log_probs[..., :ranks], candidates[..., :ranks]
        if min(caps) < log_probs.shape[-1]:
            allowed = torch.tensor(caps, device=self.device).view(-1, 1, 1)
            beyond = torch.arange(log_probs.shape[-1], device=self.device) >= allowed
            log_probs = log_probs.masked_fill(beyond, -torch.inf)
        tree = grow_tree(log_probs, candidates, budget)
        tree.tokens[:, 0] = bonus
        if self._recorder.mode == record.PROBE:
            budgets = [0] * len(budgets)
        if min(budgets) < budget:
            tree = tree.limited(torch.tensor(budgets, device=self.device))
        if adaptive:
            # The host decides, because shapes follow: without graphs, and one device (see _refuse_adaptive).
            tree = tree.first(self._limits.chooser.choose(tree.scores[:, 1:].cpu().numpy()))
        return tree

    def _verify(
        self,
        batch: Any,
        host_lens: Tensor,
        total: int,
        plan: Any,
        locations: Tensor,
        tree: RootedTree,
        positions: Tensor,
    ) -> Any:
        """One pass of the target over the tree."""
        width, size = tree.width, batch.seq_lens.shape[0]
        mask = None
        if self.options.plant != "nomask":
            mask = verify_mask(tree.paths, batch.seq_lens, total)
        verify = DFlashVerifyInput(
            draft_token=tree.tokens.flatten(),
            positions=positions,
            draft_token_num=width,
            # Announced, never left for a backend to derive from the configured width.
            num_tokens_per_req=self._block if self.options.plant == "width" else width,
            custom_mask=mask,
            capture_hidden_mode=CaptureHiddenMode.FULL,
            **planned(plan, width),
        )
        batch.out_cache_loc = locations.view(size, -1)[:, :width].flatten()
        before = batch.seq_lens_cpu, batch.seq_lens_sum
        batch.seq_lens_cpu, batch.seq_lens_sum = host_lens, total
        if before[0] is not None:
            # While the target runs the tree is part of the sequence; reserved lengths include it already.
            batch.seq_lens_cpu, batch.seq_lens_sum = host_lens + width, total + size * width
        forward, _ = verify.prepare_for_verify(batch, self.target_worker)
        batch.seq_lens_cpu, batch.seq_lens_sum = before
        result = self.target_worker.forward_batch_generation(
            batch=None, forward_batch=forward, is_verify=True, skip_attn_backend_init=True
        )
        self._graph_check.after(self.target_worker, forward, result, tree)
        return result

    def _answers(
        self, batch: Any, output: Any, tree: RootedTree, positions: Tensor, outline: Outline | None
    ) -> Tensor:
        """The target's token after each node, int64 ``[batch, width]``.

        ``outline`` is there when a request has a grammar.
        """
        width, info = tree.width, batch.sampling_info
        processor = logits_processor(self)
        if gathered_later(processor, output.next_token_logits):
            output.next_token_logits = processor.finish_deferred_gather(output.next_token_logits)
        if info is not None:
            # Not SGLang's own adjustment of a DFLASH verify: its penalties are the same for all nodes.
            if info.has_custom_logit_processor:
                apply_custom_logit_processor(output.next_token_logits, info, num_tokens_in_batch=width)
            logits = output.next_token_logits.view(len(batch.reqs), width, -1)
            self._counts.apply(logits, batch.req_pool_indices, batch.reqs, tree.tokens, tree.paths)
            if info.logit_bias is not None:
                logits += info.logit_bias.unsqueeze(1)
            if outline is not None:
                constrain(output.next_token_logits, info.vocab_size, batch.reqs, outline)
        answers = answer_nodes(output.next_token_logits, info, width, positions).view(-1, width)
        if self.options.plant == "bias":
            drafted = answers.scatter(1, tree.parents[:, 1:].flip(1), tree.tokens[:, 1:].flip(1))
            answers = torch.where(torch.rand(answers.shape, device=self.device) < 0.15, drafted, answers)
        greedy = info is None or info.is_all_greedy
        site = SpecTpSyncSite.DFLASH_ACCEPT_GREEDY if greedy else SpecTpSyncSite.DFLASH_ACCEPT_SAMPLE
        self._tp_sync.sync(site, answers)
        return answers

    def _commit(
        self, batch: Any, target: Any, plan: Any, path: Acceptance, answers: Tensor, on_publish: Any
    ) -> GenerationBatchResult:
        """Make the accepted path the sequence: its KV, the draft's KV, the tokens."""
        (size, width), stride = answers.shape, path.nodes.shape[1]
        output, prefix_lens = target.logits_output, batch.seq_lens
        rows = path.nodes
        if size > 1:
            rows = rows + torch.arange(0, size * width, width, device=self.device).unsqueeze(1)
        if batch.return_logprob:
            compute_spec_logprobs(batch, output, answers.flatten(), accept_index=rows)
        if self.options.plant != "nomove":
            # Nodes come after their ancestors, so a path moves to the front of its window. The root is there
            # already; beyond the path source and destination are the same slot.
            slots = batch.out_cache_loc.view(size, width)
            self.model_runner.token_to_kv_pool.move_kv_cache(
                slots[:, 1:stride].flatten(), batch.out_cache_loc[rows[:, 1:].flatten()]
            )
        self._counts.commit(batch.req_pool_indices, batch.reqs, path.tokens, path.lengths)
        new_lens = prefix_lens + path.lengths
        if on_publish is not None:
            on_publish(new_lens)
        # In this step: every graph size shares one output buffer, which the next target pass overwrites.
        draft_slots = plan.write_ids(self.draft_model_runner.kv_index_translator, cols=slice(0, stride))
        self._append_target_hidden_to_draft_kv_by_loc(
            target_hidden=output.hidden_states[rows.flatten()],
            cache_loc=draft_slots,
            cache_loc_2d=draft_slots.view(size, stride),
            positions=(prefix_lens.unsqueeze(1) + self._draft_offsets[:stride]).flatten(),
            commit_lens=path.lengths,
        )
        output.hidden_states = None
        return GenerationBatchResult(
            logits_output=output,
            next_token_ids=path.tokens.flatten(),
            accept_lens=path.lengths,
            can_run_cuda_graph=target.can_run_cuda_graph,
            next_draft_input=self._make_next_draft_input_decode(
                bonus_tokens=path.bonus, new_seq_lens=new_lens
            ),
            speculative_num_draft_tokens=width,
            speculative_output_stride=stride,
            new_seq_lens=new_lens,
            routed_experts_output=target.routed_experts_output,
            indexer_topk_output=target.indexer_topk_output,
        )
