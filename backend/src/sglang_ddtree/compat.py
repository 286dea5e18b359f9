"""Where the tested releases of SGLang differ, and nothing else."""

from __future__ import annotations

from typing import Any


def draft_placement(worker: Any) -> Any:
    """What ``draft_tp_context`` takes: the draft's layout, before 0.5.23 whether it owns its attention."""
    layout = vars(worker).get("draft_parallel_layout")
    return vars(worker)["draft_owns_attention"] if layout is None else layout


def logits_processor(worker: Any) -> Any:
    """The target's logits processor, for its scale and cap; before 0.5.23 the worker does not keep it."""
    kept = vars(worker).get("_target_logits_processor")
    return kept if kept is not None else getattr(worker.model_runner.model, "logits_processor", None)


def gathered_later(processor: Any, logits: Any) -> bool:
    """Whether a verify's logits are a part that is still to be gathered, as 0.5.23 can leave them."""
    deferred = getattr(processor, "is_deferred_shard", None)
    return deferred is not None and bool(deferred(logits))


def logprob_settings(req: Any) -> Any:
    """What holds a request's ``top_logprobs_num``; before 0.5.23 the request itself."""
    return getattr(req, "logprob", req)
