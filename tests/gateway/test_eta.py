"""When jobs end, foretold half way through, against when they do: on the real core, with a device that is its cost
model."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from engine.core.commands import Submit
from engine.core.config import CoreConfig
from engine.core.state import EngineState
from engine.core.types import Lane
from engine.engine import Engine
from engine.executor.cost import LinearCost
from engine.executor.fake import TimedExecutor, VirtualClock, VirtualDisk
from engine.sim.synthetic import Sizes, arrivals
from engine.sim.traces import Arrival
from engine.sim.workload import RequestMaker
from engine.snapshot import snapshot
from gateway.batches.outlook import pace_of
from gateway.core.eta import OpenJob, Pace, Tokens, eta_seconds

COST = (0.010, 0.001, 0.0005, 1e-7, 1e-7, 0.001, 1e-6, 0.0001)
"""A step takes 10 ms, a token of a prompt 1 ms, a generated one 0.5 ms."""
AT_ONCE = 12
PROMPTS, OUTPUTS = Sizes(16, 64), Sizes(8, 40)
PACE = Pace(prompt_seconds=0.001, output_seconds=0.01, share=0.5)


@dataclass
class Job:
    """Lines in the order in which they are handed out."""

    lines: list[Arrival]
    id: str = "a"
    tenant: str = "acme"
    seconds_left: float = 3600.0
    given: int = 0
    ended: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    end: float = 0.0
    foretold: list[tuple[float, float | None]] = field(default_factory=list)
    """When, and how many seconds were left then."""

    def left(self) -> OpenJob:
        line = Tokens(self.prompt_tokens / self.ended, self.output_tokens / self.ended) if self.ended else None
        return OpenJob(self.id, self.tenant, self.seconds_left, len(self.lines) - self.ended, line)

    def errors(self) -> list[float]:
        """Of what was foretold, over what was left; positive: too long."""
        return [told / (self.end - when) - 1 for when, told in self.foretold]


class Site:
    """An engine, chats, and a dispatcher that keeps it fed with the lines of jobs, the first job first."""

    def __init__(self, jobs: list[Job], chats: float, horizon: float = 600.0, seed: int = 0) -> None:
        self.clock = VirtualClock()
        executor = TimedExecutor(
            LinearCost(48, COST, COST), self.clock, VirtualDisk(self.clock, 1e9), {}, lambda *_: None, 0.02, seed
        )
        config = CoreConfig(num_pages=2000, host_pages=500, max_seqs=8, token_budget=128)
        self.engine = Engine(EngineState.create(config), executor, clock=self.clock)
        self._jobs = jobs
        self._chats = list(reversed(arrivals(chats, horizon, Sizes(8, 24), Sizes(4, 8), seed=seed) if chats else []))
        self._make = RequestMaker()
        self._lines: dict[str, tuple[Job, Arrival]] = {}

    def run(self, looks: tuple[float, ...] = (0.5,)) -> None:
        """To the end of all jobs; each is foretold when so much of its lines has ended."""
        while any(not job.end for job in self._jobs):
            while self._chats and self._chats[-1].time <= self.clock.now:
                self._submit(self._chats.pop())
            self._feed()
            for event in self.engine.step():
                if event.finish_reason is not None and event.request_id in self._lines:
                    self._ended(*self._lines.pop(event.request_id), looks)

    def foretell(self, job: Job) -> None:
        others = [other.left() for other in self._jobs if other is not job and not other.end]
        stats = snapshot(self.engine.state, 0.0, self.clock.now)
        job.foretold.append((self.clock.now, eta_seconds(job.left(), others, pace_of(stats))))

    def _feed(self) -> None:
        for job in self._jobs:
            while job.given < len(job.lines) and len(self._lines) < AT_ONCE:
                line = job.lines[job.given]
                job.given += 1
                self._lines[self._submit(line._replace(time=self.clock.now, lane=Lane.BATCH))] = job, line

    def _ended(self, job: Job, line: Arrival, looks: tuple[float, ...]) -> None:
        job.ended += 1
        job.prompt_tokens += line.prompt_tokens
        job.output_tokens += line.output_tokens
        if job.ended == len(job.lines):
            job.end = self.clock.now
        elif job.ended in {int(look * len(job.lines)) for look in looks}:
            for other in self._jobs:
                if not other.end:
                    self.foretell(other)

    def _submit(self, arrival: Arrival) -> str:
        request = self._make(arrival)
        self.engine.inbox.put(Submit(request))
        return request.id


def a_job(lines: int, seed: int = 1) -> Job:
    rng = Random(seed)
    return Job([Arrival(0.0, PROMPTS.draw(rng), OUTPUTS.draw(rng)) for _ in range(lines)])


if __name__ == "__main__":
    import time

    for n in (100, 400, 1000):
        for chats in (0, 1, 3):
            for seed in range(3):
                t = time.time()
                job = a_job(n, seed)
                Site([job], chats, seed=seed).run((0.02, 0.1, 0.25, 0.5, 0.75, 0.9))
                print(n, chats, seed, f"{job.end:.0f}s", [f"{e:+.2f}" for e in job.errors()], f"{time.time() - t:.1f}")
