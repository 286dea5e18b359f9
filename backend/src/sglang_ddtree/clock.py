"""Times of the stages of a step, without waiting for the device."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import torch

#: On an accelerator one step in so many is timed: events cost little, but not nothing.
SAMPLE_EVERY = 16


class StageClock:
    """Splits a step into consecutive stages.

    On a CPU the host's clock is right because work is done when a call returns. On an accelerator events are
    recorded and read some steps later, when they have long passed.
    """

    def __init__(self, device: str, stages: tuple[str, ...]) -> None:
        self._stages = stages
        self._cuda = device.startswith("cuda")
        self._steps = 0
        self._marks: list[Any] | None = None
        self._pending: deque[tuple[Any, list[Any]]] = deque()

    def start(self, always: bool = False) -> None:
        """Begin a step; ``always`` times it whichever it is."""
        sampled = always or not self._cuda or self._steps % SAMPLE_EVERY == 0
        self._steps += 1
        self._marks = [self._now()] if sampled else None

    def mark(self) -> None:
        """End a stage and begin the next."""
        if self._marks is not None:
            self._marks.append(self._now())

    def finished(self, tag: Any = None) -> list[tuple[Any, dict[str, float]]]:
        """End the step; tag and stage times in seconds of all timed steps that are complete by now."""
        if self._marks is not None:
            self._pending.append((tag, self._marks))
            self._marks = None
        complete = []
        while self._pending and (not self._cuda or self._pending[0][1][-1].query()):
            tag, marks = self._pending.popleft()
            spans = zip(self._stages, marks, marks[1:], strict=False)
            complete.append((tag, {stage: self._between(begin, end) for stage, begin, end in spans}))
        return complete

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end) / 1e3 if self._cuda else end - begin)
