"""Facts made by hand for the tests."""

from __future__ import annotations

from typing import Any

from tuning.loadgen import summarise
from tuning.models import (
    Acceptance,
    AcceptanceSources,
    Configuration,
    Failure,
    Measurement,
    Phases,
    RequestRecord,
    TrialFact,
    Warmup,
    WorkloadSummary,
)

AR = Configuration(arm="ar")
CHAIN = Configuration(arm="chain")


def tree(budget: int, topk: int, **extra: Any) -> Configuration:
    return Configuration(arm="tree", budget=budget, topk=topk, extra=extra)


def record(prompt_id: str = "p1", **values: Any) -> RequestRecord:
    given: dict[str, Any] = {
        "prompt_id": prompt_id,
        "category": "c",
        "ok": True,
        "completion_tokens": 100,
        "e2e_s": 1.0,
        "output_sha256": f"out-{prompt_id}",
    }
    return RequestRecord(**(given | values))


def measurement(
    tok_s: float = 100.0,
    outputs: dict[str, str] | None = None,
    tokens: int = 400,
    steps: int = 100,
    digest: str = "w1",
    warnings: list[str] | None = None,
) -> Measurement:
    made = outputs or {"p1": "out-p1", "p2": "out-p2"}
    records = [record(key, output_sha256=value) for key, value in made.items()]
    level = summarise(records, 1, wall_s=100.0 * len(records) / tok_s)
    return Measurement(
        workload=WorkloadSummary(
            digest=digest, prompts=list(made), levels=[1], max_tokens=100, ignore_eos=True, prompt_mode="chat"
        ),
        invocation_id="a" * 32,
        warmup=Warmup(passes=2, tok_s=[1.0, 1.0], stable=True, seconds=1.0),
        levels=[level],
        acceptance=AcceptanceSources(responses=Acceptance(tokens=tokens, steps=steps, source="responses")),
        outputs=made,
        warnings=warnings or [],
        seconds=2.0,
    )


def fact(configuration: Configuration = AR, trial: str = "01", **values: Any) -> TrialFact:
    given: dict[str, Any] = {
        "study": "s1",
        "trial": trial,
        "host": "h1",
        "started_at": "2026-01-01T00:00:00Z",
        "finished_at": "2026-01-01T00:01:00Z",
        "configuration": configuration,
        "status": "ok",
        "phases": Phases(first_token_s=16.25),
    }
    given |= values
    if given["status"] == "ok":
        given.setdefault("measurement", measurement())
    else:
        given.setdefault("failure", Failure(kind="crashed", summary="it ended"))
    return TrialFact(**given)
