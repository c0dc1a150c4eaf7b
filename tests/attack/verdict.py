"""Judges what the neighbour and the server's processes went through beside each attack.

The neighbour's times are compared with the largest of those that it has seen without an attack: alone, and beside the
controls of `controls.py`.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rich.table import Table

from tests.attack.neighbour import Seen

MOST_TIMES = 2.0
"""Largest ratio of the neighbour's p99 beside an attack to its largest p99 without one."""
MOST_HEALTH_SECONDS = 0.05
"""Longest `GET /health` beside an attack, unless it takes half as long without one."""
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
    """Return the roles whose memory is larger after an attack than it may be. A role whose first process has started
    during the attack is judged by the next one."""
    return [role for role, size in after.items() if role in before and size > allowed_bytes(before[role])]


def allowed_bytes(before: int) -> int:
    return before + max(int(MOST_GROWTH * before), LEAST_GROWTH_BYTES)


def failures(calm: Sequence[Seen], phase: Phase) -> list[str]:
    """Return a sentence for each bound that an attack has broken. `calm` is what the neighbour has seen without one."""
    found = [*phase.trouble, *phase.seen.failures]
    for what, field_name in (("TTFT", "ttft"), ("ITL", "itl")):
        own, usual = p99(getattr(phase.seen, field_name)), max(p99(getattr(seen, field_name)) for seen in calm)
        if own > MOST_TIMES * usual:
            found.append(f"the neighbour's p99 {what} is {own * 1e3:.0f} ms, without an attack {usual * 1e3:.0f} ms")
    slowest = max(phase.seen.health, default=0.0)
    if slowest > max(MOST_HEALTH_SECONDS, MOST_TIMES * max(p99(seen.health) for seen in calm)):
        found.append(f"/health took {slowest * 1e3:.0f} ms")
    for role in grown(phase.before, phase.after):
        found.append(
            f"the RSS of the {role} is {phase.after[role] >> 20} MiB, before it was {phase.before.get(role, 0) >> 20}"
        )
    return [f"beside {phase.name}: {sentence}" for sentence in found]


def table(alone: Seen, controls: Sequence[Phase], phases: Sequence[Phase]) -> Table:
    """Return a row for each phase; its ratios are to the neighbour's times alone."""
    calm = [alone, *(control.seen for control in controls)]
    rows = Table(title="a neighbour and the server beside each attack")
    rows.add_column("beside")
    for column in ("chats", "TTFT p99 ms", "x", "ITL p99 ms", "x", "/health ms", "gateway MiB", "engine MiB"):
        rows.add_column(column, justify="right")
    rows.add_column("the attacker's answers")
    rows.add_column("")
    for phase in (Phase("nothing", alone), *controls, *phases):
        seen, ratios = phase.seen, (_times(phase.seen.ttft, alone.ttft), _times(phase.seen.itl, alone.itl))
        figures = [f"{p99(seen.ttft) * 1e3:.0f}", ratios[0], f"{p99(seen.itl) * 1e3:.0f}", ratios[1]]
        figures += [f"{max(seen.health, default=0.0) * 1e3:.0f}", _course(phase, "gateway"), _course(phase, "engine")]
        answers = ", ".join(f"{answer}: {count}" for answer, count in phase.answers.most_common(4))
        rows.add_row(phase.name, str(len(seen.ttft)), *figures, answers, "FAILED" if failures(calm, phase) else "")
    return rows


def _times(values: Sequence[float], alone: Sequence[float]) -> str:
    return f"{p99(values) / p99(alone):.2f}" if p99(alone) else ""


def _course(phase: Phase, role: str) -> str:
    return " ".join(f"{memory.get(role, 0) >> 20}" for memory in (phase.before, phase.most, phase.after) if memory)
