"""What a study says: one row a trial, and the row that won."""

from __future__ import annotations

import csv as csv_module
import io
import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING

from pydantic import JsonValue

from tuning.models import Configuration, TrialFact
from tuning.resume import current
from tuning.store import StoreError, Study

if TYPE_CHECKING:
    from rich.table import Table

#: Rates closer than this are a tie, and a tie goes to the smaller tree.
TIE = 0.01
#: A single pass can be this far off, so rows this near to the best are named beside it.
NOISE = 0.10

#: Status of a row that was measured and whose output is wrong.
DIFFERS = "differs"

COLUMNS = ("row", "status", "tok/s", "accept length", "verify steps", "\u00d7 AR", "same as AR", "boot s")

_CSV = (
    *("host", "row", "arm", "budget", "topk", "status", "tok_s", "accept_length", "verify_steps"),
    *("times_ar", "same_as_ar", "prompts", "boot_s", "note", "tok_s_by_concurrency"),
)


@dataclass(frozen=True)
class Row:
    """One line of the report. ``None`` is shown as an empty cell."""

    host: str
    configuration: Configuration
    status: str
    tok_s: float | None
    accept_length: float | None
    verify_steps: int | None
    times_ar: float | None
    same_as_ar: tuple[int, int] | None
    boot_s: float | None
    note: str
    rates: dict[int, float]
    """tok/s by concurrency; the lowest is ``tok_s``."""

    @property
    def label(self) -> str:
        """The configuration's label."""
        return self.configuration.label


def rows(facts: Sequence[TrialFact]) -> list[Row]:
    """One row a fact that none replaces, in the order given, each compared with its own host's AR arm."""
    facts = current(facts)
    return [_row(fact, _ar_of(facts, fact)) for fact in facts]


def _row(fact: TrialFact, ar: TrialFact | None) -> Row:
    note = ""
    if fact.failure is not None:
        note = f"{fact.failure.kind}: {fact.failure.summary}"
    elif fact.measurement is not None:
        note = "; ".join(fact.measurement.warnings)
    rate = tok_s(fact)
    ar_rate = tok_s(ar) if ar is not None else None
    acceptance = fact.measurement.acceptance.responses if fact.measurement is not None else None
    return Row(
        host=fact.host,
        configuration=fact.configuration,
        status=DIFFERS if fact.status == "ok" and differs(fact, ar) else fact.status,
        tok_s=rate,
        accept_length=acceptance.tau if acceptance else None,
        verify_steps=acceptance.steps if acceptance else None,
        times_ar=rate / ar_rate if rate and ar_rate else None,
        same_as_ar=same_as_ar(fact, ar) if ar is not None else None,
        boot_s=fact.phases.boot_s if fact.phases is not None else None,
        note=note,
        rates={x.concurrency: x.tok_s for x in fact.measurement.levels} if fact.measurement else {},
    )


def tok_s(fact: TrialFact) -> float | None:
    """Tokens per second at the lowest level the fact measured; None for a fact without one."""
    return fact.measurement.lowest().tok_s if fact.measurement is not None else None


def differs(fact: TrialFact, ar: TrialFact | None) -> bool:
    """Whether the fact's greedy output is not the AR arm's though it must be, so that the row can't win.

    In float32 every prompt must be the same. In lower precision kernels of another width round otherwise, and
    single prompts may part; where not one of several is the same, it is not rounding.
    """
    same = same_as_ar(fact, ar) if ar is not None else None
    if same is None or fact.measurement is None:
        return False
    exact = fact.measurement.server.get("dtype") == "float32"
    return same[0] < same[1] if exact else same[0] == 0 and same[1] > 2


def _ar_of(facts: Sequence[TrialFact], fact: TrialFact) -> TrialFact | None:
    """The host's measured AR fact with the same workload; the middle one by tok/s of several."""
    found = [
        f
        for f in facts
        if f.host == fact.host
        and f.configuration.arm == "ar"
        and not f.configuration.extra
        and f.status == "ok"
        and f.measurement is not None
        and (fact.measurement is None or f.measurement.workload.digest == fact.measurement.workload.digest)
    ]
    return sorted(found, key=lambda f: tok_s(f) or 0.0)[len(found) // 2] if found else None


def same_as_ar(fact: TrialFact, ar: TrialFact) -> tuple[int, int] | None:
    """(n, N): of N prompts, n whose output at every level is the AR arm's, token for token."""
    if fact.measurement is None or ar.measurement is None:
        return None
    mine: dict[str, set[str]] = defaultdict(set)
    for level in fact.measurement.levels:
        for record in level.records:
            mine[record.prompt_id].add(record.output_sha256 if record.ok else "")
    theirs = ar.measurement.outputs
    return sum(mine[prompt] == {digest} for prompt, digest in theirs.items()), len(theirs)


def best(study: Study | Sequence[TrialFact]) -> TrialFact | None:
    """The ``ok`` fact to promote, or None when no row is ok. One whose output differs is not.

    Highest tok/s at the lowest level measured; rates within 1 % of the highest tie, and the tie goes to the
    smaller budget, then the smaller topk (an arm without a tree counts as 0). With several hosts a
    configuration must be ok on every host that tried it; its score is the mean over hosts of tok/s over that
    host's own AR rate (of plain tok/s when a host has no AR row), and the host with the
    highest tok/s gives the fact returned.
    """
    facts = current(study.facts() if isinstance(study, Study) else study)
    measured = [
        f
        for f in facts
        if f.status == "ok" and f.measurement is not None and not differs(f, _ar_of(facts, f))
    ]
    if not measured:
        return None
    base = {f.host: _ar_of(facts, f) for f in measured}
    normalised = len(base) > 1 and all(ar is not None for ar in base.values())

    def score(fact: TrialFact) -> float:
        ar = base[fact.host]
        rate = tok_s(fact) or 0.0
        return rate / (tok_s(ar) or rate or 1.0) if normalised and ar is not None else rate

    groups: dict[str, list[TrialFact]] = defaultdict(list)
    for fact in measured:
        groups[fact.configuration.id].append(fact)
    tried: dict[str, set[str]] = defaultdict(set)
    for fact in facts:
        tried[fact.configuration.id].add(fact.host)
    scores = {
        key: fmean(median(score(f) for f in group if f.host == host) for host in tried[key])
        for key, group in groups.items()
        if {f.host for f in group} == tried[key]
    }
    if not scores:
        return None
    top = max(scores.values())

    def size(key: str) -> tuple[int, int, float]:
        made = groups[key][0].configuration
        return made.budget or 0, made.topk or 0, -scores[key]

    winner = min((key for key, value in scores.items() if value >= top * (1 - TIE)), key=size)
    return max(groups[winner], key=lambda f: tok_s(f) or 0.0)


def unmeasured(meta: Mapping[str, JsonValue], facts: Sequence[TrialFact]) -> list[str]:
    """Rows that a sweep set out to measure (``study.json``) and no line was kept of, ``label on host``.

    A sweep that was cut off or still runs leaves some, and so does a damaged line of ``trials.jsonl``.
    """
    made = {(fact.host, fact.configuration.id) for fact in facts}
    hosts, configurations = meta.get("hosts"), meta.get("configurations")
    return [
        f"{one.get('label')} on {host}"
        for host in (hosts if isinstance(hosts, list) else [])
        for one in (configurations if isinstance(configurations, list) else [])
        if isinstance(one, dict) and (host, one.get("id")) not in made
    ]


def doubts(facts: Sequence[TrialFact]) -> list[str]:
    """What in a study can't be right, or must be looked at before a row is promoted.

    A larger tree holds every node of a smaller one with the same topk, so its accept length can't be
    smaller; and greedy output doesn't depend on speculation, up to rounding where precision is low.
    """
    found = []
    made = [row for row in rows(facts) if row.status in ("ok", DIFFERS)]
    if made and all(row.same_as_ar is None for row in made):
        found.append("no autoregressive row: nothing says that the outputs are right")
    for row in made:
        if row.same_as_ar is not None and row.same_as_ar[0] < row.same_as_ar[1]:
            same, of = row.same_as_ar
            found.append(
                f"{row.label}: {of - same} of {of} prompts have another output than the autoregressive arm"
            )
    trees = [row for row in made if row.configuration.budget and row.accept_length is not None]
    for small, large in itertools.permutations(trees, 2):
        if _nests(small, large) and (large.accept_length or 0) < (small.accept_length or 0) * (1 - TIE):
            found.append(
                f"accept length falls from {small.accept_length:.2f} at {small.label} to "
                f"{large.accept_length:.2f} at {large.label}: a larger tree can't accept less, measure again"
            )
    return found


def _nests(small: Row, large: Row) -> bool:
    """Whether the rows differ in the budget alone."""
    a, b = small.configuration, large.configuration
    return (
        small.host == large.host
        and a.topk == b.topk
        and a.extra == b.extra
        and (a.budget or 0) < (b.budget or 0)
    )


def _cells(row: Row, levels: Sequence[int]) -> list[str]:
    same = f"{row.same_as_ar[0]}/{row.same_as_ar[1]}" if row.same_as_ar else ""
    status = row.status
    if row.note and row.status != "ok":
        status = f"{row.status} ({row.note.partition(':')[0]})"
    return [
        row.label,
        status,
        *(_number(row.rates.get(level), 1) for level in levels or (0,)),
        _number(row.accept_length, 2),
        "" if row.verify_steps is None else str(row.verify_steps),
        _number(row.times_ar, 2),
        same,
        _number(row.boot_s, 1),
    ]


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _lines(study: Study) -> tuple[tuple[str, ...], list[tuple[Row, list[str]]], TrialFact | None, list[str]]:
    """Columns, rows with their cells, the winner, and what is doubtful or could not be read."""
    contents = study.read()
    made = rows(contents.facts)
    many = len({row.host for row in made}) > 1
    levels = sorted({level for row in made for level in row.rates})
    columns: list[str] = ["host"] if many else []
    for name in COLUMNS:
        # One level needs no name; of several each gets its column, and rows are compared by the lowest.
        split = name == "tok/s" and len(levels) > 1
        columns += [f"tok/s @{level}" for level in levels] if split else [name]
    cells = [(row, [*([row.host] if many else []), *_cells(row, levels)]) for row in made]
    said = [*_near(contents.facts), *_measured(contents.facts), *doubts(contents.facts), *contents.problems]
    try:
        missing = unmeasured(study.meta(), contents.facts)
    except StoreError as error:
        # The rows are in another file, and can be shown all the same.
        missing = []
        said.append(f"{error}: which rows are missing is not known")
    if missing:
        said.insert(0, f"not measured: {', '.join(missing)}; the best is of what was")
    return tuple(columns), cells, best(contents.facts), said


def _near(facts: Sequence[TrialFact]) -> list[str]:
    """Which rows one more pass might have put first."""
    winner = best(facts)
    made = [row for row in rows(facts) if winner is not None and row.host == winner.host]
    top = tok_s(winner) if winner is not None else None
    near = [
        row.label
        for row in made
        if row.status == "ok" and top and row.tok_s and row.tok_s >= top * (1 - NOISE)
        if winner is not None and row.configuration.id != winner.configuration.id
    ]
    if not near:
        return []
    return [f"within {NOISE:.0%} of it, which one pass a row does not tell apart: {', '.join(near)}"]


def _measured(facts: Sequence[TrialFact]) -> list[str]:
    """What was asked of what, once for the study; rows of another workload are counted apart."""
    found: dict[str, list[str]] = defaultdict(list)
    for fact in current(facts):
        made = fact.measurement
        if made is None:
            continue
        asked, server = made.workload, made.server
        prompts = len(asked.prompts)
        at = ", ".join(map(str, sorted(asked.levels)))
        engine = " ".join(str(server[key]) for key in ("dtype", "device") if server.get(key))
        version = f"; SGLang {server['version']}" if server.get("version") else ""
        found[
            f"{prompts} prompt{'s' if prompts != 1 else ''} of {asked.max_tokens} tokens, concurrency {at}"
            f"{version}{' ' + engine if engine else ''}"
        ].append(fact.finished_at)
    return [f"measured: {what}; {min(when)[:16]} to {max(when)[:16]} UTC" for what, when in found.items()]


def table(study: Study) -> Table:
    """The study as a rich table; the winner's row is bold, failed rows are red."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    columns, lines, winner, problems = _lines(study)
    made = Table(
        title=f"study {study.name}",
        caption="\n".join(_captions(lines, winner, problems)),
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    for column, name in enumerate(columns):
        left = name in ("host", "row", "status")
        # Figures may not be cut; what a row is called may go on in the next line.
        least = max((len(cells[column]) for _, cells in lines), default=0)
        least = min(least, 20) if left else least
        made.add_column(
            name,
            justify="left" if left else "right",
            overflow="fold",
            no_wrap=not left,
            min_width=max(least, len(name)),
        )
    for row, cells in lines:
        won = winner is not None and row.configuration.id == winner.configuration.id
        style = "bold green" if won else "red" if row.status in ("failed", DIFFERS) else ""
        made.add_row(*(Text(cell) for cell in cells), style=style)
    return made


def least_width(made: Table) -> int:
    """Columns that a table needs so that nothing in it is cut."""
    from rich.console import Console
    from rich.measure import Measurement

    console = Console(width=10_000)
    return Measurement.get(console, console.options, made).minimum


def _captions(lines: list[tuple[Row, list[str]]], winner: TrialFact | None, problems: list[str]) -> list[str]:
    said = [f"best: {winner.configuration.label}" if winner else "no row is ok"]
    said += [f"{row.label}: {row.note}" for row, _ in lines if row.note]
    return said + problems


def markdown(study: Study) -> str:
    """The study as a Markdown page."""
    columns, lines, winner, problems = _lines(study)
    out = [f"# Study {study.name}", ""]
    out.append("| " + " | ".join(columns) + " |")
    out.append("|" + "|".join(" --- " if c in ("host", "row", "status") else " ---: " for c in columns) + "|")
    out += ["| " + " | ".join(_escape(cell) for cell in cells) + " |" for _, cells in lines]
    out += [""] + [f"- {_escape(line)}" for line in _captions(lines, winner, problems)]
    return "\n".join(out) + "\n"


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def csv(study: Study) -> str:
    """The study as CSV: full precision, one line a row, with host, arm, budget, topk and note."""
    out = io.StringIO()
    writer = csv_module.writer(out, lineterminator="\n")
    writer.writerow(_CSV)
    for row in rows(study.facts()):
        made = row.configuration
        same = row.same_as_ar or (None, None)
        values = (row.tok_s, row.accept_length, row.verify_steps, row.times_ar, *same, row.boot_s)
        rates = " ".join(f"{level}:{rate}" for level, rate in sorted(row.rates.items()))
        writer.writerow(
            (row.host, row.label, made.arm, made.budget, made.topk, row.status, *values, row.note, rates)
        )
    return out.getvalue()


def write(study: Study) -> list[Path]:
    """Write ``report.md`` and ``report.csv`` into the study's folder; returns their paths."""
    return [study.write_text("report.md", markdown(study)), study.write_text("report.csv", csv(study))]
