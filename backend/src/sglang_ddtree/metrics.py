"""Counts of what was accepted, and the journal line that tells of them.

Only the requests of a step that were still running count: the scheduler runs ahead of its own results, and
what it throws away was never committed. So the sums over all lines equal the sums over all responses.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

logger = logging.getLogger(__name__)

STAGES = ("draft", "build", "verify", "commit")


_current: StepMetrics | None = None


def current() -> StepMetrics | None:
    """The metrics of this process, None in processes that run no steps."""
    return _current


def install(metrics: StepMetrics) -> StepMetrics:
    """Make ``metrics`` those of this process."""
    global _current
    _current = metrics
    return metrics


def tree_head(budget: int, topk_cap: int) -> str:
    """How a line of DDTREE starts."""
    return f"DDTREE metrics: budget={budget} topk={topk_cap}"


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
        self.export: Callable[[Sequence[int]], None] | None = None
        self._reset()

    def _reset(self) -> None:
        self._scheduler_steps = 0
        self._histogram = [0] * (self._longest + 1)
        self._seconds = dict.fromkeys(self._stages, 0.0)
        self._timed = 0

    def retitle(self, head: str) -> None:
        """Start the lines differently from now on; what has been added so far gets its line."""
        self.flush()
        self._head = head

    def time(self, **seconds: float) -> None:
        """Add the stage times of one scheduler step."""
        for stage, value in seconds.items():
            self._seconds[stage] += value
        self._timed += 1

    def add(self, accepted: Sequence[int]) -> None:
        """Add one scheduler step: for each request that was still running, the draft nodes it accepted."""
        for nodes in accepted:
            self._histogram[nodes] += 1
        if self.export is not None:
            self.export(accepted)
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


def prometheus(labels: Mapping[str, str], longest: int) -> Callable[[Sequence[int]], None]:
    """Counters beside SGLang's own; returns what adds a scheduler step to them.

    Args:
        labels: of every counter.
        longest: most draft nodes that a step can accept.
    """
    # Not before: it reads where to keep its files when it is imported, and SGLang sets that at start.
    from prometheus_client import Counter

    names = list(labels)
    steps = Counter("sglang:ddtree_verify_steps", "Verify steps, one a request and step.", names)
    tokens = Counter("sglang:ddtree_committed_tokens", "Committed tokens, the bonus included.", names)
    accepted = Counter(
        "sglang:ddtree_accepted_nodes_steps", "Verify steps by draft nodes accepted.", [*names, "nodes"]
    )
    all_steps, all_tokens = steps.labels(**labels), tokens.labels(**labels)
    by_nodes = [accepted.labels(**labels, nodes=str(nodes)) for nodes in range(longest + 1)]

    def add(counts: Sequence[int]) -> None:
        if counts:
            all_steps.inc(len(counts))
            all_tokens.inc(sum(counts) + len(counts))
        for nodes in counts:
            by_nodes[nodes].inc()

    return add
