"""Simulates several engines behind a router: each has its own clock, and the one that is furthest behind goes next."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol

from engine.core.messages.commands import Submit
from engine.core.messages.requests import FinishReason, Lane, Request, TokenEvent
from engine.core.messages.step import StepPlan
from engine.core.state.engine_state import EngineState
from engine.engine import Engine
from lab.devices.cost import StepWork
from lab.devices.links import LINKS, Link, Transfers
from lab.sim.collect import Collector
from lab.sim.handover import Handover, Handovers, place_pages
from lab.sim.run import PROGRESS_PARTS, STALL_S, TICK_S, Progress, Setup, Stalled, make_engine, no_collection
from lab.sim.timed import VirtualClock
from lab.traffic.traces import Arrival
from lab.traffic.workload import RequestMaker, Workload, backlog_arrivals

NEWS_S = 0.1
"""Virtual seconds between two reports of a replica to the router."""
NOTICE_S = 1.0
"""Virtual seconds between a replica's death and the moment when the gateway moves its requests."""


class Choice(NamedTuple):
    """A router's choice for a request in a simulated cluster: the replica (engine) that computes it and, if that only
    computes the prompt and first token, the replica `decode` that continues it."""

    replica: int
    decode: int | None = None


class Chooser(Protocol):
    """Interface of the router that a simulation tests. Replicas are identified by their number; all times are virtual
    seconds."""

    def join(self, replica: int) -> None: ...

    def leave(self, replica: int) -> None: ...

    def hear(self, replica: int, state: EngineState, now: float) -> None:
        """Report a replica's state to the router at `now`, in virtual seconds. The state must be read at once, since it
        changes with the next step."""

    def choose(self, request: Request, now: float) -> Choice: ...

    def finish(self, replica: int, request: Request) -> None:
        """Tell the router that a request has ended on a replica, was moved away from it, or was handed over by it."""


@dataclass(frozen=True, slots=True)
class Change:
    """A scheduled change of the cluster: at virtual second `at`, the replica with the number `replica` dies or, if
    `dies` is False, is added."""

    at: float
    replica: int
    dies: bool


@dataclass(frozen=True, slots=True)
class FirstToken:
    """Measurement of a request's first token: when the request arrived, the TTFT, and the lane. Times are in
    seconds."""

    arrival: float
    ttft: float
    lane: Lane


@dataclass(slots=True)
class ClusterResult:
    """The measurements of a simulated cluster. `bytes_copied` and `bytes_read` are bytes of adapters."""

    collector: Collector
    seconds: float
    bytes_copied: int
    """Bytes copied from host memory to devices."""
    bytes_read: int
    """Bytes read from disk."""
    busy: list[float]
    """Seconds for which each replica's device was busy."""
    moved: int
    """Requests that were moved from a replica that died."""
    first_tokens: list[FirstToken]
    handed_over: int
    """Requests whose prompt one replica computed, and whose answer another one continued."""
    kv_bytes: float
    """Bytes of KV that replicas sent to each other for handovers."""


@dataclass(slots=True, eq=False)
class _Replica:
    """One simulated engine with its clock, and the requests that it has not finished."""

    number: int
    clock: VirtualClock
    engine: Engine
    told_at: float = -math.inf
    """Virtual second at which the router last heard from the replica."""
    stepped_at: float = 0.0
    """Virtual second at which a step of the replica last took time, or at which it last began to have work. A replica
    with work is stuck if this is more than `STALL_S` ago."""
    live: dict[str, Request] = field(default_factory=dict)


def simulate_cluster(
    setup: Setup,
    workload: Workload,
    chooser: Chooser,
    replicas: int,
    changes: Sequence[Change] = (),
    progress: Progress = lambda _: None,
    link: Link = LINKS["nvlink"],
) -> ClusterResult:
    """Run a workload on several equal engines, until it ends by the rule of `run.simulate`. Raises Stalled if an engine
    stopped with work left.

    Args:
        chooser: the router.
        changes: engines that die or are added, in order of time.
        link: what each engine sends and receives KV over.
    """
    with no_collection():
        cluster = _Cluster(setup, workload, chooser, replicas, changes, link)
        cluster.to_end(progress)
    return cluster.result()


class _Cluster:
    def __init__(
        self,
        setup: Setup,
        workload: Workload,
        chooser: Chooser,
        replicas: int,
        changes: Sequence[Change],
        link: Link,
    ) -> None:
        self.now = 0.0
        self._setup = setup
        self._workload = workload
        self._chooser = chooser
        self._collector = Collector(setup.core, workload.horizon if workload.backlog else math.inf)
        self._make = RequestMaker(workload.predicted, workload.seed, limited=workload.limited)
        self._trace = deque(workload.trace)
        self._backlog = backlog_arrivals(workload, workload.backlog) if workload.backlog else iter(())
        self._changes = deque(changes)
        self._orphans: deque[tuple[float, Request]] = deque()
        """Requests of replicas that died, with the time at which the gateway moves them."""
        self._busy: dict[int, float] = {}
        self._bytes_copied = self._bytes_read = self._moved = 0
        self._first_tokens: list[FirstToken] = []
        self._transfers = Transfers(link)
        self._handovers = Handovers(self._transfers, setup.device.page_bytes / setup.core.block_size)
        self._awaited: set[str] = set()
        """Requests that have no first token yet."""
        self.replicas: dict[int, _Replica] = {}
        for number in range(replicas):
            self._add(number)

    def to_end(self, progress: Progress) -> None:
        whole, shown = max(self._workload.horizon, TICK_S), 0.0
        while not self._ended:
            self._advance()
            if self.now >= shown + whole / PROGRESS_PARTS:
                shown = self.now
                progress(min(1.0, shown / whole))
        progress(1.0)

    def result(self) -> ClusterResult:
        return ClusterResult(
            self._collector,
            self.now,
            self._bytes_copied,
            self._bytes_read,
            list(self._busy.values()),
            self._moved,
            self._first_tokens,
            self._handovers.count,
            self._transfers.bytes,
        )

    @property
    def _ended(self) -> bool:
        """Return whether the simulation is over, by the rule of a single engine's (see `run.py`)."""
        if self._trace or self._orphans or self._handovers.next_at < math.inf:
            return False
        if self._workload.backlog is None:
            return not self._collector.unfinished
        return self.now >= self._workload.horizon and not self._collector.outstanding[Lane.INTERACTIVE]

    def _advance(self) -> None:
        """Do what comes next: a change of the replicas, the move of a dead replica's request, a handover, an arrival,
        or a step of the replica furthest behind; then refill the backlog."""
        working = [replica for replica in self.replicas.values() if replica.live]
        behind = min(working, key=lambda replica: replica.clock.now, default=None)
        times = (
            behind.clock.now if behind else math.inf,
            self._trace[0].time if self._trace else math.inf,
            self._changes[0].at if self._changes else math.inf,
            self._orphans[0][0] if self._orphans else math.inf,
            self._handovers.next_at,
        )
        self.now = max(self.now, min(times))
        if self._changes and self._changes[0].at <= self.now:
            self._change(self._changes.popleft())
        elif self._orphans and self._orphans[0][0] <= self.now:
            self._moved += 1
            self._send(self._orphans.popleft()[1])
        elif self._handovers.next_at <= self.now:
            if (handover := self._handovers.pop(self.now)) is not None:
                self._hand_over(handover)
        elif self._trace and self._trace[0].time <= self.now:
            self._submit(self._trace.popleft(), None)
        elif behind:
            self._step(behind)
        self._refill()

    def _refill(self) -> None:
        backlog = self._workload.backlog
        if backlog is not None and self.now < self._workload.horizon:
            while self._collector.outstanding[Lane.BATCH] < backlog.size:
                self._submit(next(self._backlog)._replace(time=self.now), backlog.deadline_s)

    def _submit(self, arrival: Arrival, deadline_s: float | None) -> None:
        request = self._make(arrival, deadline_s)
        self._collector.submit(request)
        self._awaited.add(request.id)
        self._send(request)

    def _send(self, request: Request) -> None:
        for replica in self.replicas.values():
            if not replica.live:
                self._tell(replica, self.now)
        choice = self._chooser.choose(request, self.now)
        part = request
        if choice.decode is not None:
            part = self._handovers.begin(request, choice.replica, choice.decode)
        self._put(self.replicas[choice.replica], request, part)

    def _hand_over(self, handover: Handover) -> None:
        """Let the replica that a handover names as its target continue the request, whose KV has arrived. If that
        replica died, let the router choose another one, which computes all anew."""
        if (target := self.replicas.get(handover.target)) is None:
            self._send(handover.request)
            return
        if handover.has_source:
            place_pages(target.engine.state, handover.request, self.now)
        self._put(target, handover.request, handover.request)

    def _put(self, replica: _Replica, request: Request, part: Request) -> None:
        """Submit a request to a replica and record it there. `part` is what the replica computes of it: `request`
        itself, or only its prompt and first token if another replica continues it."""
        if not replica.live:
            replica.clock.advance_to(self.now)
            replica.stepped_at = replica.clock.now
        replica.live[request.id] = request
        replica.engine.inbox.put(Submit(part))

    def _step(self, replica: _Replica) -> None:
        before = replica.clock.now
        events = replica.engine.step()
        now = replica.clock.now
        self._collector.take([self._note(replica, event, now) for event in events], now)
        if now > before:
            replica.stepped_at = now
        else:
            replica.clock.advance(TICK_S)
            if replica.clock.now > replica.stepped_at + STALL_S:
                raise Stalled(f"replica {replica.number}: no step for {STALL_S:g} s with {len(replica.live)} requests")
        self._tell(replica, replica.clock.now)

    def _note(self, replica: _Replica, event: TokenEvent, now: float) -> TokenEvent:
        """Record an event of a replica, and return it for the collector. If another replica continues the request, the
        returned event has no finish reason."""
        request = replica.live[event.request_id]
        if event.tokens and event.request_id in self._awaited:
            self._awaited.discard(event.request_id)
            self._first_tokens.append(FirstToken(request.arrival, now - request.arrival, request.lane))
        if event.finish_reason is None:
            return event
        self._awaited.discard(event.request_id)
        del replica.live[event.request_id]
        self._chooser.finish(replica.number, request)
        if event.finish_reason is not FinishReason.LENGTH:
            self._handovers.forget(event.request_id)
        elif self._handovers.finish_first(event.request_id, event.tokens[-1] if event.tokens else -1, now):
            return event._replace(finish_reason=None)
        return event

    def _tell(self, replica: _Replica, now: float) -> None:
        """Let the router hear from a replica if `NEWS_S` have passed since it last did."""
        if now >= replica.told_at + NEWS_S:
            replica.told_at = now
            self._chooser.hear(replica.number, replica.engine.state, now)

    def _change(self, change: Change) -> None:
        if not change.dies:
            self._add(change.replica)
            return
        dead = self.replicas.pop(change.replica)
        self._chooser.leave(change.replica)
        self._handovers.lose(change.replica)
        for request in dead.live.values():
            self._handovers.forget(request.id)
            seq = dead.engine.state.sequences.get(request.id)
            produced = tuple(seq.tokens[len(request.prompt_ids) :]) if seq else request.produced
            self._orphans.append((change.at + NOTICE_S, request._replace(produced=produced, moves=request.moves + 1)))

    def _add(self, number: int) -> None:
        clock = VirtualClock(self.now)
        observe = partial(self._observe, number)
        engine = make_engine(self._setup, self._workload, clock, observe, clock.advance, number, self._copies)
        self._busy.setdefault(number, 0.0)
        self._chooser.join(number)
        self.replicas[number] = replica = _Replica(number, clock, engine)
        replica.engine.step()  # without work, it only takes commands: routers should know that it has the adapters

    def _copies(self, plan: StepPlan) -> int:
        """Return the number of KV pages that a step copies to host memory because its replica sends them to another
        replica (see `Handovers`)."""
        core = self._setup.core
        return self._handovers.pages_saved(plan, core.block_size) if core.host_pages else 0

    def _observe(self, number: int, plan: StepPlan, work: StepWork, seconds: float) -> None:
        page_bytes = self._setup.device.page_bytes
        self._bytes_copied += sum(len(load.pages) for load in plan.loads) * page_bytes
        self._bytes_read += sum(fetch.num_bytes for fetch in plan.fetches)
        self._busy[number] += seconds if work.tokens else 0.0
        self._handovers.note_step(plan, self.replicas[number].clock.now + seconds)
        self._collector.step(plan, work, seconds)
