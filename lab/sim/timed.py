"""An executor for simulations: its tokens mean nothing, but on a virtual clock a plan takes as long as it would on a
given device."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from random import Random

from engine.core.memory.adapters import HostAdapter
from engine.core.messages.commands import AdapterFetched, FetchAnswer, FetchCancelled, GrammarReady
from engine.core.messages.requests import AdapterHash
from engine.core.messages.step import AdapterFetch, Launch, SampledToken, ScheduledChunk, StepPlan, StepResult
from engine.core.plan.proposals import verified
from engine.executor.base import Claim, Report
from lab.devices.cost import CostModel, LiveSequence, StepWork, follow, measure
from lab.traffic.workload import position_token

HOST_NOISE = 0.3
"""Sigma of the lognormal noise of the host's time for a step, which other threads and processes disturb."""


class VirtualClock:
    """A clock in seconds that moves only when `advance` or `advance_to` is called."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds

    def advance_to(self, when: float) -> None:
        """Move the clock to `when`, but never backwards."""
        self.now = max(self.now, when)


class VirtualDevice:
    """Stands in for a device in simulations: steps take their time on a virtual clock, one after the other, while the
    host may work on the same clock."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self._ends: deque[float] = deque()
        """When each step ends that was not waited for yet, in seconds on the clock, the oldest step first."""
        self.free_at = 0.0
        """When the last step ends, in seconds on the clock."""

    def begin(self, seconds: float, launching: float = 0.0) -> bool:
        """Queue a simulated step that takes `seconds` once the device is free, and no less than its launch, `launching`
        seconds of the host, which advance the clock. Return whether the step was late."""
        late = bool(self._ends) and self.free_at < self._clock.now
        self.free_at = max(self.free_at, self._clock.now) + seconds
        self._clock.advance(launching)
        self.free_at = max(self.free_at, self._clock.now if launching else 0.0)
        self._ends.append(self.free_at)
        return late

    def wait(self) -> None:
        """Advance the virtual clock, if it is not there yet, to the end of the device's oldest step that was not waited
        for."""
        self._clock.advance_to(self._ends.popleft())


class VirtualDisk:
    """Stands in for a disk in simulations: reads of adapters take their time on a virtual clock, one after the other,
    at a constant rate in bytes per second."""

    def __init__(self, clock: VirtualClock, bytes_per_s: float) -> None:
        self._clock = clock
        self._bytes_per_s = bytes_per_s
        self._ends: dict[AdapterHash, tuple[float, float]] = {}
        """Adapter -> (when its read ends, seconds from the request to that end), in the order of the requests."""
        self._free_at = 0.0

    def begin(self, fetch: AdapterFetch) -> None:
        now = self._clock.now
        self._free_at = max(self._free_at, now) + fetch.num_bytes / self._bytes_per_s
        self._ends[fetch.adapter_hash] = self._free_at, self._free_at - now

    def cancel(self, adapter_hash: AdapterHash) -> list[FetchAnswer]:
        """Cancel the simulated read of an adapter that `done` has not returned yet; reads after it end no sooner.
        Return a list of its answer, `FetchCancelled`, or an empty list if there is no such read."""
        return [FetchCancelled(adapter_hash)] if self._ends.pop(adapter_hash, None) else []

    def done(self) -> list[FetchAnswer]:
        """Return an `AdapterFetched` for each adapter whose simulated read has ended on the virtual clock and was not
        returned before."""
        ended = [adapter_hash for adapter_hash, (end, _) in self._ends.items() if end <= self._clock.now]
        return [AdapterFetched(adapter_hash, self._ends.pop(adapter_hash)[1]) for adapter_hash in ended]


StepObserver = Callable[[StepPlan, StepWork, float], None]
"""Called with each plan, the work in it and its duration in seconds, before the clock has advanced by this duration."""
Copies = Callable[[StepPlan], int]
"""Returns the number of pages that a step copies between host and device beyond those in its plan."""


class TimedExecutor:
    """An executor for simulations on a virtual clock. A plan takes the time that the cost model predicts, times
    lognormal noise of `noise_sigma` by `seed`. `ranks` must hold the rank of every adapter."""

    # Before each plan, the clock advances by `host_s` for the host, with noise; with `launch_s`, steps with prompts are
    # launched kernel by kernel and take at least that. A token depends only on the request's seed and the token's
    # position, so that it is the same after a preemption. `submit` calls `observe` with each plan; `copies` counts
    # pages beyond it.
    def __init__(
        self,
        cost: CostModel,
        clock: VirtualClock,
        disk: VirtualDisk,
        ranks: Mapping[AdapterHash, int],
        observe: StepObserver,
        noise_sigma: float = 0.0,
        seed: int = 0,
        overlaps: bool = False,
        host_s: float = 0.0,
        launch_s: float = 0.0,
        copies: Copies = lambda plan: 0,
    ) -> None:
        self.overlaps = overlaps
        self._cost = cost
        self._clock = clock
        self.host_s = host_s
        self.launch_s = launch_s
        self._device = VirtualDevice(clock)
        self._submitted: deque[tuple[StepPlan, StepResult]] = deque()
        self._disk = disk
        self._ranks = ranks
        self._observe = observe
        self._copies = copies
        self._sigma = noise_sigma
        self._gauss = Random(seed).gauss
        self._live: dict[str, LiveSequence] = {}
        self._report: Report = lambda answer: None

    def connect(self, report: Report) -> None:
        self._report = report

    def submit(self, plan: StepPlan) -> Launch:
        begun = self._clock.now
        if self.host_s:
            self._clock.advance(self.host_s * math.exp(self._gauss(0.0, HOST_NOISE)))
        live = self._live
        follow(plan, live, self._ranks)
        for fetch in plan.fetches:
            self._disk.begin(fetch)
        for grammar in plan.prepared:
            self._report(GrammarReady(grammar))
        work = measure(plan, live)
        if more := self._copies(plan):
            work = work._replace(pages_copied=work.pages_copied + more)
        seconds = self._cost.seconds(work) * math.exp(self._gauss(0.0, self._sigma))
        self._observe(plan, work, seconds)
        reached, before = self._clock.now - begun, max(begun, self._device.free_at)
        launched = bool(self.launch_s and work.prefill_tokens)
        launching = self.launch_s * math.exp(self._gauss(0.0, HOST_NOISE)) if launched else 0.0
        late = self._device.begin(seconds, launching)
        sampled: list[SampledToken] = []
        for chunk in plan.chunks:
            request_id, start, count, _, samples, proposals, _ = chunk
            if proposals:
                sampled += _verified(chunk, live[request_id].seed)
            elif samples:
                sampled.append(SampledToken(request_id, position_token(live[request_id].seed, start + count)))
        copies = [self._cost.seconds(StepWork(pages_copied=len(load.pages))) for load in plan.loads]
        taken = self._device.free_at - before if self.overlaps else None
        result = StepResult(tuple(sampled), load_seconds=tuple(copies), seconds=taken, launched=launched)
        self._submitted.append((plan, result))
        return Launch(late, reached_s=reached if launched else None)

    def collect(self) -> StepResult:
        plan, result = self._submitted.popleft()
        self._device.wait()
        self._answer(plan)
        return result

    def load_host(self, path: str, claim: Claim) -> HostAdapter:
        """Raise ValueError: the adapters of a simulation have no files and are known by their ranks from the start."""
        raise ValueError(f"no adapter can be loaded from {path}: a simulation knows its adapters from the start")

    @property
    def page_memory(self) -> None:
        return None

    def close(self) -> None:
        """Do nothing: this executor starts no processes."""

    def _answer(self, plan: StepPlan) -> None:
        for answer in self._disk.done():
            self._report(answer)
        for adapter_hash in plan.cancelled_fetches:
            for answer in self._disk.cancel(adapter_hash):
                self._report(answer)


def _verified(chunk: ScheduledChunk, seed: int) -> list[SampledToken]:
    """Return the tokens that follow a chunk with proposals: one, and one more for each proposal that is right."""
    end = chunk.start + chunk.num_tokens
    rows = range(end - len(chunk.proposals), end + 1)
    sampled = [SampledToken(chunk.request_id, position_token(seed, position)) for position in rows]
    return verified(sampled, {chunk.request_id: chunk.proposals})
