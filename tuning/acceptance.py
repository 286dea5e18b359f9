"""Accept length: committed tokens / verify steps, bonus included, summed before it is divided.

One definition for every source (the paper's tau). A verify step commits the draft tokens that were
accepted and one bonus token, so over any set of steps ``tokens = accepted + steps`` and
``tau = tokens / steps``.

How a response tells it: SGLang counts, for each request, ``spec_verify_ct`` steps and
``spec_num_correct_drafts`` accepted drafts, and the histogram of the latter. Its own
``spec_accept_length`` is something else, ``completion_tokens / spec_verify_ct``: that numerator has
the first token, which comes from the prefill and from no verify step, and lacks what the last step
committed past the stop or the length limit. The backend's journal line counts steps and commits as
they happen, so this module's sums over responses and over journal lines are equal, not merely close.

Without speculation every decode step commits one token: tokens = steps = completion tokens - 1 per request.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest

from tuning.journal import DdtreeLine, DecodeLine
from tuning.models import Acceptance, RequestRecord


class AcceptanceError(ValueError):
    """Counts that contradict each other."""


def from_responses(records: Iterable[RequestRecord]) -> Acceptance:
    """Sum the server's counts over the requests that succeeded.

    Raises AcceptanceError when a request's histogram contradicts its counts, or when only some
    requests were answered with speculation.
    """
    done = [record for record in records if record.ok]
    if all(record.verify_steps is None for record in done):
        steps = sum(max(0, record.completion_tokens - 1) for record in done)
        return Acceptance(tokens=steps, steps=steps, source="responses")
    tokens = steps = 0
    histogram: list[int] = []
    for record in done:
        if record.verify_steps is None or record.committed_tokens is None:
            if record.completion_tokens <= 1:
                continue  # the prefill's token was all of it: no verify step
            raise AcceptanceError(
                f"prompt {record.prompt_id}: {record.completion_tokens} tokens without a verify step, while "
                "other requests of the same service were speculated"
            )
        _check(record, record.verify_steps, record.committed_tokens)
        steps += record.verify_steps
        tokens += record.committed_tokens
        histogram = _add(histogram, record.histogram)
    return Acceptance(tokens=tokens, steps=steps, histogram=histogram, source="responses")


def _check(record: RequestRecord, steps: int, committed: int) -> None:
    if not record.histogram:
        return
    counted = sum(record.histogram)
    accepted = sum(drafts * count for drafts, count in enumerate(record.histogram))
    if counted != steps or accepted + counted != committed:
        raise AcceptanceError(
            f"prompt {record.prompt_id}: the server's histogram holds {counted} steps and {accepted} "
            f"accepted drafts, its counts say {steps} steps and {committed - steps}"
        )


def from_journal(
    metrics: Sequence[DdtreeLine], decode: Sequence[DecodeLine], interval: int
) -> Acceptance | None:
    """Sum the journal's lines of a window; None when it has none.

    The backend's metrics lines are exact. Without them (another backend) the ``Decode batch`` lines
    are used: each stands for ``interval`` scheduler steps of its batch, its mean is rounded to two
    decimals, and a window that isn't full is never printed, so the end of a run is missing: compare
    ``steps`` with the responses' before trusting it.
    """
    if metrics:
        histogram: list[int] = []
        for line in metrics:
            histogram = _add(histogram, line.histogram)
        return Acceptance(
            tokens=sum(line.tokens for line in metrics),
            steps=sum(line.steps for line in metrics),
            histogram=histogram,
            source="journal-metrics",
        )
    if not decode:
        return None
    windows = [(interval * line.running, line.accept_len) for line in decode]
    steps = sum(count for count, _ in windows)
    # Rounded line by line: below 100 request-steps two decimals still tell the whole number of tokens.
    tokens = sum(round(count * (1.0 if mean is None else mean)) for count, mean in windows)
    return Acceptance(tokens=tokens, steps=steps, source="journal-decode")


def agreement(reference: Acceptance, other: Acceptance) -> float | None:
    """|other - reference| / reference of the accept lengths; None when either had no step."""
    if not reference.tau or other.tau is None:
        return None
    return abs(other.tau - reference.tau) / reference.tau


def by_category(records: Iterable[RequestRecord]) -> dict[str, Acceptance]:
    """``from_responses`` for each category of prompts, in order of first appearance."""
    groups: dict[str, list[RequestRecord]] = {}
    for record in records:
        groups.setdefault(record.category, []).append(record)
    return {category: from_responses(group) for category, group in groups.items()}


def _add(left: Sequence[int], right: Sequence[int]) -> list[int]:
    return [a + b for a, b in zip_longest(left, right, fillvalue=0)]
