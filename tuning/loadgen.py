"""The load: streamed requests at a fixed concurrency, timed here and counted by the server.

The native ``/generate`` is used and not the chat endpoint, as it alone returns output ids, exact
verify steps with their histogram, and cached tokens. A chat prompt goes through the server's own
template first (``/v1/tokenize`` with ``messages``), so the model sees the same tokens as behind
``/v1/chat/completions``; a model without a template gets the plain text. Each request carries an
``extra_key`` of its own, which keeps it out of every other request's prefix cache: the prompts stay
the same in every row and pass, and still nothing is cached.

Definitions: time to first token is from sending the request to the first chunk with a token.
Inter-token latency is the time from that chunk to the last one, divided by the tokens the server
generated in between (a chunk of a speculating engine holds several, so chunks are never counted,
and a first chunk with several tokens takes them out of the divisor). The level's tok/s is all
completion tokens over the level's wall clock.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import aiohttp
import requests

from tuning import acceptance
from tuning.models import Level, Percentiles, RequestRecord
from tuning.prompts import Prompt

PromptMode = Literal["auto", "chat", "raw"]


class LoadError(RuntimeError):
    """The service can't be loaded at all (not a single request's failure)."""


@dataclass(frozen=True)
class Ask:
    """One prompt as the engine gets it."""

    id: str
    category: str
    input_ids: tuple[int, ...]


@dataclass(frozen=True)
class Target:
    """Where and how to ask. ``incremental`` is the server's ``--incremental-streaming-output``."""

    base_url: str
    api_key: str | None = None
    incremental: bool = False
    request_timeout_s: float = 600.0
    stall_timeout_s: float = 120.0

    def headers(self) -> dict[str, str]:
        """HTTP headers of every request."""
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}


@dataclass(frozen=True)
class Sampling:
    """What is asked of every request. Greedy, so that rows can be compared token by token."""

    max_tokens: int
    ignore_eos: bool = True

    def parameters(self) -> dict[str, Any]:
        """SGLang's ``sampling_params``."""
        return {"max_new_tokens": self.max_tokens, "temperature": 0, "ignore_eos": self.ignore_eos}


def prepare(
    target: Target, prompts: Sequence[Prompt], mode: PromptMode = "auto"
) -> tuple[list[Ask], Literal["chat", "raw"]]:
    """Let the server tokenise the prompts, through its chat template if it has one.

    ``auto`` takes the template when the server can apply it to the first prompt. Returns the asks and
    the mode that was used. Raises LoadError.
    """
    used: Literal["chat", "raw"] = "raw" if mode == "raw" else "chat"
    if mode == "auto" and isinstance(_tokenize(target, prompts[0].text, "chat"), str):
        used = "raw"
    asks = []
    for prompt in prompts:
        ids = _tokenize(target, prompt.text, used)
        if isinstance(ids, str):
            raise LoadError(f"prompt {prompt.id} can't be tokenised as {used}: {ids}")
        asks.append(Ask(prompt.id, prompt.category, ids))
    return asks, used


def _tokenize(target: Target, text: str, mode: Literal["chat", "raw"]) -> tuple[int, ...] | str:
    """The token ids, or what the server said instead."""
    body: dict[str, Any] = (
        {"messages": [{"role": "user", "content": text}]} if mode == "chat" else {"prompt": text}
    )
    try:
        answer = requests.post(
            f"{target.base_url}/v1/tokenize", json=body, headers=target.headers(), timeout=60
        )
    except requests.RequestException as error:
        raise LoadError(f"{target.base_url}/v1/tokenize: {type(error).__name__}: {error}") from error
    if answer.status_code != 200:
        return f"HTTP {answer.status_code}: {answer.text[:200]}"
    try:
        ids = answer.json()["tokens"]
    except (ValueError, KeyError, TypeError):
        return f"no token list in {answer.text[:200]!r}"
    if not isinstance(ids, list) or not ids or not all(isinstance(one, int) for one in ids):
        return f"no token list in {answer.text[:200]!r}"
    return tuple(ids)


async def run_level(
    target: Target, asks: Sequence[Ask], concurrency: int, sampling: Sampling, repeats: int | None = None
) -> Level:
    """Send every ask ``repeats`` times, at most ``concurrency`` in flight; never raises for a request.

    By default each is repeated often enough to keep ``concurrency`` busy for two rounds. A request that
    fails is a record with its error. Cancelling this coroutine closes its connections.
    """
    if concurrency < 1 or not asks:
        raise ValueError(f"concurrency {concurrency} with {len(asks)} prompts: expected at least one of each")
    times = repeats if repeats is not None else max(1, math.ceil(2 * concurrency / len(asks)))
    queue = [ask for _ in range(times) for ask in asks]
    waiting = iter(enumerate(queue))
    records: dict[int, RequestRecord] = {}
    pass_key = uuid.uuid4().hex
    connector = aiohttp.TCPConnector(limit=concurrency)
    timeout = aiohttp.ClientTimeout(total=target.request_timeout_s, sock_read=target.stall_timeout_s)
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, headers=target.headers(), raise_for_status=False
    ) as session:

        async def worker() -> None:
            for number, ask in waiting:
                records[number] = await _request(session, target, ask, sampling, f"{pass_key}-{number}")

        began = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(min(concurrency, len(queue))):
                group.create_task(worker())
        wall = time.perf_counter() - began
    return summarise([records[number] for number in sorted(records)], concurrency, wall)


def summarise(records: Sequence[RequestRecord], concurrency: int, wall_s: float) -> Level:
    """The level's figures from its requests; failed requests count only as failed."""
    done = [record for record in records if record.ok]
    tokens = sum(record.completion_tokens for record in done)
    return Level(
        concurrency=concurrency,
        requests=len(records),
        failed=len(records) - len(done),
        wall_s=wall_s,
        prompt_tokens=sum(record.prompt_tokens for record in done),
        completion_tokens=tokens,
        cached_tokens=sum(record.cached_tokens for record in done),
        tok_s=tokens / wall_s if wall_s > 0 else 0.0,
        request_tok_s=percentiles([r.completion_tokens / r.e2e_s for r in done if r.e2e_s > 0]),
        ttft_ms=percentiles([r.ttft_s * 1e3 for r in done if r.ttft_s is not None]),
        itl_ms=percentiles([r.itl_s * 1e3 for r in done if r.itl_s is not None]),
        e2e_ms=percentiles([r.e2e_s * 1e3 for r in done]),
        acceptance=acceptance.from_responses(done) if done else None,
        records=list(records),
    )


def percentiles(values: Sequence[float]) -> Percentiles | None:
    """Order statistics by linear interpolation between closest ranks; None for no values."""
    if not values:
        return None
    ordered = sorted(values)

    def at(share: float) -> float:
        place = share * (len(ordered) - 1)
        low = math.floor(place)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (ordered[high] - ordered[low]) * (place - low)

    return Percentiles(
        p50=at(0.50),
        p95=at(0.95),
        p99=at(0.99),
        mean=sum(ordered) / len(ordered),
        min=ordered[0],
        max=ordered[-1],
    )


class _BadAnswer(Exception):
    """The server answered with something that isn't a generation."""


@dataclass
class _Progress:
    """What of a stream has been seen so far. Times are of ``perf_counter``."""

    first_at: float | None = None
    first_tokens: int = 0
    last_at: float = 0.0
    last: bytes = b""
    chunks: int = 0


async def _request(
    session: aiohttp.ClientSession, target: Target, ask: Ask, sampling: Sampling, key: str
) -> RequestRecord:
    body = {
        "input_ids": list(ask.input_ids),
        "sampling_params": sampling.parameters(),
        "stream": True,
        "extra_key": key,
    }
    seen = _Progress()
    began = time.perf_counter()
    try:
        async with session.post(f"{target.base_url}/generate", json=body) as answer:
            if answer.status != 200:
                raise _BadAnswer(f"HTTP {answer.status}: {(await answer.text())[:200]}")
            pieces = await _consume(answer, seen, keep=target.incremental)
        final = _final(seen.last, pieces)
        return _record(ask, seen, final, began, time.perf_counter())
    except TimeoutError:
        error = (
            f"no answer within {target.request_timeout_s:.0f} s, or none for {target.stall_timeout_s:.0f} s, "
            f"after {seen.chunks} chunks"
        )
    except _BadAnswer as bad:
        error = str(bad)
    except aiohttp.ClientError as lost:
        error = f"connection lost after {seen.chunks} chunks: {type(lost).__name__}: {str(lost)[:150]}"
    except (TypeError, ValueError) as odd:
        error = f"the answer's counts make no sense: {str(odd)[:150]}"
    return RequestRecord(
        prompt_id=ask.id, category=ask.category, ok=False, error=error, e2e_s=time.perf_counter() - began
    )


async def _events(answer: aiohttp.ClientResponse) -> AsyncIterator[tuple[bytes, float]]:
    """The stream's ``data:`` payloads, each with the time its last byte arrived."""
    rest = b""
    async for piece in answer.content.iter_any():
        now = time.perf_counter()
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip(), now


async def _consume(answer: aiohttp.ClientResponse, seen: _Progress, keep: bool) -> list[bytes]:
    """Read the stream to ``[DONE]``; only its first chunks are parsed here, so that reading costs little."""
    pieces: list[bytes] = []
    async for data, now in _events(answer):
        if data == b"[DONE]":
            return pieces
        seen.chunks += 1
        if seen.first_at is None:
            tokens = _meta(_parse(data)).get("completion_tokens", 0)
            if isinstance(tokens, int) and tokens > 0:
                seen.first_at, seen.first_tokens = now, tokens
        seen.last, seen.last_at = data, now
        if keep:
            pieces.append(data)
    raise _BadAnswer(f"the stream ended without [DONE] after {seen.chunks} chunks")


def _parse(data: bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(data)
    except ValueError as error:
        raise _BadAnswer(f"a chunk isn't JSON: {data[:120]!r}") from error
    if not isinstance(parsed, dict):
        raise _BadAnswer(f"a chunk is no JSON object: {data[:120]!r}")
    if "error" in parsed or parsed.get("object") == "error":
        raise _BadAnswer(f"the server answered with an error: {data[:200].decode(errors='replace')}")
    return parsed


def _meta(parsed: Mapping[str, Any]) -> dict[str, Any]:
    meta = parsed.get("meta_info")
    if not isinstance(meta, dict):
        raise _BadAnswer(f"a chunk has no meta_info: {str(dict(parsed))[:120]}")
    return meta


def _final(last: bytes, pieces: Sequence[bytes]) -> dict[str, Any]:
    """The last chunk, checked, with the output ids of the whole answer."""
    if not last:
        raise _BadAnswer("the stream ended before its first chunk")
    parsed = _parse(last)
    meta = _meta(parsed)
    reason = meta.get("finish_reason")
    if not isinstance(reason, dict):
        raise _BadAnswer(f"the stream ended before the request was finished (finish_reason {reason!r})")
    if reason.get("type") == "abort":
        raise _BadAnswer(f"the server gave the request up: {str(reason.get('message', reason))[:200]}")
    ids = parsed.get("output_ids")
    if pieces:
        ids = [one for piece in pieces for one in _parse(piece).get("output_ids") or []]
    count = meta.get("completion_tokens")
    if not isinstance(ids, list) or not isinstance(count, int) or len(ids) != count or count < 1:
        found = len(ids) if isinstance(ids, list) else "no"
        raise _BadAnswer(f"{found} output ids came for {count!r} completion tokens; expected as many")
    return {"ids": ids, "meta": meta, "reason": str(reason.get("type", ""))}


def _record(ask: Ask, seen: _Progress, final: dict[str, Any], began: float, ended: float) -> RequestRecord:
    meta, ids = final["meta"], final["ids"]
    after_first = len(ids) - seen.first_tokens
    steps, committed, histogram = _verify_counts(meta)
    first_at = seen.first_at
    return RequestRecord(
        prompt_id=ask.id,
        category=ask.category,
        ok=True,
        prompt_tokens=int(meta.get("prompt_tokens", 0)),
        completion_tokens=len(ids),
        cached_tokens=int(meta.get("cached_tokens") or 0),
        finish_reason=final["reason"],
        ttft_s=None if first_at is None else first_at - began,
        e2e_s=ended - began,
        itl_s=(seen.last_at - first_at) / after_first if first_at is not None and after_first > 0 else None,
        verify_steps=steps,
        committed_tokens=committed,
        histogram=histogram,
        output_sha256=digest(ids),
    )


def _verify_counts(meta: Mapping[str, Any]) -> tuple[int | None, int | None, list[int]]:
    """Verify steps, committed tokens and histogram of a request, as the server counted them.

    The histogram alone is enough (SGLang leaves the two counts out where its configured width is 1).
    """
    histogram = [int(count) for count in meta.get("spec_correct_drafts_histogram") or []]
    steps, accepted = meta.get("spec_verify_ct"), meta.get("spec_num_correct_drafts")
    if isinstance(steps, int) and isinstance(accepted, int):
        return steps, steps + accepted, histogram
    if histogram:
        counted = sum(histogram)
        return counted, counted + sum(n * count for n, count in enumerate(histogram)), histogram
    return None, None, []


def digest(ids: Sequence[int]) -> str:
    """sha256 of the token ids, so that outputs can be compared without being kept."""
    return hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()
