"""A real SGLang server on the CPU engine for the tests, with the demo pair."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests

MODELS = Path(__file__).resolve().parents[2] / "models" / "demo"
BOOT_SECONDS = 240.0

CPU_FLAGS = [
    *("--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native"),
    *("--sampling-backend", "pytorch", "--disable-cuda-graph", "--grammar-backend", "none"),
    *("--max-total-tokens", "8192", "--max-running-requests", "8", "--context-length", "1024"),
]


def draft_flags(draft: str) -> list[str]:
    """Of one of the drafts of the demo pair."""
    return ["--speculative-draft-model-path", str(MODELS / draft)]


CHAIN = ["--speculative-algorithm", "DFLASH", *draft_flags("draft")]

#: Variables every server gets.
ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}

STAGES = ("draft", "build", "verify", "commit")
_LINE = re.compile(
    r"(DDTREE metrics: budget=(?P<budget>\d+) topk=(?P<topk>\d+)|DFLASH metrics:) steps=(?P<steps>\d+) "
    r"tokens=(?P<tokens>\d+) avg_commit_len=(?P<average>\d+\.\d\d) hist=(?P<hist>[\d,]+)"
    r"(?(budget) draft_ms=(?P<draft>[\d.]+) build_ms=(?P<build>[\d.]+)"
    r" verify_ms=(?P<verify>[\d.]+) commit_ms=(?P<commit>[\d.]+))$"
)


def tree_flags(budget: int, topk: int, draft: str = "draft") -> list[str]:
    return [
        *("--speculative-algorithm", "DDTREE", *draft_flags(draft)),
        *("--speculative-ddtree-budget", str(budget), "--speculative-ddtree-topk-cap", str(topk)),
    ]


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The caller's environment without what would change a server, plus what the CPU engine needs."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SGLANG_", "TRITON_", "PYTHONPATH"))}
    return {**clean, **ENVIRONMENT, **(extra or {})}


def launch_command(
    port: int, flags: Sequence[str], target: Path = MODELS / "target", base: Sequence[str] = CPU_FLAGS
) -> list[str]:
    return [
        *(sys.executable, "-m", "sglang.launch_server", "--model-path", str(target)),
        *("--host", "127.0.0.1", "--port", str(port), *base, *flags),
    ]


@contextmanager
def claimed_port() -> Iterator[int]:
    """A free port, ours as long as the block runs: its server binds it only seconds later.

    SGLang looks for ports of its own from 22000 on. The claim is the name of an abstract socket: other runs
    of these tests on this machine respect it, and it ends with the process, whatever its end.
    """
    while True:
        port = random.randrange(10000, 22000)
        with socket.socket(socket.AF_UNIX) as claim, socket.socket() as probe:
            try:
                claim.bind(f"\0arborist-test-port-{port}")
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            probe.close()
            yield port
            return


@dataclass(frozen=True)
class MetricsLine:
    budget: int
    topk: int
    steps: int
    tokens: int
    average: str
    histogram: list[int]
    #: Milliseconds a scheduler step, by stage; empty for the chain, zeros when no step was timed.
    stage_ms: dict[str, float]


@dataclass
class Server:
    url: str
    log: Path
    process: subprocess.Popen[bytes]
    boot_seconds: float = 0.0

    def generate(self, text: str | list[str], tokens: int, **parameters: Any) -> Any:
        """Greedy completion of exactly ``tokens`` tokens; a list of texts runs as one batch."""
        sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True, **parameters}
        answer = requests.post(
            f"{self.url}/generate", json={"text": text, "sampling_params": sampling}, timeout=600
        )
        answer.raise_for_status()
        return answer.json()

    def chat(self, text: str, tokens: int) -> dict[str, Any]:
        """The first choice of a greedy chat completion."""
        body = {
            "model": "default",
            "messages": [{"role": "user", "content": text}],
            "max_tokens": tokens,
            "temperature": 0,
        }
        reply = requests.post(f"{self.url}/v1/chat/completions", json=body, timeout=600)
        reply.raise_for_status()
        choice: dict[str, Any] = reply.json()["choices"][0]
        return choice

    def metrics(self) -> list[MetricsLine]:
        lines = []
        for text in self.log.read_text(errors="replace").splitlines():
            if re.search("(DDTREE|DFLASH) metrics", text):
                match = _LINE.search(text)
                assert match is not None, f"not the agreed format: {text}"
                number = {key: int(match[key] or 0) for key in ("budget", "topk", "steps", "tokens")}
                histogram = [int(part) for part in match["hist"].split(",")]
                stages = {stage: float(match[stage]) for stage in STAGES if match[stage] is not None}
                lines.append(
                    MetricsLine(**number, average=match["average"], histogram=histogram, stage_ms=stages)
                )
        return lines


def tail(log: Path, lines: int = 25) -> str:
    return "\n".join(line[:300] for line in log.read_text(errors="replace").splitlines()[-lines:])


@contextmanager
def serve(
    flags: Sequence[str],
    log: Path,
    extra_env: Mapping[str, str] | None = None,
    target: Path = MODELS / "target",
    base: Sequence[str] = CPU_FLAGS,
) -> Iterator[Server]:
    """A server that answers; one that dies at start fails the test at once, with the end of its log."""
    with claimed_port() as port:
        started = time.monotonic()
        with log.open("wb") as output:
            process = subprocess.Popen(
                launch_command(port, flags, target, base),
                env=environment(extra_env),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        server = Server(f"http://127.0.0.1:{port}", log, process)
        try:
            while not _healthy(server.url):
                if process.poll() is not None:
                    raise RuntimeError(f"the server died with {process.returncode}:\n{tail(log)}")
                if time.monotonic() - started > BOOT_SECONDS:
                    raise RuntimeError(f"the server did not answer within {BOOT_SECONDS} s:\n{tail(log)}")
                time.sleep(0.1)
            server.boot_seconds = time.monotonic() - started
            yield server
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _healthy(url: str) -> bool:
    try:
        return requests.get(f"{url}/health", timeout=5).status_code == 200
    except requests.RequestException:
        return False
