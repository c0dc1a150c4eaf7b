"""What the sections are and decide; formats their findings as plain text and as JSON. Needs no torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.journal import Findings, Value, read_journal, shown

OK, FAILED, CUT, CRASHED = "ok", "failed", "out of time", "crashed"


@dataclass(frozen=True, slots=True)
class Section:
    """A section of the suite.

    Attributes:
        share: Part of the time budget, relative to the others'. Time that a section leaves goes to later ones.
        decides: What its figures are for.
    """

    title: str
    share: float
    decides: str


SECTIONS = {
    "A": Section(
        "Correctness on the device",
        0.5,
        "If anything fails here, no figure of the other sections counts.",
    ),
    "B": Section(
        "Kernels against their byte limits",
        0.13,
        "Kernels that reach less than 80 % of the measured bandwidth are tuned next, the longest of a step first.",
    ),
    "C": Section(
        "Peers' kernels",
        0.07,
        "Where a peer's kernel is faster on the same work, its approach is tried, or its library becomes the backend.",
    ),
    "D": Section(
        "Decoding at the 8B shape",
        0.1,
        "The share of the byte limit that is lost outside of kernels, and what adapters cost: 1, 8, 64 and 2,000.",
    ),
    "E": Section(
        "Lanes",
        0.08,
        "Whether interactive TTFT and ITL beside a batch backlog hold their goals, or batch steps must be shorter.",
    ),
    "F": Section(
        "A decode step: graphs, a step ahead, host gaps",
        0.05,
        "Whether graphs and planning ahead stay the default, and which gap of more than 50 us is closed next.",
    ),
    "G": Section(
        "Steps with prompts",
        0.07,
        "Up to how many tokens mixed steps are captured, and the default token budget of a step.",
    ),
}


def share(names: Sequence[str], first: int = 1) -> float:
    """Return the part of the time for sections `names` that the first of them get, `first` in number."""
    shares = [SECTIONS[name].share for name in names]
    return sum(shares[:first]) / sum(shares)


@dataclass(frozen=True)
class Outcome:
    """The result of one section, which ran for `seconds` in a process of its own.

    Attributes:
        status: OK; FAILED if cases failed; CUT if the time was up; CRASHED if its process exited with an error.
    """

    name: str
    title: str
    status: str
    seconds: float
    findings: Findings


def is_good(outcomes: Sequence[Outcome]) -> bool:
    return all(outcome.status == OK for outcome in outcomes)


def outcome_of(name: str, path: Path) -> Outcome:
    """Return the outcome of section `name` from its journal."""
    findings = read_journal(path)
    code = findings.exit.get("code")
    if code:
        findings.failures.append((f"section {name}", f"its process ended with {code}; see its standard error"))
    is_whole = findings.finished >= int(findings.exit.get("processes") or 1)
    status = CRASHED if code else FAILED if findings.failures else OK if is_whole else CUT
    return Outcome(name, SECTIONS[name].title, status, float(findings.exit.get("seconds") or 0), findings)


def document(folder: Path, wanted: Mapping[str, Value]) -> dict[str, Any]:
    """Return the findings of all journals in a folder whose environment is `wanted`, as a document to write as JSON."""
    found = [outcome_of(name, folder / f"{name}.jsonl") for name in SECTIONS]
    return {
        "environment": dict(wanted),
        "sections": {
            outcome.name: {
                "title": outcome.title,
                "decides": SECTIONS[outcome.name].decides,
                "status": outcome.status,
                "seconds": outcome.seconds,
                "tables": {
                    table: [{"case": case, **values} for case, values in rows]
                    for table, rows in outcome.findings.rows.items()
                },
                "notes": outcome.findings.notes,
                "failures": [{"case": case, "reason": reason} for case, reason in outcome.findings.failures],
            }
            for outcome in found
            if outcome.findings.environment == wanted
        },
    }


def environment(outcomes: Sequence[Outcome]) -> dict[str, Value]:
    """Return the day, the device with its properties, driver and versions; empty if no section got far enough to record
    them."""
    return next((outcome.findings.environment for outcome in outcomes if outcome.findings.environment), {})


def file_name(environment: Mapping[str, Value]) -> str:
    device = re.sub(r"[^a-z0-9]+", "-", str(environment["device"]).lower()).strip("-")
    return f"{device}-{environment['date']}.json"


def text(outcomes: Sequence[Outcome]) -> str:
    """Return the full report as plain text for a terminal: the environment, and each section with its tables."""
    lines = [f"{name}: {value}" for name, value in environment(outcomes).items()]
    for outcome in outcomes:
        lines += ["", *_section(outcome)]
    return "\n".join(lines)


def _section(outcome: Outcome) -> Iterator[str]:
    head = f"{outcome.name}. {outcome.title} -- {outcome.status}, {outcome.seconds:.0f} s"
    yield from (head, "=" * len(head), SECTIONS[outcome.name].decides)
    for table, rows in outcome.findings.rows.items():
        yield from ("", table, *_table(rows))
    for note in outcome.findings.notes:
        yield f"note: {note}"
    for case, reason in outcome.findings.failures:
        yield f"FAILED {case}: {reason}"


def _table(rows: Sequence[tuple[str, dict[str, Value]]]) -> Iterator[str]:
    names = list(dict.fromkeys(name for _, values in rows for name in values))
    cells = [["", *names], *([case, *(shown(values.get(name)) for name in names)] for case, values in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(names) + 1)]
    for line in cells:
        first, *rest = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        yield "  ".join([first, *(cell.strip().rjust(width) for cell, width in zip(rest, widths[1:], strict=True))])
