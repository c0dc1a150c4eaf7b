"""Judges what the neighbour and the server's processes went through beside each attack."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rich.table import Table

from tests.attack.neighbour import Seen

MOST_TIMES = 2.0
"""Largest ratio of the neighbour's p99 beside an attack to its p99 alone."""
MOST_HEALTH_SECONDS = 0.05
"""Longest `GET /health` beside an attack, unless it takes half as long alone."""
MOST_GROWTH, LEAST_GROWTH_BYTES = 0.1, 16 << 20
"""Growth of a process's RSS that is allowed: this share of what it was, or so many bytes."""

Memory = Mapping[str, int]
"""RSS in bytes of all processes of each role."""


@dataclass
class Phase:
    """One attack: what the neighbour saw, what the attacker was answered, and the memory before and after."""

    name: str
    seen: Seen = field(default_factory=Seen)
    answers: Counter[str] = field(default_factory=Counter)
    before: Memory = field(default_factory=dict)
    most: Memory = field(default_factory=dict)
    """Memory at its highest during the attack."""
    after: Memory = field(default_factory=dict)
    """Memory when it was back, or when the time for that was over."""
    trouble: list[str] = field(default_factory=list)
    """What was lost, doubled, uncounted or restarted."""


def p99(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[-1] if len(values) > 1 else max(values, default=0.0)


def grown(before: Memory, after: Memory) -> list[str]:
    """Return the roles whose memory is larger after an attack than it may be."""
    return [role for role, size in after.items() if size > allowed_bytes(before.get(role, 0))]


def allowed_bytes(before: int) -> int:
    return before + max(int(MOST_GROWTH * before), LEAST_GROWTH_BYTES)


def failures(alone: Seen, phase: Phase) -> list[str]:
    """Return a sentence for each bound that an attack has broken."""
    found = [*phase.trouble, *phase.seen.failures]
    for what, own, calm in (("TTFT", phase.seen.ttft, alone.ttft), ("ITL", phase.seen.itl, alone.itl)):
        if p99(own) > MOST_TIMES * p99(calm):
            found.append(f"the neighbour's p99 {what} is {p99(own) * 1e3:.0f} ms, alone {p99(calm) * 1e3:.0f} ms")
    slowest = max(phase.seen.health, default=0.0)
    if slowest > max(MOST_HEALTH_SECONDS, MOST_TIMES * p99(alone.health)):
        found.append(f"/health took {slowest * 1e3:.0f} ms")
    for role in grown(phase.before, phase.after):
        found.append(
            f"the RSS of the {role} is {phase.after[role] >> 20} MiB, before it was {phase.before.get(role, 0) >> 20}"
        )
    return [f"beside {phase.name}: {sentence}" for sentence in found]


def table(alone: Seen, phases: Sequence[Phase]) -> Table:
    rows = Table(title="a neighbour and the server beside each attack")
    rows.add_column("beside")
    for column in ("chats", "TTFT p99 ms", "x", "ITL p99 ms", "x", "/health ms", "gateway MiB", "engine MiB"):
        rows.add_column(column, justify="right")
    rows.add_column("the attacker's answers")
    rows.add_column("")
    for phase in (Phase("nothing", alone), *phases):
        seen, ratios = phase.seen, (_times(phase.seen.ttft, alone.ttft), _times(phase.seen.itl, alone.itl))
        figures = [f"{p99(seen.ttft) * 1e3:.0f}", ratios[0], f"{p99(seen.itl) * 1e3:.0f}", ratios[1]]
        figures += [f"{max(seen.health, default=0.0) * 1e3:.0f}", _course(phase, "gateway"), _course(phase, "engine")]
        answers = ", ".join(f"{answer}: {count}" for answer, count in phase.answers.most_common(4))
        rows.add_row(phase.name, str(len(seen.ttft)), *figures, answers, "FAILED" if failures(alone, phase) else "")
    return rows


def _times(values: Sequence[float], alone: Sequence[float]) -> str:
    return f"{p99(values) / p99(alone):.2f}" if p99(alone) else ""


def _course(phase: Phase, role: str) -> str:
    return " ".join(f"{memory.get(role, 0) >> 20}" for memory in (phase.before, phase.most, phase.after) if memory)
