"""Compares simulations with the engine itself: `make bench-validation`.

The same workloads run on this machine's engine in real time and in the simulator, whose device is measured in the same
minutes: each round measures closed loops (`lab.plans.measure`) between the workloads, with requests of their own.
The table shows simulated / real figures over all rounds. The last two rows are what `plan` computes by arithmetic for
an engine that is always busy, with the base model and with 64 adapters.

The speed of a shared machine drifts by more within a minute than a simulation errs. The simulated device of each
workload is therefore as fast as the machine was in the closed loops just before and after it. What drifts within
seconds remains, so that the figures of few rounds still say more about the machine: each has its standard error over
the rounds, and an error of less than about two of those may be the machine's. The workloads' rates follow the machine's
speed, so that each is as busy on any machine. `--check 0.05 0.15` fails if the median or the worst error is larger.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.runner import DATA_DIR, JSON, MODEL, Run, benchmark, option, table
from benchmarks.validation_workloads import (
    ADAPTERS,
    BUSY_S,
    CHAT,
    Loops,
    for_speed,
    make_workloads,
    saturated,
    speed_of,
)
from engine.config import EngineConfig
from engine.model.folders.prepare import prepare_model
from lab.devices.capacity import Demand, serve
from lab.devices.cost import CostModel, DeviceSpec, StepWork, read_device
from lab.plans.measure import Lesson, Lessons, describe, lessons, loops, open_engine
from lab.random_adapters import write_adapters
from lab.sim.replay import RealEngine, replay
from lab.sim.report import Report
from lab.sim.run import Setup, simulate
from lab.traffic.workload import Workload

MAX_LEN, NUM_PAGES = 2048, 2049
RANKS = (8, 16, 32, 64)
LOOP_S = 2.0
"""Seconds of each closed loop that is measured in a round."""
FIGURES = ("tokens/s", "TTFT p50", "TTFT p90", "TPOT p50", "TPOT p90", "E2E p50")
Figures = tuple[float, ...]


def figures(report: Report) -> Figures:
    """Return the FIGURES of a report: those of the interactive lane, but for the throughput."""
    lane = report.lanes["interactive"]
    times = lane.ttft.p50, lane.ttft.p90, lane.tpot.p50, lane.tpot.p90, lane.e2e.p50
    return (report.tokens_per_s, *(math.nan if value is None else value for value in times))


class Tail:
    """Counts the tokens of the second half of a run of so many seconds."""

    def __init__(self, seconds: float) -> None:
        self._until, self._tokens, self._seconds = seconds / 2, 0, 0.0

    def see(self, work: StepWork, seconds: float) -> None:
        self._until -= seconds
        if self._until < 0:
            self._tokens, self._seconds = self._tokens + work.samples, self._seconds + seconds

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self._tokens / self._seconds


def by_arithmetic(setup: Setup, rank: int, adapters: int) -> float:
    """Return the tokens a second of `saturated` with so many adapters of this rank, as `plan` computes them."""
    prompt, output = (sum(map(int, text.split("-"))) / 2 for text in CHAT)
    demand = Demand(prompt, output, prompt + output / 2, rank, adapters)
    return serve(setup.device, setup.core, demand, math.inf).rate * output


@dataclass(frozen=True)
class AtSpeed:
    """A cost model whose steps take `factor` times as long as those of `cost`."""

    cost: CostModel
    factor: float

    def seconds(self, work: StepWork) -> float:
        return self.factor * self.cost.seconds(work)


@dataclass(frozen=True)
class Measured:
    """A workload that ran on the engine, with its figures and the steps of the closed loops before and after it."""

    name: str
    workload: Workload
    real: Figures
    around: tuple[Loops, Loops]

    def device(self, device: DeviceSpec) -> DeviceSpec:
        """Return the device at the machine's speed around the workload."""
        steps = [step for loop in self.around for step in loop]
        factor = sum(seconds for _, seconds in steps) / sum(device.cost.seconds(work) for work, _ in steps)
        return replace(device, cost=AtSpeed(device.cost, factor))


class Rounds:
    """Figures of all rounds, of the engine and of the simulation of the same workloads."""

    def __init__(self, real: RealEngine, folders: Sequence[Path], seconds: float) -> None:
        self._real, self._folders, self._seconds = real, folders, seconds
        self._speed = 1.0
        self.lesson = Lesson(real.core.chosen_experts)
        self.measured: list[Measured] = []

    def warm_up(self) -> None:
        """Run closed loops that do not count, and scale the workloads' rates by the machine's speed in them."""
        steps: Loops = []
        for loop in loops(self._real.core, 1.0):
            replay(self._real, loop, self.adapters(loop), lambda *step: steps.append(step))
        self._speed = speed_of(steps)

    def run(self, seed: int) -> Iterator[str]:
        """Run the workloads of a round, each after some of the closed loops; yield the name of what ran."""
        made = make_workloads(self._seconds, seed)
        workloads = {name: for_speed(workload, self._speed) for name, workload in made.items()}
        if not seed:
            workloads |= {"busy: base": saturated(0, seed), "busy: 64 adapters": saturated(ADAPTERS, seed)}
        closed = lessons(self._real, LOOP_S)
        Random(seed).shuffle(closed)
        before = self._loop(closed[len(workloads) - 1 :: len(workloads)], seed)
        for number, (name, workload) in enumerate(workloads.items()):
            tail = Tail(BUSY_S)
            report = replay(self._real, workload, self.adapters(workload), tail.see)
            after = self._loop(closed[number :: len(workloads)], seed)
            real = (tail.rate,) if workload.trace == [] else figures(report)
            self.measured.append(Measured(name, workload, real, (before, after)))
            before = after
            yield name

    def _loop(self, closed: Lessons, seed: int) -> Loops:
        """Run closed loops, and return their steps."""
        steps: Loops = []
        for one, loop in closed:

            def see(work: StepWork, seconds: float) -> None:
                steps.append((work, seconds))
                self.lesson.see(work, seconds)

            replay(one, replace(loop, seed=loop.seed + 1000 * seed), self.adapters(loop), see)
        return steps

    def adapters(self, workload: Workload) -> Sequence[Path]:
        return self._folders[: workload.adapters]

    def compare(self, device: DeviceSpec) -> dict[str, list[Compared]]:
        """Return the comparison of each figure of each workload."""
        pairs: dict[str, list[tuple[Figures, Figures]]] = defaultdict(list)
        for one in self.measured:
            setup = Setup(one.device(device), self._real.core)
            if one.workload.trace:
                pairs[one.name].append((one.real, figures(simulate(setup, one.workload))))
            else:
                rank = sum(RANKS) // len(RANKS) if one.workload.adapters else 0
                pairs[one.name].append((one.real, (by_arithmetic(setup, rank, one.workload.adapters),)))
        return {name: _by_figure(rounds) for name, rounds in pairs.items()}


@dataclass(frozen=True)
class Compared:
    """One figure of a workload: means over the rounds, and the standard error of simulated / real by the jackknife,
    from the ratios without one round each. It is None after one round."""

    real: float
    simulated: float
    standard_error: float | None

    @classmethod
    def of(cls, pairs: Sequence[tuple[float, float]]) -> Compared:
        real, simulated = (sum(column) for column in zip(*pairs, strict=True))
        count = len(pairs)
        if count == 1:
            return cls(real, simulated, None)
        ratios = [(simulated - other) / (real - one) for one, other in pairs]
        return cls(real / count, simulated / count, math.sqrt((count - 1) * statistics.pvariance(ratios)))

    @property
    def ratio(self) -> float:
        return self.simulated / self.real

    def __str__(self) -> str:
        error = "" if self.standard_error is None else f" ±{self.standard_error:.2f}"
        return f"{self.ratio:.2f}{error} of {self.real:.3g}"


def _by_figure(rounds: list[tuple[Figures, Figures]]) -> list[Compared]:
    reals, simulated = zip(*rounds, strict=True)
    columns = zip(zip(*reals, strict=True), zip(*simulated, strict=True), strict=True)
    return [Compared.of(list(zip(*column, strict=True))) for column in columns]


def run_rounds(run: Run) -> tuple[dict[str, list[Compared]], dict[str, Any]]:
    """Run all rounds; return the comparison, and the description of the device."""
    args = run.options
    folder = prepare_model(args.model, args.data_dir, run.console)
    state = str(args.data_dir / "engine")
    config = EngineConfig(str(folder), num_pages=NUM_PAGES, max_model_len=MAX_LEN, speculation="off", state_dir=state)
    with open_engine(config) as (real, runner):
        ranks = [RANKS[index % len(RANKS)] for index in range(ADAPTERS)]
        rounds = Rounds(real, list(write_adapters(folder, run.scratch, ranks).values()), args.seconds)
        rounds.warm_up()
        for number in range(args.rounds):
            title, total = f"round {number + 1} of {args.rounds}", 8 if number else 10
            for _ in run.track(rounds.run(number), title, total):
                pass
        document = describe("this machine", real.core, runner, rounds.lesson, 5e8)
    path = run.scratch / "device.json"
    path.write_text(json.dumps(document))
    return rounds.compare(read_device(path)), document


@benchmark(
    MODEL,
    DATA_DIR,
    option("--rounds", 4),
    option("--seconds", 12.0, "of arrivals, at the reference's speed"),
    JSON,
    option("--check", float, "fail if errors are larger", nargs=2, metavar=("MEDIAN", "WORST")),
)
def bench(run: Run) -> None:
    compared, device = run_rounds(run)
    cells = [one for row in compared.values() for one in row]
    errors = [abs(one.ratio - 1) for one in cells]
    median, worst = statistics.median(errors), max(errors)
    noise = [one.standard_error for one in cells if one.standard_error is not None]
    rows = [(name, *map(str, row)) for name, row in compared.items()]
    title = "simulated / real, with its standard error over the rounds"
    document = {"device": device, "figures": FIGURES, "compared": compared}
    run.show(table(title, " | ".join(("workload", *FIGURES)), rows, ("workload",)), document)
    print(f"error: median {median:.1%}, worst {worst:.1%}")
    if noise:
        print(f"standard error over the rounds: median {statistics.median(noise):.1%}, worst {max(noise):.1%}")
    print(f"steps: {device['fit']}")
    most = run.options.check
    if most and (median > most[0] or worst > most[1]):
        raise SystemExit(1)


if __name__ == "__main__":
    bench.main()
