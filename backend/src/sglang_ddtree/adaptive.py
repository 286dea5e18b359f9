"""How many nodes are worth verifying, step by step.

A node of the tree is worth what it adds to the expected accept length: the probability of its path (Ringel
and Romano, arXiv 2604.12989, Proposition 1). It costs what it adds to the time of the step, in which the
server would otherwise commit tokens at its present rate. So a tree grows while

    probability of the node, over all requests  >  tokens per second * seconds that one more node takes

which is the best that can be done for tokens over time (Dinkelbach's rule for a ratio of sums; the stopping
rule is that of CaDDTree, arXiv 2606.01813). All three figures are learned while serving: the draft's
probabilities are corrected by how often such nodes were accepted, the time of a step is fitted by a line over
its nodes and by how far each width is off that line, and the rate is what was committed lately. Imports NumPy
only.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

#: What a step still counts for after one more, in the fit of times and in the rate: about 200 steps.
_KEEP = 0.995
#: The same for the draft's probabilities, which change slowly and are rare at the lower end.
_KEEP_PROBABILITIES = 0.999
#: The draft is believed as much as this many expected acceptances say.
_PRIOR = 2.0
#: Nodes are told apart by their place and by the power of two of their probability, down to 1/16.
_BINS, _PER_POWER = 5, -1 / float(np.log(2))
#: The first steps try all widths; later one in so many tries half or twice what pays, so that the line never
#: rests on one width.
_FIRST, _EVERY = 12, 32
#: Tokens that another budget than the last must be worth more.
_MARGIN = 0.05
#: How far a width is off the line is believed half after so many of its steps.
_OFF_LINE = 4.0
#: Steps that are looked at together.
_TOGETHER = 16
#: A step that took this many times what was expected was disturbed, and counts as that long.
_DISTURBED = 2.0
#: Trees are built for at least this many nodes, and so many times what paid lately; that fades in ten steps.
_LEAST, _ROOM, _RECENT = 8, 1.5, 0.95

Array: TypeAlias = "np.ndarray[Any, Any]"


class _StepTime:
    """Seconds of a step as a line over the nodes it verifies, and the rate of tokens; older steps fade."""

    def __init__(self) -> None:
        self._sums: tuple[float, ...] = (0.0,) * 5  # weight, x, y, xx, xy
        self._first: dict[int, list[float]] = {}
        #: By nodes: how many steps, fading as of the step they were counted in, and their mean off the line.
        self._off_line: dict[int, tuple[float, float, int]] = {}
        self._added = self._steps = 0
        self._tokens = self._token_steps = 0.0
        self._period = self._periods = 0.0
        self.recent = 0.0
        """Largest budget that paid lately; it fades."""
        self.last = 0
        """Budget of the last step that was to pay."""

    def add(self, nodes: int, seconds: float) -> None:
        if not self._sums[0]:
            # The first time of a width has its set-up in it: the least of the first few is believed.
            self._first.setdefault(nodes, []).append(seconds)
            if sum(map(len, self._first.values())) >= _FIRST:
                for width, times in self._first.items():
                    self._learn(1.0, len(times), width, min(times))
                for width, times in self._first.items():
                    self._see(len(times), width, min(times))
            return
        mean = self._sums[2] / self._sums[0]
        seconds = min(seconds, _DISTURBED * max(self.predict(nodes) or mean, mean / 2))
        self._learn(_KEEP, 1, nodes, seconds)
        self._added += 1
        self._see(1, nodes, seconds)

    def _see(self, times: int, nodes: int, seconds: float) -> None:
        """Keep how far steps of a width were off the line."""
        if (line := self._line()) is None:
            return
        count, off = self._off(nodes)
        total = count + times
        off += (seconds - line[0] - line[1] * nodes - off) * times / total
        self._off_line[nodes] = total, off, self._added

    def _learn(self, keep: float, times: int, x: int, y: float) -> None:
        # Plain numbers: an array's operations would each cost as much as all of this.
        sample = (1.0, x, y, x * x, x * y)
        self._sums = tuple(keep * old + times * new for old, new in zip(self._sums, sample, strict=True))

    def committed(self, tokens: int) -> None:
        self._tokens = self._tokens * _KEEP + tokens
        self._token_steps = self._token_steps * _KEEP + 1

    def period(self, seconds: float) -> None:
        """Time from the start of a step to the start of the next, which is more than its stages."""
        if self._sums[0] and seconds < _DISTURBED * self._sums[2] / self._sums[0]:
            self._period = self._period * _KEEP + seconds
            self._periods = self._periods * _KEEP + 1

    def predict(self, nodes: int) -> float | None:
        """Seconds of a step; None before anything is known."""
        predicted = self.predict_all([nodes])
        return None if predicted is None else predicted[0]

    def predict_all(self, widths: list[int]) -> list[float] | None:
        """Seconds of steps with so many nodes each; None before two widths were seen."""
        if (line := self._line()) is None:
            return None
        start, slope = line
        predicted = []
        for nodes in widths:
            count, off = self._off(nodes)
            predicted.append(max(start + slope * nodes + off * count / (count + _OFF_LINE), 1e-9))
        return predicted

    def _line(self) -> tuple[float, float] | None:
        """Seconds of a step without nodes, and of one more node; None before two widths were seen."""
        weight, x, y, xx, xy = self._sums
        spread = weight * xx - x * x
        if spread <= 1e-6 * max(x * x, 1.0):
            return None
        slope = max(0.0, (weight * xy - x * y) / spread)
        return (y - slope * x) / weight, slope

    def _off(self, nodes: int) -> tuple[float, float]:
        """How many steps of this width count, and how far they were off the line."""
        count, off, added = self._off_line.get(nodes, (0.0, 0.0, 0))
        return count * _KEEP ** (self._added - added), off

    def rate(self) -> float | None:
        """Committed tokens per second; None before anything is known."""
        if not self._token_steps or not self._sums[0]:
            return None
        seconds = self._period / self._periods if self._periods else self._sums[2] / self._sums[0]
        return self._tokens / self._token_steps / max(seconds, 1e-9)

    def tries(self, most: int) -> int | None:
        """Count a step; the budget that it is to try, None: the one that pays."""
        self._steps += 1
        if self._steps <= _FIRST:
            part = self._steps % 4
            return max(1, (most >> part) - 1) if part else most
        if self._steps % _EVERY:
            return None
        if self._steps // _EVERY % 2:
            return 2 * max(int(self.recent), _LEAST // 2)
        return max(1, int(self.recent / 2))


class AdaptiveBudget:
    """Chooses the budget of a step. One for a server; batches of similar size share a line of times."""

    def __init__(self, most: int) -> None:
        """Start with no knowledge, for budgets up to ``most``."""
        #: Few, about a third apart: a width that is new to a device costs it more than it can save.
        self._budgets = np.array(_ladder(most))
        self._most = most
        self._times: dict[int, _StepTime] = {}
        self._bins = _BINS * np.searchsorted(self._budgets, np.arange(1, most + 1))
        self._expected = np.zeros(_BINS * len(self._budgets))
        self._accepted = np.zeros(_BINS * len(self._budgets))
        self._unlearned: list[tuple[Array, Array, Array]] = []
        self._believed = np.ones(_BINS * len(self._budgets))
        self._started: tuple[int, float] | None = None
        self._tried: int | None = None
        self._choosing = False
        self._chosen = self._choices = 0.0

    def start(self, batch: int, now: float) -> int:
        """Begin a step.

        Args:
            batch: its requests.
            now: a clock in seconds.

        Returns:
            how many nodes are enough for :meth:`choose`: some more than were needed lately.
        """
        times = self._of(batch)
        if self._started is not None and self._started[0] == batch:
            times.period(now - self._started[1])
        self._started = batch, now
        self._tried = times.tries(self._most)
        wanted = self._tried or max(_LEAST, int(_ROOM * times.recent))
        # Of the few budgets there are, as what a shape needs is worked out once for each.
        return int(self._budgets[min(self._budgets.searchsorted(wanted), len(self._budgets) - 1)])

    def choose(self, log_probs: Array) -> int:
        """The budget of the step that was begun.

        Args:
            log_probs: float ``[batch, budget]`` of the nodes in pop order; -inf for those a request has not.

        Returns:
            at least 1, at most the nodes given.
        """
        self._choosing = True
        batch, budget = map(int, log_probs.shape)
        times = self._of(batch)
        budgets = self._budgets[: self._budgets.searchsorted(budget, side="right")]
        rate, took = times.rate(), times.predict_all([(nodes + 1) * batch for nodes in budgets.tolist()])
        if self._tried is None and took is not None and rate is not None:
            likely = self.probabilities(log_probs)
            gains = (likely[0] if batch == 1 else likely.sum(0)).cumsum()
            worth = gains[budgets - 1] - rate * np.array(took)
            best = int(worth.argmax())
            last = min(int(budgets.searchsorted(times.last or budgets[best])), len(budgets) - 1)
            # A change has a price of its own, and near the optimum all budgets are alike.
            budget = int(budgets[best if worth[best] - worth[last] > _MARGIN else last])
            times.last = budget
            times.recent = max(budget, _RECENT * times.recent)
        self._chosen = self._chosen * _KEEP + budget
        self._choices = self._choices * _KEEP + 1
        return budget

    def probabilities(self, log_probs: Array) -> Array:
        """How likely nodes are to be accepted: the draft's probability, corrected by what became of such."""
        return np.exp(log_probs) * self._believed[self._bin(log_probs)]

    def took(self, width: int, batch: int, seconds: float) -> None:
        """Learn the time of a step that verified ``width`` nodes of each request."""
        self._of(batch).add(width * batch, seconds)

    def learn(self, log_probs: Array, nodes: Array, lengths: Array) -> None:
        """Learn what became of the nodes of a step whose budget was chosen; of others it is no sign.

        Args:
            log_probs: float ``[batch, budget]``, as verified.
            nodes: int ``[batch, width]``: node at each depth of the path, the root is node 0.
            lengths: int ``[batch]``: committed tokens, nodes of the path with the root.
        """
        if not self._choosing:
            return
        self._choosing = False
        self._of(len(lengths)).committed(int(lengths.sum()))
        self._unlearned.append((log_probs, nodes, lengths))
        # Together: alone, right after a model's pass, each would be a row of cache misses.
        if len(self._unlearned) < _TOGETHER:
            return
        for scores, path, counts in self._unlearned:
            hit = np.zeros(scores.shape)
            for row, length in enumerate(counts.tolist()):
                hit[row, path[row, 1:length] - 1] = 1.0
            index = self._bin(scores).ravel()
            for sums, what in ((self._expected, np.exp(scores)), (self._accepted, hit)):
                sums *= _KEEP_PROBABILITIES
                sums += np.bincount(index, what.ravel(), len(sums))
        self._unlearned.clear()
        self._believed = (self._accepted + _PRIOR) / (self._expected + _PRIOR)

    @property
    def mean(self) -> float:
        """Mean budget of the last steps, 0 before the first."""
        return self._chosen / self._choices if self._choices else 0.0

    def _bin(self, log_probs: Array) -> Array:
        powers: Array = np.minimum(log_probs * _PER_POWER, _BINS - 1).astype(np.int64)
        return powers + self._bins[: log_probs.shape[1]]

    def _of(self, batch: int) -> _StepTime:
        return self._times.setdefault(batch.bit_length(), _StepTime())


def _ladder(most: int) -> list[int]:
    """1, 2, 3, 5, 7, 11, 15, 23, .. and ``most``: with the root 2, 3, 4, 6, 8, 12, 16, 24, .. rows.

    Matrix kernels work on eight or sixteen rows at a time, so that one row more can cost as much as many.
    """
    widths = {part * 2**power for power in range(most.bit_length() + 1) for part in (2, 3)}
    return sorted({most, *(width - 1 for width in widths if width <= most)})
