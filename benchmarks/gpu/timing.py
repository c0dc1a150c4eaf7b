"""Times calls on a device, inside CUDA graphs if they can be captured, after flushing the caches, as in production."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.journal import first_line

Call = Callable[[], object]

FLUSH_BYTES = 256 << 20
"""Size in bytes of the buffer that is written between two timings to flush caches: several times any L2."""
LARGE_BYTES = 1 << 30
WARMUPS = 2
MOST_REPEATS = 30
ENOUGH_S = 0.25
"""Total seconds of measured time after which no more repetitions are needed for the median."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Median microseconds of one call. `how` is graph, events (it could not be captured) or clock (there is no GPU)."""

    us: float
    how: str


def time_calls(calls: Sequence[Call], device: torch.device) -> Timing:
    """Return the time of one call: the median time of a round through all calls, divided by their number.

    Pass so many calls over different memory that together they exceed the L2, which is flushed only between rounds.
    """
    if device.type != "cuda":
        return Timing(_clock(calls) / len(calls), "clock")
    for _ in range(WARMUPS):
        _round(calls)
    torch.cuda.synchronize()
    play, how = _capture(calls)
    return Timing(_events(play) / len(calls), how)


def time_host(call: Call, device: torch.device, repeats: int = 20) -> float:
    """Return the median microseconds of `repeats` calls, including the work that each started on the device."""
    taken = []
    for _ in range(repeats + WARMUPS):
        started = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        taken.append((time.perf_counter() - started) * 1e6)
    return statistics.median(taken[WARMUPS:])


def memory_bandwidth(device: torch.device, tiny: bool = False) -> float:
    """Return the bytes per second that a kernel moves at most: the limit of memory-bound kernels. It is the larger of
    what a kernel reads and writes when it negates 1 GiB of numbers, and of what it reads when it adds them up. A copy
    would not do: in a CUDA graph it goes to the copy engine, which reached 2.8 TB/s on an H200 whose kernels reach
    more."""
    count = ((1 << 20) if tiny else LARGE_BYTES) // 4
    source = torch.ones(count, dtype=torch.float32, device=device)
    target, total = torch.empty_like(source), torch.empty((), device=device)
    negate, add_up = partial(torch.neg, source, out=target), partial(torch.sum, source, dim=0, out=total)
    rates = [moved * 4 * count / time_calls([call] * 4, device).us for moved, call in ((2, negate), (1, add_up))]
    return max(rates) * 1e6


def _round(calls: Sequence[Call]) -> None:
    for call in calls:
        call()


def _capture(calls: Sequence[Call]) -> tuple[Call, str]:
    """Capture one round through `calls` as a CUDA graph and replay it once. Returns a function that runs a round, and
    how it is timed: "graph", or "events" if capturing failed, which is printed."""
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
    """Return the median microseconds of `play`, which runs a round, timed by CUDA events after flushing the caches."""
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
