"""Whether a text has begun to go round in circles."""

from __future__ import annotations

from collections.abc import Sequence


def is_periodic(tokens: Sequence[int], least: int = 24) -> bool:
    """Whether the end of ``tokens`` repeats itself.

    It does when for some period p the last max(3 p, least) tokens each equal the token p places before them
    within that span: a piece of p tokens stands there at least three times. Shorter spans than ``least``
    don't count, as spaces and brackets repeat in good text as well.
    """
    for period in range(1, len(tokens) // 3 + 1):
        span = max(3 * period, least)
        if span > len(tokens):
            return False
        tail = tokens[-span:]
        if all(tail[at] == tail[at - period] for at in range(period, span)):
            return True
    return False
