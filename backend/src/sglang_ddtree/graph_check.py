"""A verify that a CUDA graph replayed, against the same verify without the graph.

A graph captured without the tree's mask would verify causally: fluent text that is not the target's, and
nothing in the log. ``hooks.py`` keeps that from happening; here it is looked at. The first branching verify
of a single request is run both ways. That is normally SGLang's warm-up request, which comes before the server
says it is ready: one whose graphs are wrong does not get there.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from sglang_ddtree.tree import RootedTree, ancestor_mask

logger = logging.getLogger(__name__)

#: Set to 0 to serve without the check.
CHECK_ENV = "SGLANG_DDTREE_GRAPH_CHECK"
#: Most that the logits of half of the nodes with something to hide from may differ, relative to their spread.
#: With the demo pair a causal verify differs by 0.1 to 0.4, rounding all logits to bfloat16 by 0.002. Half of
#: them, because an expert that is chosen differently changes single nodes.
_TOLERANCE = 0.03
#: Verifies that are looked at; to see whether a tree branches, the host waits for the device.
_LOOKS = 16


class GraphCheck:
    """One comparison for each server."""

    def __init__(self, model_runner: Any, environ: Any = os.environ) -> None:
        self._runner = model_runner
        self.looks = 0 if environ.get(CHECK_ENV) == "0" else _LOOKS

    def after(self, target_worker: Any, forward: Any, result: Any, tree: RootedTree) -> None:
        """Compare, if that is due and says anything: one request, run by a graph, whose tree branches.

        Args:
            target_worker: SGLang's worker of the target.
            forward: the batch that was run.
            result: what came of it; left as it is.
            tree: what was verified.

        Raises:
            RuntimeError: the graph computes something else.
        """
        # One request: on all ranks alike, and with little memory.
        if not (self.looks and result.can_run_cuda_graph and len(tree.tokens) == 1):
            return
        self.looks -= 1
        telling = hiding(tree).flatten()
        if not telling.any():
            return
        self.looks = 0
        try:
            # Indexing copies: the graph's buffer may be written again.
            replayed = result.logits_output.next_token_logits[telling]
            with self._without_graph():
                self._runner.attn_backend.init_forward_metadata(forward)
                again = target_worker.forward_batch_generation(
                    batch=None, forward_batch=forward, is_verify=True, skip_attn_backend_init=True
                )
            found = difference(replayed, again.logits_output.next_token_logits[telling])
        except Exception:  # whatever it is, it is not the graph's
            logger.warning("DDTREE: the verify could not be run without its CUDA graph", exc_info=True)
            return
        if not found <= _TOLERANCE:
            raise RuntimeError(
                f"DDTREE: a verify of {tree.width} nodes in a CUDA graph is not what it is without: logits "
                f"differ by {found:.2f} of their spread, expected at most {_TOLERANCE}. Serve with "
                f"--disable-cuda-graph, or with {CHECK_ENV}=0 to serve all the same"
            )
        logger.info("DDTREE: a verify in a CUDA graph equals one without (difference %.4f)", found)

    @contextmanager
    def _without_graph(self) -> Iterator[None]:
        kept = self._runner.decode_cuda_graph_runner
        self._runner.decode_cuda_graph_runner = None
        try:
            yield
        finally:
            self._runner.decode_cuda_graph_runner = kept


def difference(logits: Tensor, reference: Tensor) -> float:
    """Median over nodes of the distance between two rows of logits, relative to the reference's spread.

    Args:
        logits: ``[nodes, vocab]``.
        reference: of the same shape.
    """
    # A constant added to a row changes no probability.
    first, second = (rows.float() - rows.float().mean(-1, keepdim=True) for rows in (logits, reference))
    relative = (first - second).norm(dim=-1) / second.norm(dim=-1).clamp_min(1e-9)
    return float(relative.median())


def hiding(tree: RootedTree) -> Tensor:
    """Nodes in use that must not see all that come before them, bool ``[batch, nodes]``."""
    seen = ancestor_mask(tree.paths).sum(-1)
    before = torch.arange(1, tree.width + 1, device=seen.device)
    return (seen < before) & (tree.scores > -torch.inf)
