"""How long calls take on a device: inside CUDA graphs wherever they can be captured, with caches as cold as in life."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.gpu.journal import first_line

Call = Callable[[], object]

FLUSH_BYTES = 256 << 20
"""Several times any L2: written between two timings."""
COPY_BYTES = 1 << 30
WARMUPS = 2
MOST_REPEATS = 30
ENOUGH_S = 0.25
"""A median needs no more, of calls that do the same work."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Median microseconds of one call; `how`: graph, events (it could not be captured) or clock (there is no GPU)."""

    us: float
    how: str


def time_calls(calls: Sequence[Call], device: torch.device) -> Timing:
    """The median over rounds through all calls, divided by their number.

    Give it as many calls over different memory as exceed the L2 together; between rounds it is overwritten anyway.
    """
    if device.type != "cuda":
        return Timing(_clock(calls) / len(calls), "clock")
    for _ in range(WARMUPS):
        _round(calls)
    torch.cuda.synchronize()
    play, how = _capture(calls)
    return Timing(_events(play) / len(calls), how)


def time_host(call: Call, device: torch.device, repeats: int = 20) -> float:
    """Median microseconds of a call and of what it started on the device."""
    taken = []
    for _ in range(repeats + WARMUPS):
        started = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        taken.append((time.perf_counter() - started) * 1e6)
    return statistics.median(taken[WARMUPS:])


def copy_bandwidth(device: torch.device, tiny: bool = False) -> float:
    """Bytes a second read and written by a large copy within the device: what a kernel bound by memory can reach."""
    count = (1 << 20) if tiny else COPY_BYTES
    source = torch.ones(count, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * count / (time_calls([lambda: target.copy_(source)] * 4, device).us * 1e-6)


def _round(calls: Sequence[Call]) -> None:
    for call in calls:
        call()


def _capture(calls: Sequence[Call]) -> tuple[Call, str]:
    """One round, to be played again and again."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            _round(calls)
    except RuntimeError as error:
        print(f"not captured, timed by events: {first_line(error)}", file=sys.stderr)
        torch.cuda.synchronize()
        return lambda: _round(calls), "events"
    graph.replay()
    torch.cuda.synchronize()
    return graph.replay, "graph"


def _events(play: Call) -> float:
    """Median microseconds of a round."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    taken: list[float] = []
    while len(taken) < 5 or (len(taken) < MOST_REPEATS and sum(taken) < ENOUGH_S * 1e6):
        flush.zero_()
        begun, done = (_event() for _ in range(2))
        begun.record()
        play()
        done.record()
        done.synchronize()
        taken.append(begun.elapsed_time(done) * 1e3)
    return statistics.median(taken)


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)


def _clock(calls: Sequence[Call]) -> float:
    started = time.perf_counter()
    _round(calls)
    return (time.perf_counter() - started) * 1e6
