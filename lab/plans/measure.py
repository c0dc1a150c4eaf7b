"""Measures how long the steps of an engine on this machine take, in closed loops of requests with and without adapters
at each concurrency, and describes it as a device. The machine should do nothing else."""

from __future__ import annotations

import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

from rich.console import Console

from engine.config import EngineConfig, core_config
from engine.core.config import CoreConfig
from engine.core.messages.features import StepFeatures
from engine.core.predict.step_time import Prices, StepTimeModel
from engine.process.files import default_data_dir
from lab.devices.cost import TERMS, StepWork
from lab.sim.baselines import Mode
from lab.sim.replay import RealEngine, replay
from lab.traffic.synthetic import Sizes
from lab.traffic.workload import Backlog, Workload

KNOTS = (8, 32, 128, 512)
"""Numbers of tokens of a step above which each further one may cost more."""
SECONDS, WARM_SECONDS = 2.5, 1.0
"""Seconds that each measured closed loop runs, and that each warm-up loop runs before, whose steps are not measured."""
PROMPT, OUTPUT = Sizes(16, 512), Sizes(8, 64)
"""Sizes of the requests in tokens: short answers, so that many steps compute prompts beside decodes."""
DECODED = Sizes(16, 16), Sizes(64, 64)
"""Sizes of prompts and answers in loops that mostly decode: of one size, so that all sequences decode at the same time.
Without such loops, no step of more than some four tokens was without prompts, and the price of a decode came from these
alone: 3.9 ms on two cores with AVX2, where each of 32 takes 2.5 ms."""
ATTENDED, ATTENDED_LOOPS = (Sizes(1024, 1024), Sizes(64, 64)), 3
"""Sizes of the prompts and answers of a loop that measures the price of context, one request at a time, and how many
times as long as other loops it runs. In other loops, which end after seconds, contexts of decodes are so short and
alike that noise decided the price of a token of context: it was up to 20 times too high."""
ADAPTER_RANKS = (8, 8, 16, 16, 32, 32, 64, 64)
SIZES = (
    "num_pages", "host_pages", "block_size", "max_seqs", "max_model_len", "token_budget", "chosen_experts",
    "max_resident_adapters", "host_adapter_bytes",
)  # fmt: skip
SOURCES = {
    "cost": "Learned by a step-time model from the steps of closed loops of requests, with and without adapters.",
    "noise_sigma": "Spread of the same steps around what the model predicts.",
    "disk_bytes_per_s": "Measured by reading and packing adapters, one after the other, from the page cache.",
    "page_bytes": "As the engine reports it.",
    "adapter_bytes_per_rank": "By the shapes of the model's projections.",
    "engine": "Sizes that the engine chose for this machine.",
}
"""How each figure of a measured device was obtained, by its field in the device's file."""
MAD = 1.4826
"""Ratio of the standard deviation of a normal distribution to its median absolute deviation."""


@dataclass(slots=True)
class Lesson:
    """Collects the work and the duration of measured steps, from which a step-time model learns. `chosen` is the share
    of a layer's experts that are chosen for a token."""

    chosen: float = 1.0
    steps: list[tuple[StepFeatures, float]] = field(default_factory=list)
    """Work and seconds of each step."""

    def see(self, work: StepWork, seconds: float) -> None:
        self.steps.append((StepFeatures(*work.amounts)._replace(launched=float(work.prefill_tokens > 0)), seconds))

    def learned(self) -> StepTimeModel:
        """Return a step-time model that has learned from all collected steps in random order, so that it knows all
        kinds of steps before it takes any for an outlier. All steps count alike."""
        model = StepTimeModel(1.0, KNOTS, 1.0, 2.0, self.chosen)
        for features, seconds in Random(0).sample(self.steps, len(self.steps)):
            model.observe(features, seconds)
        return model


def cost_of(prices: Prices, chosen: float = 1.0) -> dict[str, Any]:
    """Return the cost model with these learned prices, in the form that a device's file has. `chosen` is the share of a
    layer's experts that are chosen for a token."""
    flat = dict(zip(TERMS, (prices.step, *prices.linear[:7], prices.launch), strict=True))
    beyond = {str(knot): float(f"{price:.4g}") for knot, price in zip(KNOTS, prices.beyond, strict=True)}
    flat |= {"chosen": chosen, "experts": prices.experts} if chosen < 1 else {}
    return {term: float(f"{price:.4g}") for term, price in flat.items()} | {"beyond": beyond}


@contextmanager
def open_engine(config: EngineConfig) -> Iterator[tuple[RealEngine, Any]]:
    """Load a model, and yield the parts of an engine and its `ModelRunner`, which is closed afterwards."""
    from engine.model.runner.loading import load
    from engine.model.runner.model_runner import ModelRunner

    runner = ModelRunner(load(config))
    try:
        yield RealEngine(core_of(runner), runner, runner.facts.vocab_size), runner
    finally:
        runner.close()


def core_of(runner: Any) -> CoreConfig:
    """Return the scheduler's settings for an engine with this `ModelRunner`."""
    loaded, facts = runner.loaded, runner.facts
    sizes = loaded.num_pages, loaded.num_host_pages, facts.max_model_len, facts.eos_token_ids
    return replace(core_config(facts.config, *sizes), chosen_experts=facts.spec.chosen_experts)


Lessons = list[tuple[RealEngine, Workload]]
"""Closed loops of requests to be measured, each with the engine that runs it."""


def lessons(real: RealEngine, seconds: float) -> Lessons:
    """Return the closed loops to measure, of `seconds` seconds each, and the engine that runs each: prompts and answers
    in the engine's order and in that of `full_steps`, decodes with and without adapters, and a longer loop with long
    contexts."""
    full = full_steps(real)
    mixed = [(engine, loop) for loop in loops(real.core, seconds) for engine in (real, full)]
    attended, *_ = loops(real.core, ATTENDED_LOOPS * seconds, *ATTENDED)
    return [*mixed, (real, attended), *((real, loop) for loop in loops(real.core, seconds, *DECODED))]


def loops(core: CoreConfig, seconds: float, prompt: Sizes = PROMPT, output: Sizes = OUTPUT) -> list[Workload]:
    """Return workloads to measure: closed loops of requests of these sizes, for each power of 2 of concurrent requests
    up to the maximum, without and with adapters. Prompts are shorter if the context is too short for them."""
    longest = min(prompt.high, core.max_model_len - output.high - 1)
    prompt = Sizes(min(prompt.low, longest), longest)
    most = min(core.max_seqs, core.usable_pages * core.block_size // (prompt.high + output.high))
    sizes = [size for power in range(most.bit_length()) if (size := 1 << power) < most] + [most]
    return [
        Workload([], seconds, Backlog(size, prompt, output), adapters, zipf=0.0, seed=size)
        for size in sizes
        for adapters in (0, len(ADAPTER_RANKS))
    ]


def full_steps(real: RealEngine) -> RealEngine:
    """Return the engine with a scheduling policy by which prompts fill each step up to the token budget, however long
    the step takes."""
    return replace(real, mode=Mode("fcfs"))


def measure_model(
    model: str, name: str, console: Console, progress: Callable[[float], None] = lambda _: None
) -> tuple[Path, dict[str, Any]]:
    """Measure this machine with `model` (see `prepare_model`), and return the model's folder and a device's file.
    `console` shows downloads; `progress` gets the share done. Raises ValueError if it cannot be served."""
    from engine.model.folders.prepare import prepare_model

    folder = prepare_model(model, default_data_dir(os.environ), console)
    return folder, measure_device(folder, name, progress)


def measure_device(folder: Path, name: str, progress: Callable[[float], None] = lambda _: None) -> dict[str, Any]:
    """Measure this machine with the model in a prepared folder, and return the contents of a file that describes the
    machine for simulations (see `lab.devices.cost.read_device`). Raises ValueError if the engine cannot serve the
    model here."""
    from lab.random_adapters import write_adapters

    state = str(default_data_dir(os.environ) / "engine")
    with (
        open_engine(EngineConfig(str(folder), speculation="off", state_dir=state)) as (real, runner),
        tempfile.TemporaryDirectory(prefix="loralane-measure-") as scratch,
    ):
        lesson = Lesson(real.core.chosen_experts)
        ranks = _ranks_that_fit(real.core, adapter_bytes(runner))
        adapters = list(write_adapters(folder, Path(scratch), ranks).values())
        plan = [(real, loop, _forget) for loop in loops(real.core, WARM_SECONDS)]
        plan += [(engine, loop, lesson.see) for engine, loop in lessons(real, SECONDS)]
        for done, (engine, loop, see) in enumerate(plan):
            replay(engine, loop, adapters if loop.adapters else (), see)
            progress((done + 1) / len(plan))
        return describe(name, real.core, runner, lesson, _disk_rate(runner, adapters))


def adapter_bytes(runner: Any) -> int:
    """Return the bytes of an adapter of rank 1 on all projections of a `ModelRunner`'s model."""
    from engine.model.runner.sizes import adapter_bytes_per_rank

    facts = runner.facts
    return adapter_bytes_per_rank(facts.config, facts.spec, facts.dtype, facts.shard)


def _ranks_that_fit(core: CoreConfig, bytes_per_rank: int) -> list[int]:
    """Return the ranks of the measured adapters: `ADAPTER_RANKS`, or smaller ones that fit into half of the host memory
    for adapters. Rank 64 on 48 layers of 128 experts takes 6.7 GB."""
    ranks = list(ADAPTER_RANKS)
    while sum(ranks) * bytes_per_rank > core.host_adapter_bytes / 2 and max(ranks) > 1:
        ranks = [max(1, rank // 2) for rank in ranks]
    return ranks


def _forget(work: StepWork, seconds: float) -> None:
    """Ignore a step of a warm-up loop, in which kernels may have been compiled or recorded."""


def _disk_rate(runner: Any, folders: list[Path]) -> float:
    """Measure, by loading the adapters in `folders`, and return the rate of reading and packing adapters in bytes per
    second."""
    began = time.perf_counter()
    size = sum(runner.load_host(str(folder), lambda _: True).num_bytes for folder in folders)
    return size / (time.perf_counter() - began)


def describe(name: str, core: CoreConfig, runner: Any, lesson: Lesson, disk_bytes_per_s: float) -> dict[str, Any]:
    """Return the contents of a file that describes the measured machine for simulations: the engine's sizes, the cost
    model that `lesson` has learned with its errors, and the rate of reading adapters."""
    model, facts = lesson.learned(), runner.facts
    errors = [math.log(seconds / model.predict(features)) for features, seconds in lesson.steps]
    middle = statistics.median(errors)
    ordered = sorted(abs(math.expm1(error)) for error in errors)
    sizes = {size: getattr(core, size) for size in SIZES}
    return {
        "name": name,
        "description": f"{facts.spec.architecture} ({facts.weights}) on {facts.device}, as measured",
        "kind": "linear",
        "noise_sigma": round(MAD * statistics.median(abs(error - middle) for error in errors), 4),
        "page_bytes": facts.page_bytes,
        "adapter_bytes_per_rank": adapter_bytes(runner),
        "disk_bytes_per_s": float(f"{disk_bytes_per_s:.3g}"),
        "engine": sizes,
        "cost": cost_of(model.prices, lesson.chosen),
        "fit": {
            "steps": len(errors),
            "median_error": round(statistics.median(ordered), 4),
            "p95_error": round(ordered[int(0.95 * len(ordered))], 4),
        },
        "sources": SOURCES,
    }
