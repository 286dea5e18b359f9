"""Counts of what was accepted, and the journal line that tells of them.

Only the requests of a step that were still running count: the scheduler runs ahead of its own results, and
what it throws away was never committed. So the sums over all lines equal the sums over all responses.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

logger = logging.getLogger(__name__)

STAGES = ("draft", "build", "verify")


_current: StepMetrics | None = None


def current() -> StepMetrics | None:
    """The metrics of this process, None in processes that run no steps."""
    return _current


def install(metrics: StepMetrics) -> StepMetrics:
    """Make ``metrics`` those of this process."""
    global _current
    _current = metrics
    return metrics


class StepMetrics:
    """Accumulates steps until the next line. Held by the worker, fed by the scheduler's result processing."""

    def __init__(
        self, head: str, longest: int, interval: int, enabled: bool = True, stages: Sequence[str] = STAGES
    ) -> None:
        """Set up empty counts.

        Args:
            head: how the line starts: the algorithm, and its values if it has any.
            longest: most draft nodes that a step can accept.
            interval: a line every so many scheduler steps.
            enabled: False on ranks that do not report.
            stages: of a step that :meth:`time` is told of.
        """
        self._head = head
        self._stages = stages
        self._longest = longest
        self._interval = interval
        self._enabled = enabled
        self._reset()

    def _reset(self) -> None:
        self._scheduler_steps = 0
        self._histogram = [0] * (self._longest + 1)
        self._seconds = dict.fromkeys(self._stages, 0.0)
        self._timed = 0

    def time(self, **seconds: float) -> None:
        """Add the stage times of one scheduler step."""
        for stage, value in seconds.items():
            self._seconds[stage] += value
        self._timed += 1

    def add(self, accepted: Sequence[int]) -> None:
        """Add one scheduler step: for each request that was still running, the draft nodes it accepted."""
        for nodes in accepted:
            self._histogram[nodes] += 1
        self._scheduler_steps += 1
        if self._scheduler_steps >= self._interval:
            self.flush()

    def flush(self) -> None:
        """Write the line for what has been added since the last one, if anything was."""
        if not any(self._histogram):
            return
        if self._enabled:
            logger.info("%s", self.line())
        self._reset()

    def line(self) -> str:
        """The journal line for the counts so far."""
        steps = sum(self._histogram)
        tokens = sum(count * (nodes + 1) for nodes, count in enumerate(self._histogram))
        histogram = ",".join(map(str, self._histogram))
        timed = max(1, self._timed)
        stages = "".join(f" {stage}_ms={self._seconds[stage] / timed * 1e3:.3f}" for stage in self._stages)
        return (
            f"{self._head} steps={steps} tokens={tokens} "
            f"avg_commit_len={tokens / steps:.2f} hist={histogram}{stages}"
        )
