"""Where the tested releases of SGLang differ, and nothing else."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from importlib.util import find_spec
from typing import Any

from torch import Tensor

logger = logging.getLogger(__name__)

#: What can be changed while a server runs: by its key, why a value is refused (or None), and what sets it.
Switches = Mapping[str, tuple[Callable[[Any], str | None], Callable[[Any], None]]]


def draft_scope(worker: Any) -> AbstractContextManager[Any]:
    """The draft's own place among the ranks, to run it in; told by its layout, before 0.5.23 by a flag."""
    from sglang.srt.speculative.spec_utils import draft_tp_context

    # Of the worker itself: what it lacks it looks for in the target's.
    own = vars(worker)
    scope: AbstractContextManager[Any]
    if "draft_parallel_layout" in own:
        scope = draft_tp_context(own["draft_parallel_layout"])
    elif "draft_tp_context" in own:  # before 0.5.22
        group = worker.draft_model_runner.tp_group
        scope = own["draft_tp_context"](group, owns_attention=own["draft_owns_attention"])
    else:
        scope = draft_tp_context(own["draft_owns_attention"])
    return scope


class _Window:
    """A step's KV slots before 0.5.22, which has no plan: the pools are written where the allocator said."""

    def __init__(self, slots: Tensor) -> None:
        self._slots = slots

    def virtual_write_ids(self, cols: slice) -> Tensor:
        return self._slots[:, cols].flatten()

    def write_ids(self, translator: Any, cols: slice) -> Tensor:
        return self.virtual_write_ids(cols)

    def bind(self, forward: Any, translator: Any, cols: slice) -> None:
        """Nothing to do: the batch has its slots already."""


def window_plan(runner: Any, locations: Tensor, width: int, **arguments: Any) -> Any:
    """A step's plan of its KV slots.

    Args:
        runner: the target's.
        locations: int64 ``[batch * width]``, the slots.
        width: slots of a request.
        arguments: of SGLang's own plan.
    """
    translator = runner.kv_index_translator
    if not hasattr(translator, "plan"):
        return _Window(locations.view(-1, width))
    return translator.plan(write_virtual=locations, read_extent=width, **arguments)


def planned(plan: Any, width: int) -> dict[str, Any]:
    """Arguments of a verify that writes the first ``width`` slots of each request in a plan."""
    return {} if isinstance(plan, _Window) else {"kv_loc_plan": plan, "kv_loc_cols": slice(0, width)}


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


def state_hooks(
    switches: Callable[[], Switches], show: Callable[[dict[str, Any]], None]
) -> dict[str, Callable[..., Any]]:
    """Hooks around what answers ``/set_internal_state`` and ``/server_info``, by their targets.

    Args:
        switches: what can be changed.
        show: adds to the state that is shown.
    """
    module = "sglang.srt.managers.scheduler_components.internal_state"
    if find_spec(module) is None:  # before 0.5.22
        return _scheduler_hooks(switches, show)

    def add_handlers(original: Callable[..., dict[str, Any]], controller: Any) -> dict[str, Any]:
        from sglang.srt.managers.scheduler_components.internal_state import UpdateRejected, _UpdateHandler

        known = switches()

        def validate(key: str, value: Any) -> None:
            if (refusal := known[key][0](value)) is not None:
                raise UpdateRejected(refusal)

        def apply(key: str, value: Any) -> dict[str, Any]:
            known[key][1](value)
            return {}

        return original(controller) | {key: _UpdateHandler(validate, apply) for key in known}

    def add_state(original: Callable[..., None], controller: Any, state: dict[str, Any]) -> None:
        original(controller, state)
        show(state)

    controller = f"{module}.SchedulerInternalStateController"
    return {f"{controller}._update_handlers": add_handlers, f"{controller}._add_speculative": add_state}


def _scheduler_hooks(
    switches: Callable[[], Switches], show: Callable[[dict[str, Any]], None]
) -> dict[str, Callable[..., Any]]:
    """The same where the scheduler itself answers and has no place for more keys."""

    def set_state(original: Callable[..., Any], scheduler: Any, request: Any) -> Any:
        from sglang.srt.managers.io_struct import SetInternalStateReq, SetInternalStateReqOutput

        known, asked = switches(), request.server_args
        ours = {key: value for key, value in asked.items() if key in known}
        if not ours:
            return original(scheduler, request)
        others = {key: value for key, value in asked.items() if key not in known}
        refusals = [reason for key, value in ours.items() if (reason := known[key][0](value)) is not None]
        for reason in refusals:
            logger.warning("%s", reason)
        updated = not refusals
        if updated and others:
            updated = original(scheduler, SetInternalStateReq(server_args=others)).updated
        if not updated:
            return SetInternalStateReqOutput(updated=False)
        for key, value in ours.items():
            known[key][1](value)
        return SetInternalStateReqOutput(updated=True)

    def get_state(original: Callable[..., Any], scheduler: Any, request: Any) -> Any:
        answer = original(scheduler, request)
        show(answer.internal_state)
        return answer

    scheduler = "sglang.srt.managers.scheduler.Scheduler"
    return {f"{scheduler}.set_internal_state": set_state, f"{scheduler}.get_internal_state": get_state}
