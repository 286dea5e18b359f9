"""Stand-ins for what a real SGLang, systemd or journald can't be made to do on demand.

``Service`` is a small real HTTP server on loopback that speaks as much of SGLang's protocol as the client
uses, and can hang, lie, or die. ``Host`` puts a ``systemctl`` and a ``journalctl`` on PATH that answer from
files.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

INVOCATION = "0123456789abcdef0123456789abcdef"

#: One action of a scripted stream: a chunk, raw bytes, wait until the end of the test, drop the connection.
Action = dict[str, Any] | bytes | str
HANG, DROP = "hang", "drop"


def chunk(ids: list[int], finish: dict[str, Any] | None = None, **meta: Any) -> dict[str, Any]:
    """A chunk of SGLang's ``/generate`` stream: everything so far."""
    return {
        "text": "x" * len(ids),
        "output_ids": ids,
        "meta_info": {
            "finish_reason": finish,
            "prompt_tokens": 3,
            "completion_tokens": len(ids),
            "cached_tokens": 0,
            **meta,
        },
    }


class Service:
    """The HTTP stand-in. Attributes may be changed while it runs; counts are kept in the server's thread."""

    def __init__(self) -> None:
        self.speculating = True
        self.commit = 3
        self.cached = 0
        self.chat = True
        self.health = 200
        self.generate = 200
        self.incremental = False
        self.flush_codes: list[int] = []
        self.scripts: dict[int, list[Action]] = {}
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.authorizations: set[str | None] = set()
        self.in_flight = 0
        self.most_in_flight = 0
        #: No request is answered before so many were in flight at once.
        self.together = 1
        self.on_done: Callable[[list[int]], None] = lambda commits: None
        self.on_request: Callable[[int], None] = lambda number: None
        self.on_plain: Callable[[], None] = lambda: None
        self.url = ""
        self._streams = 0
        self._ended: asyncio.Event | None = None

    @contextmanager
    def running(self) -> Iterator[Service]:
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever, daemon=True)
        thread.start()
        runner = asyncio.run_coroutine_threadsafe(self._start(), loop).result(10)
        try:
            yield self
        finally:
            asyncio.run_coroutine_threadsafe(self._stop(runner), loop).result(20)
            loop.call_soon_threadsafe(loop.stop)
            thread.join(10)
            loop.close()

    async def _start(self) -> web.AppRunner:
        self._ended = asyncio.Event()
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._handle)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return runner

    async def _stop(self, runner: web.AppRunner) -> None:
        assert self._ended is not None
        self._ended.set()
        await runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        self.authorizations.add(request.headers.get("Authorization"))
        self.paths.append(request.path)
        if request.path == "/health":
            return web.Response(status=self.health)
        if request.path == "/server_info":
            return web.json_response(self._info())
        if request.path == "/flush_cache":
            return web.Response(status=self.flush_codes.pop(0) if self.flush_codes else 200, text="busy")
        body = await request.json()
        if request.path == "/v1/tokenize":
            return self._tokenize(body)
        if request.path == "/generate":
            return await self._generate(request, body)
        return web.Response(status=404)

    def _info(self) -> dict[str, Any]:
        algorithm = "DDTREE" if self.speculating else None
        return {
            "version": "0.5.23",
            "speculative_algorithm": algorithm,
            "decode_log_interval": 40,
            "incremental_streaming_output": self.incremental,
        }

    def _tokenize(self, body: dict[str, Any]) -> web.Response:
        if "messages" in body and not self.chat:
            return web.json_response({"message": "no chat template"}, status=400)
        text = body["messages"][0]["content"] if "messages" in body else body["prompt"]
        prefix = [1] if "messages" in body else []
        return web.json_response({"tokens": [*prefix, *text.encode()[:8]]})

    async def _generate(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if not body.get("stream"):
            self.on_plain()
            if self.generate != 200:
                return web.Response(status=self.generate, text="no")
            return web.json_response(chunk([7], {"type": "length"}))
        number = self._streams
        self._streams += 1
        self.bodies.append(body)
        self.on_request(number)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        while self.most_in_flight < self.together:
            await asyncio.sleep(0.001)
        try:
            return await self._stream(request, self.scripts.get(number) or self._script(body))
        finally:
            self.in_flight -= 1

    def _script(self, body: dict[str, Any]) -> list[Action]:
        """An honest answer: one token by prefill, then ``commit`` a step, cut at the limit."""
        wanted = body["sampling_params"]["max_new_tokens"]
        base = sum(body["input_ids"])
        ids = [base + number for number in range(wanted)]
        counts, commits = [1], []
        while counts[-1] < wanted:
            commits.append(self.commit if self.speculating else 1)
            counts.append(min(wanted, counts[-1] + commits[-1]))
        meta: dict[str, Any] = {"cached_tokens": self.cached}
        if self.speculating and commits:
            meta["spec_verify_ct"] = len(commits)
            meta["spec_num_correct_drafts"] = sum(commits) - len(commits)
            histogram = [0] * max(commits)
            for commit in commits:
                histogram[commit - 1] += 1
            meta["spec_correct_drafts_histogram"] = histogram
        made: list[Action] = []
        for number, count in enumerate(counts):
            last = number == len(counts) - 1
            begin = counts[number - 1] if self.incremental and number else 0
            one = chunk(ids[begin:count], {"type": "length"} if last else None, **(meta if last else {}))
            one["meta_info"]["completion_tokens"] = count
            made.append(one)
        self.on_done(commits)
        return [*made, b"data: [DONE]\n\n"]

    async def _stream(self, request: web.Request, script: list[Action]) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        for action in script:
            if action == HANG:
                assert self._ended is not None
                await self._ended.wait()
            elif action == DROP:
                assert request.transport is not None
                request.transport.abort()
                break
            else:
                data = action if isinstance(action, bytes) else f"data: {json.dumps(action)}\n\n".encode()
                await answer.write(data)
                await asyncio.sleep(0)
        return answer


_SYSTEMCTL = """#!/bin/sh
cat "{folder}/unit"
"""

_JOURNALCTL = """#!{python} -SE
import json, sys
words = sys.argv[1:]
with open("{folder}/asked", "a") as asked:
    asked.write(json.dumps(words) + "\\n")
if "--sync" in words:
    sys.exit(0)
with open("{folder}/journal") as file:
    lines = [json.loads(line) for line in file]
if "--after-cursor" in words:
    after = words[words.index("--after-cursor") + 1]
    lines = [line for line in lines if int(line["__CURSOR"]) > int(after)]
ids = {{word.split("=", 1)[1] for word in words if word.startswith("_SYSTEMD_INVOCATION_ID=")}}
if ids:
    lines = [line for line in lines if line["_SYSTEMD_INVOCATION_ID"] in ids]
if "-n" in words:
    lines = lines[-int(words[words.index("-n") + 1]):]
for line in lines:
    print(json.dumps(line))
"""


class Host:
    """A host whose systemd and journal say what the test wants."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        commands = folder / "bin"
        commands.mkdir()
        for name, text in (("systemctl", _SYSTEMCTL), ("journalctl", _JOURNALCTL)):
            path = commands / name
            path.write_text(text.format(folder=folder, python=sys.executable))
            path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{commands}:/usr/bin:/bin")
        self._lock = threading.Lock()
        self._count = 0
        (folder / "journal").write_text("")
        (folder / "asked").write_text("")
        self.unit()

    def unit(self, **values: object) -> None:
        """Set the unit's properties; it runs unless told otherwise."""
        given: dict[str, object] = {
            "LoadState": "loaded",
            "ActiveState": "active",
            "SubState": "running",
            "Result": "success",
            "MainPID": 4321,
            "InvocationID": INVOCATION,
            "NRestarts": 0,
            "ExecMainCode": 0,
            "ExecMainStatus": 0,
            "ControlGroup": "/system.slice/x.service",
            "InactiveExitTimestampMonotonic": 0,
            "ExecMainStartTimestampMonotonic": 0,
        }
        text = "".join(f"{key}={value}\n" for key, value in (given | values).items())
        fresh = self.folder / "unit.new"
        fresh.write_text(text)
        fresh.replace(self.folder / "unit")

    def killed(self, **values: object) -> None:
        """The main process was killed by SIGKILL, as SGLang does to itself."""
        state = {
            "ActiveState": "failed",
            "SubState": "failed",
            "Result": "signal",
            "MainPID": 0,
            "ExecMainCode": 2,
            "ExecMainStatus": 9,
        }
        self.unit(**(state | values))

    def log(self, *messages: str, invocation: str = INVOCATION) -> None:
        """Append entries to the journal."""
        with self._lock, (self.folder / "journal").open("a") as file:
            for message in messages:
                self._count += 1
                entry = {
                    "__CURSOR": str(self._count),
                    "__REALTIME_TIMESTAMP": str(1_700_000_000_000_000 + self._count),
                    "_PID": "4321",
                    "MESSAGE": message,
                    "_SYSTEMD_INVOCATION_ID": invocation,
                }
                file.write(json.dumps(entry) + "\n")

    def asked(self) -> list[list[str]]:
        """The arguments of every journalctl call."""
        return [json.loads(line) for line in (self.folder / "asked").read_text().splitlines()]


def metrics_line(commits: list[int], budget: int = 8, topk: int = 4) -> str:
    """The backend's journal line for these committed counts of steps."""
    histogram = [0] * 8
    for commit in commits:
        histogram[commit - 1] += 1
    return (
        f"[2026-01-01 00:00:00] DDTREE metrics: budget={budget} topk={topk} steps={len(commits)} "
        f"tokens={sum(commits)} avg_commit_len={sum(commits) / len(commits):.2f} "
        f"hist={','.join(map(str, histogram))} draft_ms=1.000 build_ms=0.100 verify_ms=5.000"
    )
