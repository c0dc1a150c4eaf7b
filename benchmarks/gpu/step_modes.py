"""Section F, first half: how much CUDA graphs and planning a step ahead speed up decode steps, each and together."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from unittest.mock import patch

from benchmarks.gpu.decoding import Sizes, Wave, timed_steps
from benchmarks.gpu.house import House, check_events
from benchmarks.gpu.journal import Journal
from engine.core.commit import absorb
from engine.core.types import AdapterHash

LEAST_S = 5.0


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
    exit, steps under way are absorbed; the engine must have no requests then."""
    runner = house.runner
    _settle(house)
    graphs = runner._steps._graphs if mode.graphs else None
    with patch.object(runner, "overlaps", mode.overlaps), patch.object(runner._steps, "_graphs", graphs):
        yield
        _settle(house)


def _settle(house: House) -> None:
    """Collect and absorb the results of all steps under way. Raises RuntimeError if a request was refused."""
    engine = house.engine
    while engine.state.under_way:
        result, now = engine.executor.collect(), engine.clock()
        if house.runner.overlaps:
            engine.pace.ended(now, result.seconds)
        check_events(absorb(engine.state, result, now))


def measure_modes(journal: Journal, house: House, sizes: Sizes, adapters: Sequence[AdapterHash]) -> None:
    """Write to the journal the step times and tokens per second of every mode that this device supports, for the base
    model and with `adapters`, and what capturing the graphs cost."""
    if house.runner.captured is None:
        journal.note("CUDA graphs are left out: there are none on a CPU")
    else:
        captured = house.runner.captured
        took = {"seconds": captured.seconds, "MB": captured.num_bytes / 1e6, "kept back MB": captured.reserved / 1e6}
        journal.row("graph capture", f"{len(captured.graphs.rungs) + len(captured.graphs.chunk_rungs)} rungs", **took)
    for mode in (one for one in MODES if house.runner.captured or not one.graphs):
        for name, used in (("base", (None,) * sizes.batch), (f"{sizes.batch} adapters", adapters)):
            with journal.case(f"{mode.name}, {name}", LEAST_S), stepping(house, mode):
                seconds, generated, _ = timed_steps(house, Wave(f"{mode.name}, {name}", used), sizes)
                values = {"step ms": statistics.median(seconds) * 1e3, "tokens/s": generated / sum(seconds)}
                journal.row(f"decode steps, batch {sizes.batch}, {name}", mode.name, **values)
