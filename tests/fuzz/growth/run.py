"""Sends the cases of a plan to a target, one after the other, and reports those that cost too much."""

from __future__ import annotations

import statistics
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import NamedTuple

from tests.fuzz.growth.beside import PACE_SECONDS
from tests.fuzz.growth.measured import Figures, Lost, Measured, measured
from tests.fuzz.growth.plan import Case
from tests.fuzz.growth.requests import Request

HOLD_SECONDS = 0.02
KEPT_BYTES = 64 * 2**20
SLOWER = 2.0
"""How much longer the neighbour's longest wait may be than it is alone."""
HANG_SECONDS = 30.0
AGAIN = 3
"""How often a suspicious case is sent again, alone; a figure counts that is too high every time."""
NO_ACCIDENT = 0.2
"""Seconds of a hold that are none of the machine's whims, and are not measured again."""
MOST_BYTES = 2**30
"""A target that has grown beyond this is replaced."""


@dataclass
class Worst:
    """The highest figures of a field's cases."""

    hold: float = 0.0
    kept: int = 0
    slowed: float = 1.0
    case: Case | None = None
    """The one with the longest hold."""
    cases: int = 0

    def add(self, case: Case, figures: Figures, slowed: float) -> None:
        if figures.hold >= self.hold:
            self.hold, self.case = figures.hold, case
        self.kept, self.slowed, self.cases = max(self.kept, figures.kept), max(self.slowed, slowed), self.cases + 1


@dataclass
class Report:
    """What a run has found so far."""

    seed: int
    failures: list[str] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    worst: dict[str, Worst] = field(default_factory=dict)
    """By operation and field."""
    first_bytes: int = 0
    last_bytes: int = 0
    """Memory of the gateway's process after the first case and after the last one."""

    def fail(self, case: Case, what: str) -> None:
        again = f"python -m tests.fuzz.growth --seed {self.seed} --case {case.number}"
        self.failures.append(f"case {case.number}: {what}\n  {case}\n  again: {again}")


class Verdict(NamedTuple):
    """Which figures of a case are too high, in words; empty where none is."""

    hold: str = ""
    kept: str = ""
    slowed: str = ""

    def __and__(self, other: Verdict) -> Verdict:
        """Return what both find, in the words of the first."""
        return Verdict(*(mine if theirs else "" for mine, theirs in zip(self, other, strict=True)))

    @property
    def words(self) -> str:
        return "; ".join(filter(None, self))


def judged(figures: Figures, alone: float) -> Verdict:
    slowed = figures.slowed(alone)
    return Verdict(
        f"the loop was held for {figures.hold * 1000:.1f} ms ({figures.where})" if figures.hold > HOLD_SECONDS else "",
        f"{figures.kept / 2**20:.0f} MiB were kept" if figures.kept > KEPT_BYTES else "",
        f"the neighbour waited {slowed:.1f} times as long" if slowed > SLOWER else "",
    )


Seen = Callable[[Case, Figures | None, str], None]
"""Called after each case with its figures, which a lost target has not, and with what was wrong, in words."""


async def run(
    seed: int, cases: Sequence[Case], seen: Seen = lambda case, figures, wrong: None, again: int = AGAIN
) -> Report:
    """Send the cases. Those that cost too much are sent `again` so many times, before they count."""
    report = Report(seed)
    async with _Bench() as bench:
        for case in cases:
            figures, wrong = await _tried(bench, report, case, again)
            seen(case, figures, wrong)
            if wrong:
                report.fail(case, wrong)
        if bench.target is not None:
            report.last_bytes = bench.target.memory().get(bench.target.process.pid, 0)
    report.failures += bench.broken
    return report


async def _tried(bench: _Bench, report: Report, case: Case, again: int) -> tuple[Figures | None, str]:
    """Return what a case costs, and what is wrong with that, in words."""
    request = case.request()
    try:
        target = await bench.ready()
        figures = await target.cost(request, HANG_SECONDS, KEPT_BYTES)
        report.first_bytes = report.first_bytes or target.memory().get(target.process.pid, 0)
        report.outcomes[figures.ending.words] += 1
        alone = bench.usual_gap(figures)
        verdict = judged(figures, alone)
        wrong = await _again(bench, case, request, verdict, again) if figures.hold < NO_ACCIDENT else verdict.words
        worst = report.worst.setdefault(f"{case.field.operation} | {case.field.path}", Worst())
        worst.add(case, figures, figures.slowed(alone))
    except Lost as lost:
        await bench.replace()
        report.outcomes["lost"] += 1
        return None, str(lost)
    if figures.ending.wrong:
        wrong = "; ".join(filter(None, (figures.ending.words, wrong)))
    if max(target.memory().values(), default=0) > MOST_BYTES:
        await bench.replace()
    return figures, wrong


async def _again(bench: _Bench, case: Case, request: Request, verdict: Verdict, again: int) -> str:
    """Return what is wrong with a case each time that it is sent, in words. Raises Lost.

    Memory is looked at in a target that has never seen the case, as another that has grown once may have room for it.
    """
    if verdict.hold or verdict.slowed:
        target = await bench.ready()
        for _ in range(again):
            alone = await target.alone()
            verdict &= judged(await target.cost(request, HANG_SECONDS, KEPT_BYTES), alone)._replace(kept="kept")
            if not (verdict.hold or verdict.slowed):
                break
    if verdict.kept and again:
        verdict = verdict._replace(kept=await _kept_anew(case, request))
    return verdict.words


async def _kept_anew(case: Case, request: Request) -> str:
    """Return how much a fresh target keeps of a case that is sent to it a few times, in words; empty: little."""
    async with measured([case.small()]) as target:
        first = target.memory()
        for _ in range(AGAIN):
            await target.cost(request, HANG_SECONDS, KEPT_BYTES)
        kept = await target.kept(first, KEPT_BYTES)
    return f"{kept / 2**20:.0f} MiB were kept by a new gateway of {AGAIN} such requests" if kept > KEPT_BYTES else ""


class _Bench:
    """Has a target ready."""

    def __init__(self) -> None:
        self.target: Measured | None = None
        self._stack = AsyncExitStack()
        self.broken: list[str] = []
        """What was wrong with the neighbour's streams, and with the ends of targets."""
        self._gaps: deque[float] = deque(maxlen=50)

    async def __aenter__(self) -> _Bench:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.replace()

    async def ready(self) -> Measured:
        if self.target is None:
            self.target = await self._stack.enter_async_context(measured())
        return self.target

    async def replace(self) -> None:
        """End the target, so that the next case has another."""
        await self._stack.aclose()
        self.broken += self.target.broken if self.target else []
        self.target = None

    def usual_gap(self, figures: Figures) -> float:
        """Return the median of the neighbour's longest waits beside the last cases, in seconds."""
        if figures.gap:
            self._gaps.append(figures.gap)
        return max(PACE_SECONDS, statistics.median(self._gaps) if self._gaps else 0.0)
