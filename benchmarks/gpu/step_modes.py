"""Section F, first half: how much CUDA graphs and planning a step ahead speed up decode steps, each and together."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest.mock import patch

from benchmarks.gpu.decoding import SETTLING_STEPS, Sizes, time_steps
from benchmarks.gpu.house import House, check_events
from benchmarks.gpu.journal import Journal
from engine.core.commit.step import absorb
from engine.model.steps.forward import Steps

STEPS = 24
"""Number of steps that are timed in each mode."""


@dataclass(frozen=True, slots=True)
class Mode:
    graphs: bool
    overlaps: bool

    @property
    def name(self) -> str:
        return f"{'captured' if self.graphs else 'kernel by kernel'}, {'a step ahead' if self.overlaps else 'in turn'}"


MODES = (Mode(True, True), Mode(True, False), Mode(False, True), Mode(False, False))


@contextmanager
def stepping(house: House, mode: Mode) -> Iterator[None]:
    """In the block, make the engine use CUDA graphs and plan steps ahead (`overlaps`) as `mode` says. On enter and
    exit, steps under way are absorbed, and their tokens are not counted."""
    runner = house.runner
    _settle(house)
    assert isinstance(runner._steps, Steps)  # there are no stages
    graphs = runner._steps._graphs if mode.graphs else None
    with patch.object(runner, "overlaps", mode.overlaps), patch.object(runner._steps, "_graphs", graphs):
        yield
        _settle(house)


def _settle(house: House) -> None:
    """Collect and absorb the results of all steps under way. Raises RuntimeError if a request was refused."""
    engine = house.engine
    while engine.state.steps.under_way:
        result, now = engine.executor.collect(), engine.clock()
        if house.runner.overlaps:
            engine.pace.ended(now, result.seconds)
        check_events(absorb(engine.state, result, now))


def tell_capture(journal: Journal, house: House) -> None:
    """Write to the journal what capturing the graphs cost, or that there are none."""
    captured = house.runner.loaded.captured
    if captured is None:
        journal.note("CUDA graphs are left out: there are none on a CPU")
        return
    took = {"seconds": captured.seconds, "MB": captured.num_bytes / 1e6, "kept back MB": captured.reserved / 1e6}
    journal.row("graph capture", f"{len(captured.graphs.rungs) + len(captured.graphs.chunk_rungs)} rungs", **took)


def measure_modes(journal: Journal, house: House, sizes: Sizes, name: str) -> None:
    """Write to the journal the step times and tokens per second of every mode that this device supports, for the
    requests that the engine decodes. Their contexts grow by STEPS and a few tokens from one mode to the next."""
    for mode in (one for one in MODES if house.runner.loaded.captured or not one.graphs):
        with stepping(house, mode):
            for _ in range(SETTLING_STEPS):
                check_events(house.engine.step())
            seconds, generated, _ = time_steps(house, STEPS)
        values = {"step ms": statistics.median(seconds) * 1e3, "tokens/s": generated / sum(seconds)}
        journal.row(f"decode steps, batch {sizes.batch}, {name}", mode.name, **values)
