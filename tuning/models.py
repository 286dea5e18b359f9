"""What Arborist writes down: configurations, failures, measurements, trial facts.

All models are frozen and refuse unknown keys, so a fact that was written by another version is
noticed instead of half read. Units are in the names: ``_s`` seconds, ``_ms`` milliseconds,
``tok_s`` tokens per second.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    computed_field,
    model_validator,
)

SCHEMA_VERSION: Literal[1] = 1

Arm = Literal["ar", "chain", "tree"]
ARMS: tuple[Arm, ...] = ("ar", "chain", "tree")

#: A value of an engine flag: ``true`` is the bare flag, ``false``/``null`` leaves the flag out, a
#: list is repeated after the flag.
Scalar = bool | int | float | str | None
FlagValue = Scalar | list[bool | int | float | str]

#: Flags that say which arm runs, of which target, or where it listens; a configuration sets the first through
#: its own fields, and a study compares configurations of one service.
RESERVED_FLAGS = frozenset(
    {
        "config",
        "host",
        "model",
        "model-path",
        "port",
        "revision",
        "speculative-algorithm",
        "speculative-ddtree-budget",
        "speculative-ddtree-topk-cap",
    }
)

_FLAG = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*", re.ASCII)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", re.ASCII)


def _check_name(value: str) -> str:
    if not _NAME.fullmatch(value):
        raise ValueError(
            f"{value[:60]!r} can't be a file name; use letters, digits, '.', '_' and '-', "
            "starting with a letter or digit"
        )
    return value


#: A name that also names a file or folder of the study.
FileName = Annotated[str, AfterValidator(_check_name)]


class Frozen(BaseModel):
    """Base of every model: immutable, no unknown keys, finite numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Configuration(Frozen):
    """One arm with its values: what the engine is started with.

    ``budget`` (tree nodes besides the root) and ``topk`` (most ranks tried at a depth) are set for the
    tree arm and only there. ``extra`` holds engine flags (without dashes) that override the
    service's own.
    """

    arm: Arm
    budget: Annotated[int, Field(ge=1, strict=True)] | None = None
    topk: Annotated[int, Field(ge=1, strict=True)] | None = None
    extra: dict[str, FlagValue] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _derived_keys(cls, data: Any) -> Any:
        """Accept ``label`` and ``id`` as printed, if they say what they must."""
        if not isinstance(data, dict) or not ({"label", "id"} & data.keys()):
            return data
        rest = {k: v for k, v in data.items() if k not in ("label", "id")}
        made = cls.model_validate(rest)
        for key in ("label", "id"):
            if key in data and data[key] != getattr(made, key):
                raise ValueError(
                    f"{key} is {data[key]!r} but the configuration's own {key} is "
                    f"{getattr(made, key)!r}; leave {key} out, it is derived"
                )
        return rest

    @model_validator(mode="after")
    def _consistent(self) -> Configuration:
        if self.arm == "tree":
            for key in ("budget", "topk"):
                if getattr(self, key) is None:
                    raise ValueError(f"{key} is missing; arm tree needs budget and topk")
        elif self.budget is not None or self.topk is not None:
            raise ValueError(f"budget and topk belong to arm tree, not to arm {self.arm}")
        for name, value in self.extra.items():
            _check_flag(name, value)
        return self

    @computed_field  # type: ignore[prop-decorator]
    @property
    def label(self) -> str:
        """``ar``, ``chain``, ``8:4``, with extra flags ``8:4+flag=value``."""
        base = f"{self.budget}:{self.topk}" if self.arm == "tree" else self.arm
        return base + "".join(f"+{k}={_plain(v)}" for k, v in sorted(self.extra.items()))

    @computed_field  # type: ignore[prop-decorator]
    @property
    def id(self) -> str:
        """First 12 hex digits of the sha256 of what reaches the engine, as canonical JSON."""
        what = {
            "arm": self.arm,
            "budget": self.budget,
            "topk": self.topk,
            "extra": {k: _canonical(v) for k, v in self.extra.items()},
        }
        text = json.dumps(what, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def _check_flag(name: str, value: FlagValue) -> None:
    if name.lstrip("-") != name or "_" in name:
        plain = name.lstrip("-").replace("_", "-").lower()
        raise ValueError(f"extra flag {name!r}: write it without leading dashes, as {plain!r}")
    if not _FLAG.fullmatch(name):
        raise ValueError(f"extra flag {name!r} isn't a flag name; expected one such as 'page-size'")
    # The engine's parser also takes a flag's beginning for the flag.
    reserved = sorted(flag for flag in RESERVED_FLAGS if flag.startswith(name))
    if reserved:
        raise ValueError(
            f"extra flag {name!r} means {reserved[0]!r}, which is set by the service or by arm, budget and "
            "topk; remove it from extra"
        )
    values = value if isinstance(value, list) else [value]
    if isinstance(value, list) and not value:
        raise ValueError(f"extra flag {name!r} has an empty list; use null to leave the flag out")
    for one in values:
        if isinstance(one, float) and not math.isfinite(one):
            raise ValueError(f"extra flag {name!r} is {one}; expected a finite number")
        if isinstance(one, str) and any(c in one for c in "\n\r\0"):
            raise ValueError(f"extra flag {name!r} holds a line break or NUL; a command line can't carry it")


def _plain(value: FlagValue) -> str:
    """A flag's value as a person would write it."""
    if isinstance(value, list):
        return ",".join(_plain(v) for v in value)
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def _canonical(value: FlagValue) -> Any:
    """The value as the engine sees it: 8 and "8" are one argument, false and null leave it out."""
    if isinstance(value, list):
        return [str(v) for v in value]
    if value is None or value is False:
        return None
    return True if value is True else str(value)


FailureKind = Literal[
    "out_of_memory",
    "port_in_use",
    "bad_argument",
    "model_missing",
    "draft_missing",
    "draft_mismatch",
    "unknown_algorithm",
    "unsupported_version",
    "context_too_small",
    "graph_capture",
    "shared_memory",
    "watchdog",
    "nccl",
    "killed",
    "health",
    "timeout",
    "crashed",
    "busy",
    "request_failed",
    "connection_lost",
]


class Failure(Frozen):
    """Why a trial has no measurement."""

    kind: FailureKind
    summary: str = Field(description="one line: what was found")
    hint: str = Field(default="", description="what to change, with the variable or flag")
    journal_tail: list[str] = Field(
        default_factory=list, description="last lines of the invocation, each at most 400 characters"
    )


class Phases(Frozen):
    """Boot phases, each in seconds since the unit left ``inactive``; null when never reached."""

    process_s: float | None = Field(default=None, description="main process forked")
    listening_s: float | None = Field(default=None, description="port held by the unit's own process")
    healthy_s: float | None = Field(default=None, description="/health answered 200")
    first_token_s: float | None = Field(default=None, description="a real generation came back")

    @computed_field  # type: ignore[prop-decorator]
    @property
    def boot_s(self) -> float | None:
        """Seconds until the service had proved that it generates; null when it never did."""
        return self.first_token_s

    @model_validator(mode="before")
    @classmethod
    def _drop_derived(cls, data: Any) -> Any:
        return {k: v for k, v in data.items() if k != "boot_s"} if isinstance(data, dict) else data


class Acceptance(Frozen):
    """Accept length over a window: committed tokens / verify steps, bonus token included.

    ``histogram[i]`` counts request-steps that accepted i draft tokens and so committed i+1; it is empty
    when the source has none. An autoregressive arm has ``steps`` = ``tokens`` by definition.
    """

    tokens: Annotated[int, Field(ge=0)]
    steps: Annotated[int, Field(ge=0)]
    histogram: list[Annotated[int, Field(ge=0)]] = Field(default_factory=list)
    source: Literal["responses", "journal-metrics", "journal-decode"]

    @computed_field  # type: ignore[prop-decorator]
    @property
    def tau(self) -> float | None:
        """tokens / steps; null when there was no step."""
        return self.tokens / self.steps if self.steps else None

    @model_validator(mode="before")
    @classmethod
    def _drop_derived(cls, data: Any) -> Any:
        return {k: v for k, v in data.items() if k != "tau"} if isinstance(data, dict) else data


class AcceptanceSources(Frozen):
    """The accept length of the measured window from each source, and whether they agree.

    ``agreement`` is |journal - responses| / responses. ``coverage`` is journal steps / response
    steps: 1 when the journal saw every step, less when its source only prints full windows.
    """

    responses: Acceptance
    journal: Acceptance | None = None
    agreement: float | None = None
    coverage: float | None = None
    by_category: dict[str, Acceptance] = Field(default_factory=dict)


class Percentiles(Frozen):
    """Order statistics of one quantity over requests (linear interpolation)."""

    p50: float
    p95: float
    p99: float
    mean: float
    min: float
    max: float


class RequestRecord(Frozen):
    """One request as the client saw it and as the server counted it."""

    prompt_id: str
    category: str
    ok: bool
    error: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = Field(default=0, description="by the server, not by counting chunks")
    cached_tokens: int = 0
    finish_reason: str = ""
    ttft_s: float | None = Field(default=None, description="request sent to first chunk with a token")
    e2e_s: float = Field(description="request sent to last byte")
    itl_s: float | None = Field(
        default=None, description="(last - first chunk) / tokens after the first chunk"
    )
    verify_steps: int | None = Field(default=None, description="null without speculation")
    committed_tokens: int | None = Field(
        default=None, description="accepted drafts + one bonus a step, before any cut at the stop"
    )
    histogram: list[int] = Field(default_factory=list)
    output_sha256: str = ""


class Level(Frozen):
    """One concurrency level of a measurement: all prompts, at most ``concurrency`` in flight."""

    concurrency: int
    requests: int
    failed: int
    wall_s: float
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    tok_s: float = Field(ge=0, description="completion tokens of all requests / wall clock of the level")
    request_tok_s: Percentiles | None = Field(description="per request: completion tokens / end-to-end time")
    ttft_ms: Percentiles | None
    itl_ms: Percentiles | None
    e2e_ms: Percentiles | None
    acceptance: Acceptance | None
    records: list[RequestRecord]


class Warmup(Frozen):
    """What ran before the clock counted."""

    passes: int
    tok_s: list[float]
    stable: bool
    seconds: float


class WorkloadSummary(Frozen):
    """What was asked, so that two facts can be told comparable: same ``digest``, same workload."""

    digest: str
    prompts: list[str] = Field(description="prompt ids, in order")
    levels: list[int]
    max_tokens: int
    ignore_eos: bool
    prompt_mode: Literal["chat", "raw"]


class Measurement(Frozen):
    """Everything measured on one running service."""

    workload: WorkloadSummary
    server: dict[str, JsonValue] = Field(default_factory=dict)
    invocation_id: str
    warmup: Warmup
    levels: list[Level] = Field(description="in the order measured: highest concurrency first")
    acceptance: AcceptanceSources
    outputs: dict[str, str] = Field(description="prompt id -> sha256 of the output ids at the lowest level")
    warnings: list[str] = Field(default_factory=list)
    seconds: float

    def lowest(self) -> Level:
        """The level with the least concurrency: the one rows are compared by."""
        return min(self.levels, key=lambda level: level.concurrency)


Status = Literal["ok", "failed", "rejected", "inconclusive"]


class TrialFact(Frozen):
    """One configuration on one host: applied, started, measured, or why not."""

    schema_version: Literal[1] = SCHEMA_VERSION
    study: FileName
    trial: FileName = Field(description="unique in the study for its host; names the fact's file")
    host: FileName
    started_at: str = Field(description="UTC, ISO 8601")
    finished_at: str = Field(description="UTC, ISO 8601")
    configuration: Configuration
    engine: dict[str, JsonValue] = Field(default_factory=dict, description="versions and hashes")
    command: list[str] = Field(default_factory=list, description="argv the unit was given")
    status: Status
    failure: Failure | None = None
    invocation_id: str | None = None
    phases: Phases | None = None
    measurement: Measurement | None = None
    supersedes: list[FileName] = Field(
        default_factory=list, description="trials of this host that this one replaces in the report"
    )

    @model_validator(mode="after")
    def _consistent(self) -> TrialFact:
        if self.status == "ok" and (self.measurement is None or self.failure is not None):
            raise ValueError("status ok needs a measurement and no failure")
        if self.status == "failed" and self.failure is None:
            raise ValueError("status failed needs a failure that says why")
        return self
