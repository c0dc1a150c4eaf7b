"""When jobs end, foretold half way through, against when they do: on the real core, with a device that is its cost
model."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import pytest

from engine.core.config import CoreConfig
from engine.core.messages.commands import Submit
from engine.core.messages.requests import Lane
from engine.core.state.engine_state import EngineState
from engine.engine import Engine
from engine.pb import engine_pb2 as pb
from engine.rpc.snapshot import snapshot
from gateway.batches.eta import batch_speed
from gateway.core.eta import BatchSpeed, OpenJob, eta_seconds
from lab.devices.cost import LinearCost
from lab.sim.timed import TimedExecutor, VirtualClock, VirtualDisk
from lab.traffic.synthetic import Sizes, arrivals
from lab.traffic.traces import Arrival
from lab.traffic.workload import RequestMaker

pytestmark = pytest.mark.slow

COST = (0.010, 0.001, 0.0005, 1e-7, 1e-7, 0.001, 1e-6, 0.0001, 0.0)
"""A step takes 10 ms, a token of a prompt 1 ms, a generated one 0.5 ms."""
AT_ONCE = 12
PROMPTS, OUTPUTS = Sizes(16, 64), Sizes(8, 40)
PACE = BatchSpeed(share=0.5)


@dataclass
class Job:
    """Lines in the order in which they are handed out."""

    lines: list[Arrival]
    id: str = "a"
    tenant: str = "acme"
    seconds_left: float = 3600.0
    given: int = 0
    ended: int = 0
    device_seconds: float = 0.0
    end: float = 0.0
    foretold: list[tuple[float, float | None]] = field(default_factory=list)
    """When, and how many seconds were left then."""

    def left(self) -> OpenJob:
        line_seconds = self.device_seconds / self.ended if self.ended else None
        return OpenJob(self.id, self.tenant, self.seconds_left, len(self.lines) - self.ended, line_seconds)

    def errors(self) -> list[float]:
        """Return the relative error of each prediction of the time left. Positive means that it was too long."""
        return [told / (self.end - when) - 1 for when, told in self.foretold]


class Site:
    """An engine, chats, and a dispatcher that keeps it fed with the lines of jobs, the first job first."""

    def __init__(self, jobs: list[Job], chats: float, horizon: float = 600.0, seed: int = 0) -> None:
        self.clock = VirtualClock()
        executor = TimedExecutor(
            LinearCost(COST), self.clock, VirtualDisk(self.clock, 1e9), {}, lambda *_: None, 0.02, seed
        )
        config = CoreConfig(num_pages=2000, host_pages=500, max_seqs=8, token_budget=128)
        self.engine = Engine(EngineState.create(config), executor, clock=self.clock)
        self._jobs = jobs
        self._chats = list(reversed(arrivals(chats, horizon, Sizes(8, 24), Sizes(4, 8), seed=seed) if chats else []))
        self._make = RequestMaker()
        self._lines: dict[str, Job] = {}

    def run(self, looks: tuple[float, ...] = (0.5,)) -> None:
        """To the end of all jobs; each is foretold when so much of its lines has ended."""
        while any(not job.end for job in self._jobs):
            while self._chats and self._chats[-1].time <= self.clock.now:
                self._submit(self._chats.pop())
            self._feed()
            for event in self.engine.step():
                if event.finish_reason is not None and event.request_id in self._lines:
                    self._ended(self._lines.pop(event.request_id), event.device_seconds, looks)

    def foretell(self, job: Job) -> None:
        others = [other.left() for other in self._jobs if other is not job and not other.end]
        stats = snapshot(self.engine.state, 0.0, self.clock.now)
        job.foretold.append((self.clock.now, eta_seconds(job.left(), others, batch_speed(stats))))

    def _feed(self) -> None:
        for job in self._jobs:
            while job.given < len(job.lines) and len(self._lines) < AT_ONCE:
                line = job.lines[job.given]
                job.given += 1
                self._lines[self._submit(line._replace(time=self.clock.now, lane=Lane.BATCH))] = job

    def _ended(self, job: Job, device_seconds: float, looks: tuple[float, ...]) -> None:
        job.ended += 1
        job.device_seconds += device_seconds
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


def a_job(lines: int, **fields: Any) -> Job:
    rng = Random(1)
    return Job([Arrival(0.0, PROMPTS.draw(rng), OUTPUTS.draw(rng)) for _ in range(lines)], **fields)


@pytest.mark.parametrize("chats", [0, 1, 3])
def test_half_way_through_the_end_is_known_to_a_sixth(chats):
    """Beside so many chats a second; 0.05 at most of what was left when this was written."""
    job = a_job(600)
    Site([job], chats).run((0.25, 0.5, 0.75))
    assert max(map(abs, job.errors())) < 1 / 6


def test_soon_after_the_first_lines_have_ended_it_is_known_to_a_third():
    job = a_job(600)
    Site([job], 1).run((0.05,))
    assert abs(job.errors()[0]) < 1 / 3


def test_who_is_due_later_waits_for_who_is_due_sooner():
    first, second = a_job(300, id="a", seconds_left=3000.0), a_job(300, id="b", seconds_left=3600.0)
    Site([first, second], 1).run((0.5,))
    assert first.end < second.end
    for job in (first, second):
        assert abs(job.errors()[0]) < 1 / 6


def job(name="a", tenant="acme", seconds_left=3600.0, lines=100, line=0.1):
    return OpenJob(name, tenant, seconds_left, lines, line)


LINE = 0.1 / 0.5
"""Seconds of one line at PACE."""


@pytest.mark.parametrize(
    ("others", "lines"),
    [
        ([], 100),
        ([job("b", seconds_left=3000.0, lines=50)], 150),
        ([job("b", seconds_left=4000.0, lines=50)], 100),
        ([job("b", seconds_left=1000.0, lines=50, tenant="globex")], 150),
        ([job("b", seconds_left=90_000.0, lines=50, tenant="globex")], 100),
        ([job("b", lines=50, tenant="globex")], 150),
        ([job("b", lines=500, tenant="globex"), job("c", lines=500, tenant="initech")], 300),
        ([job("b", seconds_left=3000.0, lines=50, line=None)], 150),
        ([job("b", seconds_left=3000.0, lines=50, line=0.2)], 200),
    ],
    ids=[
        "alone",
        "our own sooner",
        "our own later",
        "theirs more urgent",
        "theirs less urgent",
        "theirs as urgent, and shorter",
        "two as urgent, and longer: each gets a third",
        "sooner, and unknown",
        "sooner, and of longer lines",
    ],
)
def test_what_goes_before_a_job(others, lines):
    assert eta_seconds(job(), others, PACE) == pytest.approx(lines * LINE)


def test_before_a_line_has_ended_they_are_taken_to_be_like_all_others():
    others = [job("b", seconds_left=4000.0), job("c", seconds_left=4000.0, line=0.3)]
    assert eta_seconds(job(line=None), others, PACE) == pytest.approx(100 * 2 * LINE)


def test_lines_that_run_are_half_done():
    assert eta_seconds(job(), [], replace(PACE, running=20)) == pytest.approx(90 * LINE)
    assert eta_seconds(job(lines=4), [], replace(PACE, running=20)) == pytest.approx(2 * LINE)
    assert eta_seconds(job(lines=0), [], replace(PACE, running=20)) == 0


def test_an_estimate_that_cannot_be_known_is_not_made_up():
    assert eta_seconds(job(line=None), [job("b", line=None)], PACE) is None
    assert eta_seconds(job(), [], replace(PACE, share=0.0)) is None
    paused = pb.LaneStats(lane=pb.LANE_BATCH, mode=pb.LANE_MODE_PAUSED)
    assert batch_speed(pb.EngineStats(lanes=[paused], batch_share=1.0)) is None
    assert batch_speed(pb.EngineStats()) is None
