"""How often the device waits for the host where steps are planned ahead, and which price first tokens pay for it:
`python -m benchmarks.pace [--real]`.

The real engine serves mixed traffic on the simulated `h100-8b`: decodes are replayed, and steps with prompts are
launched kernel by kernel. The phases follow each other without a pause, so that each begins with a sudden change. On
the virtual clock the host's times vary as threads disturb it: planning by 30 %, waking up by 60 us and, in one rest of
2,000, by up to 20 ms. With `--real` the host really sleeps and the device is another clock, so that the machine's own
disturbances count instead; the figures then hold for this machine only.

A step is late if the device waits for it. It is late by the host if it would have been late even if the host had never
rested, and otherwise by a rest. A request that arrives between the planning of a step and the end of the step before it
misses the step, and its first token comes one step later than if nothing were planned ahead: *missed* is the share of
the device's time in which that happens.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from statistics import fmean
from typing import cast

from benchmarks.runner import Run, benchmark, option, table
from engine.core.config import CoreConfig
from engine.core.messages.commands import Submit
from engine.core.messages.requests import Lane, Request, SamplingParams
from engine.core.messages.step import StepPlan
from engine.core.state.engine_state import EngineState
from engine.engine import Engine
from lab.devices.cost import StepWork
from lab.devices.device import find_device
from lab.sim.timed import TimedExecutor, VirtualClock, VirtualDisk

CHATS, ANSWER = 48, 160
WAKING_S, WAKING_SIGMA = 60e-6, 0.5
STALL_EVERY, STALL_S = 2000, (0.002, 0.020)
NEW_STEPS = 100
"""Number of steps after a change that are also reported alone."""


@dataclass(frozen=True, slots=True)
class Phase:
    """Traffic, and the host's times in seconds, from a moment on."""

    name: str
    prompts_per_s: float
    prompt: tuple[int, int]
    host_s: float = 0.0010
    launch_s: float = 0.0


PHASES = (
    Phase("decodes, all replayed", 0.0, (2, 3)),
    Phase("prompts, replayed too", 10.0, (100, 1000)),
    Phase("prompts, launched in 3 ms", 10.0, (100, 1000), launch_s=0.003),
    Phase("prompts, launched in 7 ms", 10.0, (100, 1000), launch_s=0.007),
    Phase("planning takes 3 ms", 10.0, (100, 1000), host_s=0.003, launch_s=0.003),
    Phase("planning takes 1 ms again", 10.0, (100, 1000), launch_s=0.003),
    Phase("long prompts", 4.0, (2000, 6000), launch_s=0.003),
    Phase("decodes again", 0.0, (2, 3)),
)


class WallClock:
    """The machine's clock, with the methods of a `VirtualClock`: to advance is to sleep."""

    @property
    def now(self) -> float:
        return time.monotonic()

    def __call__(self) -> float:
        return time.monotonic()

    def advance(self, seconds: float) -> None:
        time.sleep(seconds)

    def advance_to(self, when: float) -> None:
        time.sleep(max(0.0, when - time.monotonic()))


@dataclass(frozen=True, slots=True)
class Outcome:
    """Figures of one phase: its steps, the shares of steps that are late by a rest and by the host, the share of late
    ones among the first `NEW_STEPS`, the mean of the engine's lead in milliseconds, and the share of the device's time
    in which arrivals miss the next step."""

    name: str
    steps: int
    late: float
    host_bound: float
    late_at_first: float
    lead_ms: float
    missed: float


class Traffic:
    """An engine whose traffic and host change from phase to phase."""

    def __init__(self, clock: VirtualClock, *, is_real: bool, seed: int) -> None:
        device = find_device("h100-8b")
        self._random, self._is_real, self._number = Random(seed), is_real, 0
        self.clock = clock
        disk = VirtualDisk(clock, device.disk_bytes_per_s)
        noise = device.noise_sigma, seed
        self.executor = TimedExecutor(device.cost, clock, disk, {}, self._observe, *noise, overlaps=True)
        state = EngineState.create(CoreConfig(**dict(device.engine) | {"max_model_len": 8192}))
        self.engine = Engine(state, self.executor, clock=clock, sleep=self._sleep)
        self._phase, self._next_prompt = Phase("none", 0.0, (2, 3)), float("inf")
        self._computed = self._missed = 0.0

    def phase(self, phase: Phase, steps: int) -> Outcome:
        self.executor.host_s, self.executor.launch_s = phase.host_s, phase.launch_s
        self._phase, self._next_prompt = phase, self.clock() + self._gap()
        self._computed = self._missed = 0.0
        counters, late, leads = self.engine.state.counters, [], 0.0
        host_bound = counters.host_bound_steps
        for _ in range(steps):
            self._arrive()
            before = counters.late_steps
            self.engine.step()
            late.append(counters.late_steps - before)
            leads += self.engine.pace.lead
        host_bound = counters.host_bound_steps - host_bound
        shares = (sum(late) - host_bound) / steps, host_bound / steps, sum(late[:NEW_STEPS]) / NEW_STEPS
        return Outcome(phase.name, steps, *shares, leads / steps * 1e3, self._missed / self._computed)

    def _arrive(self) -> None:
        """Submit the prompts that have arrived by now, and a chat for each that has ended."""
        while len(self.engine.state.sequences) + len(self.engine.inbox._commands) < CHATS:
            self._submit(2, self._random.randrange(ANSWER // 2, ANSWER))  # a prompt so short hardly shows
        while self.clock() >= self._next_prompt:
            self._submit(self._random.randrange(*self._phase.prompt), ANSWER)
            self._next_prompt += self._gap()

    def _gap(self) -> float:
        return self._random.expovariate(self._phase.prompts_per_s) if self._phase.prompts_per_s else float("inf")

    def _submit(self, prompt: int, answer: int) -> None:
        self._number += 1
        ids, params = tuple(range(self._number * 7, self._number * 7 + prompt)), SamplingParams(answer, ignore_eos=True)
        name = f"r{self._number}"
        self.engine.inbox.put(Submit(Request(name, ids, params, lane=Lane.INTERACTIVE, arrival=self.clock())))

    def _sleep(self, seconds: float) -> None:
        if not self._is_real:
            seconds += WAKING_S * self._random.lognormvariate(0, WAKING_SIGMA)
            if self._random.randrange(STALL_EVERY) == 0:
                seconds += self._random.uniform(*STALL_S)
        self.clock.advance(seconds)
        self._arrive()

    def _observe(self, plan: StepPlan, work: StepWork, seconds: float) -> None:
        """Count the time from the planning of a step to the end of the step under way."""
        self._computed += seconds
        self._missed += max(0.0, self.executor._device.free_at - plan.now)


def outcomes(*, is_real: bool, steps: int, seed: int = 0) -> Iterator[Outcome]:
    clock = cast(VirtualClock, WallClock()) if is_real else VirtualClock()
    traffic = Traffic(clock, is_real=is_real, seed=seed)
    traffic.phase(Phase("warm-up", 10.0, (100, 1000)), 300)
    for phase in PHASES:
        yield traffic.phase(phase, steps)


def row(name: str, found: Sequence[Outcome]) -> tuple[str, ...]:
    """Return the means of `found`, which all have the same number of steps."""
    late, host_bound, at_first, lead_ms, missed = (
        fmean(getattr(one, field) for one in found)
        for field in ("late", "host_bound", "late_at_first", "lead_ms", "missed")
    )
    return name, f"{late:.2%}", f"{host_bound:.2%}", f"{at_first:.1%}", f"{lead_ms:.2f}", f"{missed:.2f}"


@benchmark(
    option("--steps", 4000, "steps of each phase"),
    option("--seeds", 1, "runs, each with other traffic and noise"),
    option("--real", False, "sleep instead of advancing a virtual clock"),
)
def bench(run: Run) -> None:
    args = run.options
    found = [one for seed in range(args.seeds) for one in outcomes(is_real=args.real, steps=args.steps, seed=seed)]
    rows = [row(phase.name, [one for one in found if one.name == phase.name]) for phase in PHASES]
    columns = f"phase | late by a rest | by the host | late in the first {NEW_STEPS} | lead, ms | missed"
    run.show(table("Steps for which the device waited", columns, [*rows, row("all", found)], ("phase",)))


if __name__ == "__main__":
    bench.main()
