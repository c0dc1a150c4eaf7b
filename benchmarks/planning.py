"""Time to plan a step, by numbers of running and waiting requests and known adapters: `python -m benchmarks.planning`.

It runs the core without a model. The engine brings sequences of both lanes, of 32 tenants and their adapters, into the
state; then the same plan is computed repeatedly. Steady decoding is the common step. The other column is a step that
examines the waiting queue because some slots are free. Host memory holds half of the adapters and fetches never finish,
so that with thousands of adapters many requests wait for one that is not in memory.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from benchmarks.runner import JSON, Run, benchmark, option, table_of
from engine.core.commit.apply import apply_commands
from engine.core.config import CoreConfig, Scheduling
from engine.core.messages.commands import AdapterFetched, AddAdapter, Submit
from engine.core.messages.features import StepFeatures
from engine.core.messages.requests import Lane, Request, SamplingParams
from engine.core.messages.step import StepPlan
from engine.core.plan.next_step import plan_step
from engine.core.predict.step_time import StepTimeModel
from engine.core.state.engine_state import EngineState
from engine.engine import Engine
from engine.executor.fake import FakeExecutor

TENANTS, RANK, ADAPTER_PAGES = 32, 16, 2
PROMPT, OUTPUT = 64, 512
DEFAULTS = [
    *((256, waiting, 64) for waiting in (0, 1_000, 10_000, 100_000)),
    *((running, 10_000, 64) for running in (64, 512, 1024)),
    *((256, waiting, adapters) for adapters in (2_000, 20_000) for waiting in (0, 10_000)),
]


class Slow(FakeExecutor):
    """An executor whose fetches never finish once `slow` is set."""

    slow = False

    def fetch(self, plan: StepPlan) -> None:
        if not self.slow:
            super().fetch(plan)


@dataclass(frozen=True, slots=True)
class Cost:
    """Planning times of one configuration, in milliseconds."""

    running: int
    waiting: int
    adapters: int
    decoding: float
    """Median while every slot is taken."""
    starting: float
    """Median when a sixteenth of the slots is free."""
    p99: float
    """99th percentile while every slot is taken."""


COLUMNS = "running | waiting | adapters | decoding p50 | decoding p99 | starting a sixteenth p50"
CELLS = "{0.running:,} | {0.waiting:,} | {0.adapters:,} | {0.decoding:.2f} | {0.p99:.2f} | {0.starting:.2f}"


def measure(running: int, waiting: int, adapters: int, repeat: int) -> Cost:
    full, some = (_engine(running, waiting, adapters, started) for started in (running, running - running // 16))
    decoding, starting = (list(_time_plans(engine, repeat)) for engine in (full, some))
    p50s = (float(np.median(times)) for times in (decoding, starting))
    return Cost(running, waiting, adapters, next(p50s), next(p50s), float(np.percentile(decoding, 99)))


def _engine(slots: int, waiting: int, adapters: int, started: int) -> Engine:
    """Return an engine with `slots` slots that decodes `started` sequences, a quarter of them interactive, and has
    `waiting` batch requests in its queue. Half of all requests use one of the `adapters`."""
    pages = (slots + 8) * (PROMPT + OUTPUT) // 16 + slots * ADAPTER_PAGES
    everybody = Scheduling(itl_stretch=1e6, ttft_stretch=1e6, yield_stretch=1e6, yield_bound_s=1e6, probe_every=1 << 30)
    config = CoreConfig(
        num_pages=pages,
        max_seqs=slots,
        token_budget=slots * PROMPT,
        max_waiting=1 << 20,
        host_adapter_bytes=max(adapters // 2, slots),
        max_resident_adapters=slots,
        scheduling=everybody,
    )
    executor = Slow()
    engine = Engine(EngineState.create(config), executor)
    for number in range(adapters):
        engine.inbox.put(AddAdapter(f"adapter-{number}", ADAPTER_PAGES, RANK, num_bytes=1, is_read=True))
        engine.inbox.put(AdapterFetched(f"adapter-{number}", 0.05))
    for number in range(started):
        engine.inbox.put(Submit(_request(number, adapters, Lane.BATCH if number % 4 else Lane.INTERACTIVE)))
    while len(engine.state.running) < started or any(s.num_remaining > 1 for s in engine.state.running.values()):
        engine.step()
    engine.state.ledger.model = _taught(engine.state)
    executor.slow = True
    for number in range(started, started + waiting):
        engine.inbox.put(Submit(_request(number, adapters, Lane.BATCH)))
    apply_commands(engine.state, engine.inbox.drain())
    return engine


def _request(number: int, adapters: int, lane: Lane) -> Request:
    prompt = tuple(range(number * 7, number * 7 + PROMPT - number % 16))  # pages fill up at different steps
    adapter = f"adapter-{number * 7 % adapters}" if number % 2 else None
    params = SamplingParams(OUTPUT, ignore_eos=True)
    return Request(f"r{number}", prompt, params, adapter, lane, tenant=f"t{number % TENANTS}", arrival=0.0)


def _taught(state: EngineState) -> StepTimeModel:
    """Return a step time model that has observed a device so fast that every sequence gets its chunk, which gives the
    largest plan. `state` has its rules."""
    rules = state.config.scheduling
    model = StepTimeModel(rules.forgetting, rules.knots, rules.margin_floor, rules.margin_ceiling)
    for step in range(64):
        features = StepFeatures(16.0 * (step % 5), 8.0 * (step % 30), 4000.0, 500.0, float(step % 7), 64.0, 0.0)
        model.observe(features, 0.01 + 1e-9 * features.tokens)
    return model


def _time_plans(engine: Engine, repeat: int) -> Iterator[float]:
    """Yield the milliseconds that each of `repeat` plans takes, garbage collection included; no plan is carried out."""
    for _ in range(repeat):
        start = time.perf_counter()
        plan = plan_step(engine.state, engine.policy, 1.0)
        yield (time.perf_counter() - start) * 1e3
        assert len(plan.chunks) >= len(engine.state.running) - 8, "the plan is not the full one"


@benchmark(option("--repeat", 100, "plans timed in each row"), JSON)
def bench(run: Run) -> None:
    costs = [measure(*row, run.options.repeat) for row in run.track(DEFAULTS, "Planning")]
    run.show(table_of("Planning a step, ms", costs, COLUMNS, CELLS), costs)


if __name__ == "__main__":
    bench.main()
