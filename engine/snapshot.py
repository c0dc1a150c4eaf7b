"""A picture of the engine for operators: EngineStats from EngineState, taken between two steps."""

from __future__ import annotations

from collections import Counter

from engine.core.adapters import Adapter
from engine.core.check import leftovers, violations
from engine.core.state import EngineState
from engine.core.types import Lane
from engine.pb import engine_pb2 as pb


def snapshot(state: EngineState, step_seconds: float) -> pb.EngineStats:
    counters, prefix = state.counters, state.prefix
    adapter_pages = sum(len(adapter.pages) for adapter in state.adapters.values())
    referenced = state.pool.num_pages - 1 - len(state.pool.free) - len(prefix.idle)
    problems = violations(state) + ([] if state.sequences else leftovers(state))
    return pb.EngineStats(
        lanes=_lanes(state),
        adapters=_adapters(state),
        total_pages=state.config.usable_pages,
        free_pages=len(state.pool.free),
        kv_pages=referenced - adapter_pages,
        cached_pages=len(prefix.idle),
        adapter_pages=adapter_pages,
        steps=counters.steps,
        preemptions=counters.preemptions,
        recomputed_tokens=counters.recomputed_tokens,
        prompt_tokens=counters.prompt_tokens,
        cached_tokens=counters.cached_tokens,
        generated_tokens=counters.generated_tokens,
        adapter_loads=counters.adapter_loads,
        adapter_evictions=counters.adapter_evictions,
        step_seconds=step_seconds,
        violations=problems,
    )


def _lanes(state: EngineState) -> list[pb.LaneStats]:
    running = Counter(seq.request.lane for seq in state.running.values())
    waiting = Counter(seq.request.lane for seq in state.waiting)
    numbers = {Lane.INTERACTIVE: pb.LANE_INTERACTIVE, Lane.BATCH: pb.LANE_BATCH}
    return [pb.LaneStats(lane=numbers[lane], running=running[lane], waiting=waiting[lane]) for lane in Lane]


def _adapters(state: EngineState) -> list[pb.AdapterStats]:
    def stats(adapter: Adapter) -> pb.AdapterStats:
        return pb.AdapterStats(
            adapter=adapter.id,
            state=adapter.residency.value,
            pages=len(adapter.pages),
            running=adapter.running,
            waiting=adapter.live - adapter.running,
        )

    return [stats(adapter) for adapter in state.adapters.values()]
