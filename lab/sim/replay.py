"""Runs a workload on a real engine, in real time, and reports what a simulation reports, so that both compare."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.core.config import CoreConfig
from engine.core.messages.commands import Abort, DropAdapter
from engine.core.messages.requests import AdapterHash, Request
from engine.core.messages.step import Launch, StepPlan, StepResult
from engine.engine import Engine
from engine.executor.base import Executor
from lab.devices.cost import LiveSequence, StepWork, follow, measure
from lab.sim.baselines import AS_SERVED, Mode, engine_under
from lab.sim.collect import Collector
from lab.sim.report import Report, make_report
from lab.sim.run import Progress, Run
from lab.traffic.workload import Workload, adapter_hash

StepSeen = Callable[[StepWork, float], None]
"""Called after each step with the work in it and the seconds from the beginning of its planning, or from the end of the
step before it if there was no pause between them, to its end."""

PAUSE_S = 0.005
"""A gap between two steps that is longer than this many seconds is a pause, and not work of the host."""
STRIDE = 7919
"""Factor that spreads the token ids of a workload, which count up, over a vocabulary."""


class RealClock:
    """The clock of a run in real time, which sleeps to advance."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Set the clock to 0."""
        self._began = time.perf_counter()

    def __call__(self) -> float:
        return self.now

    @property
    def now(self) -> float:
        return time.perf_counter() - self._began

    def advance(self, seconds: float) -> None:
        time.sleep(seconds)

    def advance_to(self, when: float) -> None:
        time.sleep(max(0.0, when - self.now))


class Watched:
    """An executor that wraps another one to measure it. It passes all calls on, collects each step before the next is
    submitted, and reports the work and duration of each step to `collector` and `seen`."""

    overlaps = False

    def __init__(
        self,
        executor: Executor,
        clock: RealClock,
        ranks: Mapping[AdapterHash, int],
        collector: Collector,
        seen: StepSeen,
    ) -> None:
        self._executor, self._clock, self._ranks, self._collector, self._seen = executor, clock, ranks, collector, seen
        self._live: dict[str, LiveSequence] = {}
        self._plan, self._ended = StepPlan(), 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def submit(self, plan: StepPlan) -> Launch:
        follow(plan, self._live, self._ranks)
        self._plan = plan
        return self._executor.submit(plan)

    def collect(self) -> StepResult:
        result, plan = self._executor.collect(), self._plan
        now, work = self._clock.now, measure(plan, self._live)
        began = self._ended if plan.now - self._ended < PAUSE_S else plan.now
        self._ended = now
        self._collector.step(plan, work, now - began)
        if work.tokens:
            self._seen(work, now - began)
        return result


class _Replay(Run):
    """A `Run` on a real engine. It maps the synthetic token ids of each request into the model's vocabulary, and the
    request's adapter to one that the engine has loaded."""

    def __init__(self, core: CoreConfig, workload: Workload, vocab: int, hashes: Mapping[str, AdapterHash]) -> None:
        self.clock: RealClock
        super().__init__(core, workload, RealClock())
        self._vocab, self._hashes = vocab, hashes

    def submit(self, request: Request) -> None:
        tokens = tuple([1 + token * STRIDE % (self._vocab - 1) for token in request.prompt_ids])
        adapter_hash = self._hashes[request.adapter_hash] if request.adapter_hash else None
        super().submit(request._replace(prompt_ids=tokens, adapter_hash=adapter_hash))


@dataclass(frozen=True, slots=True)
class RealEngine:
    """Parts of a real engine, on which a workload is replayed: the scheduler's settings, the executor, the size of the
    model's vocabulary, and how the engine orders requests."""

    core: CoreConfig
    executor: Executor
    vocab: int
    mode: Mode = AS_SERVED


def replay(
    real: RealEngine,
    workload: Workload,
    folders: Sequence[Path] = (),
    seen: StepSeen = lambda work, seconds: None,
    progress: Progress = lambda _: None,
) -> Report:
    """Run a workload in real time on a new engine with the executor of `real` and the adapters in `folders`, and return
    the report; `seen` is called after each step. Raises ValueError for an adapter of another model, Stalled after an
    hour without a step."""
    hashes: dict[str, AdapterHash] = {}
    run = _Replay(real.core, workload, real.vocab, hashes)
    ranks: dict[AdapterHash, int] = {}
    watched = Watched(real.executor, run.clock, ranks, run.collector, seen)
    run.engine = engine = engine_under(real.mode, real.core, watched, clock=run.clock, sleep=run.rest)
    for index, folder in enumerate(folders):
        host = engine.load_adapter(str(folder))
        hashes[adapter_hash(index)], ranks[host.adapter_hash] = host.adapter_hash, host.rank
    run.clock.start()
    run.to_end(progress)
    report = make_report(engine.state, run.collector, run.clock.now, workload)
    _empty(engine, run.collector, ranks)
    return report


def _empty(engine: Engine, collector: Collector, adapters: Iterable[AdapterHash]) -> None:
    """Abort the requests that a replay has left unfinished, drop its adapters, and run steps until the executor holds
    nothing of them."""
    for request_id in collector.unfinished:
        engine.inbox.put(Abort(request_id))
    for one in adapters:
        engine.inbox.put(DropAdapter(one))
    engine.step()
    while engine.state.has_work or engine.state.released or engine.state.adapters:
        collector.take(engine.step(), 0.0)
