"""Runs one simulation: a workload on the real scheduling core, with a cost model in place of the device."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from engine.core.config import CoreConfig
from engine.core.messages.commands import AdapterFetched, AddAdapter, Submit
from engine.core.messages.requests import Lane, Request
from engine.engine import Engine
from lab.devices.cost import DeviceSpec
from lab.sim.baselines import AS_SERVED, Mode, engine_under
from lab.sim.collect import Collector
from lab.sim.report import Report, make_report
from lab.sim.timed import Copies, StepObserver, TimedExecutor, VirtualClock, VirtualDisk
from lab.traffic.traces import Arrival
from lab.traffic.workload import RequestMaker, Workload, backlog_arrivals

TICK_S = 0.001
"""Virtual seconds by which the clock advances while the engine delays its work, as when the dynamic scheduler waits for
more requests to form a batch."""
STALL_S = 3600.0
"""Virtual seconds without a step, after which the engine is taken to be stuck."""
PROGRESS_PARTS = 400
"""Approximate number of progress calls in one simulation."""

Progress = Callable[[float], None]
"""Callback that receives, from time to time, the fraction of the workload's virtual time that has passed."""


class Stalled(RuntimeError):
    """Raised if the simulated engine does no step for `STALL_S` virtual seconds with work left; the message says how
    much."""


class Clock(Protocol):
    """A clock in seconds from the beginning of a run, which virtual time or sleeping advances."""

    @property
    def now(self) -> float: ...

    def advance(self, seconds: float) -> None: ...

    def advance_to(self, when: float) -> None:
        """Advance the clock to `when`, by virtual time or by sleeping. Does nothing if that time has passed."""


@dataclass(frozen=True, slots=True)
class Setup:
    """The simulated engine and device that a workload runs on."""

    device: DeviceSpec
    core: CoreConfig
    mode: Mode = AS_SERVED
    overlaps: bool = False
    """True means that each step is planned while the one before it is computed."""
    host_s: float = 0.0
    """Virtual seconds that the host takes to plan and launch a step."""


def simulate(setup: Setup, workload: Workload, progress: Progress = lambda _: None) -> Report:
    """Run a workload on the simulated engine, with a virtual clock, and return the report. Calls `progress` from time
    to time. Raises Stalled if no step is done for `STALL_S` with work left."""
    # Without a backlog, the run ends with its requests; with one, when the trace's last has arrived and all interactive
    # ones have ended.
    with no_collection():
        run = Run(setup.core, workload, clock := VirtualClock())
        run.engine = make_engine(setup, workload, clock, run.collector.step, run.rest)
        run.to_end(progress)
    return make_report(run.engine.state, run.collector, run.clock.now, workload)


def make_engine(
    setup: Setup,
    workload: Workload,
    clock: VirtualClock,
    observe: StepObserver,
    rest: Callable[[float], None],
    seed: int = 0,
    copies: Copies = lambda plan: 0,
) -> Engine:
    """Return an engine on a virtual clock that knows all adapters of a workload, in host memory as far as there is
    room.

    Args:
        observe: called with each step.
        rest: called with the seconds by which the engine delays a step; must advance the clock.
        seed: of the noise, added to the workload's.
        copies: returns the number of pages that a step copies besides its plan's.
    """
    ranks, device = workload.ranks(), setup.device
    disk = VirtualDisk(clock, device.disk_bytes_per_s)
    noise = device.noise_sigma, workload.seed + seed
    executor = TimedExecutor(
        device.cost, clock, disk, ranks, observe, *noise, setup.overlaps, setup.host_s, copies=copies
    )
    engine = engine_under(setup.mode, setup.core, executor, clock=clock, sleep=rest)
    for adapter_hash, rank in ranks.items():
        num_pages = device.adapter_pages(rank)
        engine.inbox.put(AddAdapter(adapter_hash, num_pages, rank, num_pages * device.page_bytes, is_read=True))
        engine.inbox.put(AdapterFetched(adapter_hash, 0.0))
    return engine


class Run:
    """Submits a workload's requests to an engine when they arrive, and collects what becomes of them. The engine and
    its clock are virtual, or real ones (`lab.sim.replay`)."""

    def __init__(self, core: CoreConfig, workload: Workload, clock: Clock) -> None:
        self.clock = clock
        self.collector = Collector(core, workload.horizon if workload.backlog else math.inf)
        self.engine: Engine
        self._workload = workload
        self._make = RequestMaker(workload.predicted, workload.seed, limited=workload.limited)
        self._trace = iter(workload.trace)
        self._next: Arrival | None = next(self._trace, None)
        self._backlog = backlog_arrivals(workload, workload.backlog) if workload.backlog else iter(())
        self._stalled_since = 0.0

    def to_end(self, progress: Progress) -> None:
        whole, shown = max(self._workload.horizon, TICK_S), 0.0
        while not self._ended:
            self._submit_arrived()
            self._advance()
            if self.clock.now >= shown + whole / PROGRESS_PARTS:
                shown = self.clock.now
                progress(min(1.0, shown / whole))
        progress(1.0)

    def rest(self, seconds: float) -> None:
        """Function that the engine calls to sleep: advance the clock by `seconds`, and submit the requests that arrive
        meanwhile, so that the next step can include them."""
        self.clock.advance(seconds)
        self._submit_arrived()

    @property
    def _ended(self) -> bool:
        """Return whether the simulation is over: without a backlog, all requests have ended; with one, the horizon has
        passed and all interactive requests have ended."""
        if self._next is not None:
            return False
        if self._workload.backlog is None:
            return not self.collector.unfinished
        return self.clock.now >= self._workload.horizon and not self.collector.outstanding[Lane.INTERACTIVE]

    def _advance(self) -> None:
        """Run a step and collect its events; if no time passes, advance the clock by a tick or, if there is no work, to
        the next arrival. Raises Stalled."""
        before = self.clock.now
        if self.engine.state.has_work or self.collector.unfinished:
            self.collector.take(self.engine.step(), self.clock.now)
            if self.clock.now > before:
                self._stalled_since = self.clock.now
                return
            self.clock.advance_to(min(before + TICK_S, self._next.time if self._next else before + TICK_S))
            self._check_stalled()
        else:
            self._stalled_since = self._next.time if self._next else before
            self.clock.advance_to(self._stalled_since)

    def _check_stalled(self) -> None:
        if self.clock.now > self._stalled_since + STALL_S:
            waiting, running = len(self.collector.unfinished), len(self.engine.state.running)
            raise Stalled(f"no step for {STALL_S:g} s with {waiting} requests unfinished, {running} running")

    def _submit_arrived(self) -> None:
        now = self.clock.now
        while self._next is not None and self._next.time <= now:
            self._submit(self._next)
            self._next = next(self._trace, None)
        backlog = self._workload.backlog
        if backlog is not None and now < self._workload.horizon:
            while self.collector.outstanding[Lane.BATCH] < backlog.size:
                self._submit(next(self._backlog)._replace(time=now), backlog.deadline_s)

    def _submit(self, arrival: Arrival, deadline_s: float | None = None) -> None:
        self.submit(self._make(arrival, deadline_s))

    def submit(self, request: Request) -> None:
        self.collector.submit(request)
        self.engine.inbox.put(Submit(request))


@contextmanager
def no_collection() -> Iterator[None]:
    """Disable the garbage collector in the block, and restore it after. A simulation creates no reference cycles, and
    searching millions of objects for them takes a third of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
