"""Section F: a profile of decode steps at the 8B shape as in production, which shows where the device waits for the
host and where it spends its time, and steps with and without CUDA graphs and planning ahead (step_modes.py).

A gap is a span between two kernels in which nothing runs on the device. Gaps of more than 50 microseconds are caused by
the host: planning, launching or waiting.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.decoding import FULL, RANKS, TINY, Wave, end_wave, start_wave
from benchmarks.gpu.house import House, build_house, check_events
from benchmarks.gpu.journal import Journal
from benchmarks.gpu.shapes import spread
from benchmarks.gpu.step_modes import measure_modes, tell_capture

LEAST_GAP_US = 50.0
STEPS = 8
MOST_ROWS = 12
LEAST_S = 5.0


@dataclass(frozen=True, slots=True)
class Span:
    """An operation that ran on the device. Times are in microseconds."""

    name: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Gap:
    us: float
    before: str
    after: str


def find_gaps(spans: Iterable[Span], least_us: float) -> list[Gap]:
    """Return the spans of more than `least_us` microseconds in which nothing ran, with the names of the operations
    before and after. The operations may overlap and come in any order."""
    gaps, last = [], None
    for span in sorted(spans, key=lambda one: one.start):
        if last is not None and span.start - last.end > least_us:
            gaps.append(Gap(span.start - last.end, last.name, span.name))
        if last is None or span.end > last.end:
            last = span
    return gaps


def run(journal: Journal) -> None:
    sizes = TINY if journal.tiny else FULL
    with tempfile.TemporaryDirectory(prefix="loralane-8b-") as scratch:
        house = build_house(sizes.house, Path(scratch), journal.tell)
        own = house.register(spread(RANKS, sizes.batch), "a")
        tell_capture(journal, house)
        one, base = (own[1],) * sizes.batch, (None,) * sizes.batch
        for name, adapters in (("base", base), ("1 adapter, rank 16", one), (f"{sizes.batch} adapters", own)):
            with journal.case(name, LEAST_S):
                names = start_wave(house, Wave(name, adapters), sizes.prompt)
                spans = profiled(house)
                write(journal, name, spans, list(find_gaps(spans, LEAST_GAP_US)))
                measure_modes(journal, house, sizes, name)
                end_wave(house, names)


def profiled(house: House) -> list[Span]:
    """Profile STEPS decode steps of the engine's requests. Returns the operations that ran on the device.

    On a CPU these are torch's operations, which only tests that the profile is parsed correctly.
    """
    on_gpu = house.runner.facts.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as profiler:
        for _ in range(STEPS):
            check_events(house.engine.step())
    wanted = torch.autograd.DeviceType.CUDA if on_gpu else torch.autograd.DeviceType.CPU
    return [
        Span(event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events() or ()
        if event.device_type == wanted
    ]


def write(journal: Journal, name: str, spans: Sequence[Span], gaps: Sequence[Gap]) -> None:
    if not spans:
        raise RuntimeError("the profiler saw nothing on the device")
    begun, ended = min(span.start for span in spans), max(span.end for span in spans)
    idle = sum(gap.us for gap in find_gaps(spans, 0.0))
    journal.row(
        "device in a decode step",
        name,
        **{
            "step us": (ended - begun) / STEPS,
            "idle us": idle / STEPS,
            "launches": len(spans) // STEPS,
            f"gaps > {LEAST_GAP_US:.0f} us a step": len(gaps) / STEPS,
            "longest us": max((gap.us for gap in gaps), default=0.0),
        },
    )
    places: dict[str, list[float]] = {}
    for gap in gaps:
        places.setdefault(f"{_short(gap.before)} -> {_short(gap.after)}", []).append(gap.us)
    for place, found in sorted(places.items(), key=lambda item: -sum(item[1]))[:MOST_ROWS]:
        values = {"a step": len(found) / STEPS, "us a step": sum(found) / STEPS, "longest us": max(found)}
        journal.row(f"host gaps, {name}", place, **values)
    spent: Counter[str] = Counter()
    for span in spans:
        spent[_short(span.name)] += round(span.end - span.start)
    for kernel, us in spent.most_common(MOST_ROWS):
        journal.row(f"time on the device, {name}", kernel, **{"us a step": us / STEPS})


def _short(name: str) -> str:
    return name if len(name) <= 44 else f"{name[:41]}..."
