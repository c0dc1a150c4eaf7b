"""Executors without a model.

`FakeExecutor` is for tests. Each token is a digest of its request's adapter, seed and tokens so far, so that a run that
was batched, preempted or served from the prefix cache must generate the same tokens as an undisturbed run.

`TimedExecutor` is for simulations. Its tokens mean nothing, but on a virtual clock a plan takes as long as it would on
a given device.
"""

from __future__ import annotations

import math
import struct
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from random import Random

from engine.core.commands import AdapterFetched, FetchAnswer, FetchCancelled, GrammarReady
from engine.core.types import (
    AdapterFetch,
    AdapterHash,
    Admission,
    Launch,
    PageId,
    PooledVector,
    Pooling,
    PromptRows,
    SampledToken,
    ScheduledChunk,
    StepPlan,
    StepResult,
)
from engine.executor.base import Claim, HostAdapter, Report
from engine.executor.cost import CostModel, LiveSequence, StepWork, measure

TOKEN_MASK = 2**31 - 1
FAKE_HIDDEN = 8
"""Elements of a fake vector."""
HOST_NOISE = 0.3
"""Sigma of the lognormal noise of the host's time for a step, which other threads and processes disturb."""


def fake_token(adapter_hash: AdapterHash | None, seed: int, tokens: list[int], vocab_size: int) -> int:
    """Return the token id that follows `tokens`: a digest of adapter, seed and tokens, modulo `vocab_size`."""
    text = f"{adapter_hash or ''}/{seed}/{','.join(map(str, tokens))}"
    return int.from_bytes(blake2b(text.encode(), digest_size=4).digest(), "little") % vocab_size


def fake_vector(adapter_hash: AdapterHash | None, pooling: Pooling, tokens: list[int]) -> bytes:
    """Return a vector as in `PooledVector`, of FAKE_HIDDEN elements or fewer: a digest of adapter, kind and tokens."""
    text = f"{adapter_hash or ''}/{pooling.kind.value}/{','.join(map(str, tokens))}"
    digest = blake2b(text.encode(), digest_size=4 * FAKE_HIDDEN).digest()
    kept = [number / 2**31 for number in struct.unpack(f"<{FAKE_HIDDEN}i", digest)][: pooling.dimensions or None]
    length = math.hypot(*kept) if pooling.normalize else 1.0
    return struct.pack(f"<{len(kept)}f", *(number / length for number in kept))


def fake_row(adapter_hash: AdapterHash | None, tokens: list[int], width: int) -> bytes:
    """Return the row of `prompt_logprobs.py` for the last of `tokens`: its logprob is a digest of adapter and tokens,
    its rank is 1, and its alternatives are the token itself and the ids after it, each half as likely as the one
    before."""
    text = f"{adapter_hash or ''}/{','.join(map(str, tokens))}"
    logprob = -int.from_bytes(blake2b(text.encode(), digest_size=2).digest(), "little") / 2**12
    tops = [logprob - number * math.log(2) for number in range(width)]
    return struct.pack(f"<fi{width}i{width}f", logprob, 1, *(tokens[-1] + number for number in range(width)), *tops)


@dataclass(slots=True)
class FakeSequence:
    """The state of an admitted request in a `FakeExecutor`, until a plan releases it. `tokens` are the admitted tokens
    and those sampled since; `pages` are all pages that plans gave it."""

    admission: Admission
    tokens: list[int]
    pages: list[PageId]


class FakeExecutor:
    """A deterministic executor that takes no time. Any path is an adapter of rank 8 that takes `adapter_pages` and
    `adapter_bytes`, with a digest of the folder's name as its hash.

    A plan's fetches and grammar preparations are answered when it is submitted; the rest is executed in `collect`.
    """

    def __init__(
        self, vocab_size: int = 1000, adapter_pages: int = 2, adapter_bytes: int = 0, overlaps: bool = False
    ) -> None:
        self.overlaps = overlaps
        self.vocab_size = vocab_size
        self.adapter_pages = adapter_pages
        self.adapter_bytes = adapter_bytes
        self.sequences: dict[str, FakeSequence] = {}
        self.report: Report = lambda answer: None
        self._submitted: deque[StepPlan] = deque()

    def connect(self, report: Report) -> None:
        self.report = report

    def submit(self, plan: StepPlan) -> Launch:
        self.fetch(plan)
        self.prepare(plan)
        self._submitted.append(plan)
        return Launch(late=len(self._submitted) > 1)

    def collect(self) -> StepResult:
        return self.compute(self._submitted.popleft())

    def compute(self, plan: StepPlan) -> StepResult:
        """Execute a plan: release, admit and extend sequences, and score, sample or pool. Return logprobs of prompts
        that are wanted, one token or vector for each chunk that samples one, and a load time of 0 seconds for each
        adapter load."""
        for request_id in plan.released:
            self.sequences.pop(request_id, None)
        for admission in plan.admitted:
            pages = list(admission.pages)
            self.sequences[admission.request_id] = FakeSequence(admission, list(admission.tokens), pages)
        for chunk in plan.chunks:
            self.sequences[chunk.request_id].pages.extend(chunk.new_pages)
        ended = [chunk.request_id for chunk in plan.chunks if chunk.samples]
        asks = {request_id: self.sequences[request_id].admission.pooling for request_id in ended}
        return StepResult(
            scored=tuple(filter(None, map(self._score, plan.chunks))),
            sampled=tuple(self._sample(request_id) for request_id in ended if self._generates(request_id)),
            pooled=tuple(self._pool(request_id, pooling) for request_id, pooling in asks.items() if pooling),
            load_seconds=(0.0,) * len(plan.loads),
        )

    def fetch(self, plan: StepPlan) -> None:
        """Report every fetch of a plan as done at once, in 0 seconds."""
        for fetch in plan.fetches:
            self.report(AdapterFetched(fetch.adapter_hash, 0.0))

    def prepare(self, plan: StepPlan) -> None:
        """Report every grammar in `plan.prepared` as ready at once. Tokens, being digests, follow no grammar."""
        for grammar in plan.prepared:
            self.report(GrammarReady(grammar))

    def load_host(self, path: str, claim: Claim) -> HostAdapter:
        digest = blake2b(Path(path).name.encode(), digest_size=16).hexdigest()
        host = HostAdapter(digest, 8, ("q_proj",), self.adapter_pages, self.adapter_bytes)
        if claim(host):
            self.report(AdapterFetched(host.adapter_hash, 0.0))
        return host

    def close(self) -> None:
        """Do nothing: this executor starts no processes."""

    def _pool(self, request_id: str, pooling: Pooling) -> PooledVector:
        seq = self.sequences[request_id]
        return PooledVector(request_id, fake_vector(seq.admission.adapter_hash, pooling, seq.tokens))

    def _generates(self, request_id: str) -> bool:
        return self.sequences[request_id].admission.params.max_tokens > 0

    def _score(self, chunk: ScheduledChunk) -> PromptRows | None:
        """Return the logprobs of the prompt tokens that a chunk predicts, or None where the result has no entry."""
        admission = self.sequences[chunk.request_id].admission
        width = admission.params.prompt_logprobs
        start = max(chunk.start, admission.num_scored)
        stop = min(chunk.start + chunk.num_tokens, admission.num_prompt - 1)
        if width is None or (start >= stop and not (chunk.samples and not admission.params.max_tokens)):
            return None
        prompt = list(admission.tokens[: admission.num_prompt])
        rows = [fake_row(admission.adapter_hash, prompt[: row + 2], width) for row in range(start, stop)]
        return PromptRows(chunk.request_id, start, b"".join(rows))

    def _sample(self, request_id: str) -> SampledToken:
        seq = self.sequences[request_id]
        token = fake_token(seq.admission.adapter_hash, seq.admission.params.seed, seq.tokens, self.vocab_size)
        seq.tokens.append(token)
        return SampledToken(request_id, token)


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
    """Computes steps one after the other on a virtual clock, while the host may work on the same clock."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self._ends: deque[float] = deque()
        """When each step ends that was not waited for yet, in seconds on the clock, the oldest step first."""
        self.free_at = 0.0
        """When the last step ends, in seconds on the clock."""

    def begin(self, seconds: float, launching: float = 0.0) -> bool:
        """Queue a step that takes `seconds` or, if the host needs longer, until all of it is launched: the clock
        advances by the `launching` seconds of a step that is launched kernel by kernel. Return whether the step was
        late: all earlier steps had ended, and not all were waited for."""
        late = bool(self._ends) and self.free_at < self._clock.now
        self.free_at = max(self.free_at, self._clock.now) + seconds
        self._clock.advance(launching)
        self.free_at = max(self.free_at, self._clock.now if launching else 0.0)
        self._ends.append(self.free_at)
        return late

    def wait(self) -> None:
        """Advance the clock, if it is not there yet, to the end of the oldest step that was not waited for."""
        self._clock.advance_to(self._ends.popleft())


class VirtualDisk:
    """Reads adapters one after the other on a virtual clock, at a constant rate in bytes per second."""

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
        """Drop a read that `done` has not returned yet; reads after it end no sooner. Return a list of its answer,
        `FetchCancelled`, or an empty list if there is no such read."""
        return [FetchCancelled(adapter_hash)] if self._ends.pop(adapter_hash, None) else []

    def done(self) -> list[FetchAnswer]:
        """Return the answers of the reads that have ended on the clock and were not returned before."""
        ended = [adapter_hash for adapter_hash, (end, _) in self._ends.items() if end <= self._clock.now]
        return [AdapterFetched(adapter_hash, self._ends.pop(adapter_hash)[1]) for adapter_hash in ended]


StepObserver = Callable[[StepPlan, StepWork, float], None]
"""Called with each plan, the work in it and its duration in seconds, before the clock has advanced by this duration."""


class TimedExecutor:
    """An executor for simulations on a virtual clock. A plan takes the time that the cost model predicts, times
    lognormal noise of `noise_sigma`, while a disk reads adapters. Before each plan, the clock advances by `host_s`
    seconds, times noise of `HOST_NOISE`, for the host to plan and launch it. Steps with prompts are launched kernel by
    kernel if `launch_s` is positive, the others replayed: such a step takes at least the `launch_s` seconds, with the
    same noise, that the host takes to launch it. `seed` is for all noises. `ranks` must hold the rank of every adapter.
    `submit` calls `observe` with each plan and answers its grammar preparations;
    `collect` answers the fetches that have ended by then or that the plan cancels.

    A token depends only on the request's seed and the token's position. It therefore takes constant time to make and is
    the same after a preemption.
    """

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
        for request_id in plan.released:
            live.pop(request_id, None)
        for admission in plan.admitted:
            adapter_hash = admission.adapter_hash
            rank = 0 if adapter_hash is None else self._ranks[adapter_hash]
            live[admission.request_id] = LiveSequence(admission.params.seed, adapter_hash, rank)
        for fetch in plan.fetches:
            self._disk.begin(fetch)
        for grammar in plan.prepared:
            self._report(GrammarReady(grammar))
        work = measure(plan, live)
        seconds = self._cost.seconds(work) * math.exp(self._gauss(0.0, self._sigma))
        self._observe(plan, work, seconds)
        reached, before = self._clock.now - begun, max(begun, self._device.free_at)
        launched = bool(self.launch_s and work.prefill_tokens)
        launching = self.launch_s * math.exp(self._gauss(0.0, HOST_NOISE)) if launched else 0.0
        late = self._device.begin(seconds, launching)
        sampled = tuple(
            [
                SampledToken(
                    chunk.request_id, _position_token(live[chunk.request_id].seed, chunk.start + chunk.num_tokens)
                )
                for chunk in plan.chunks
                if chunk.samples
            ]
        )
        copies = [self._cost.seconds(StepWork(pages_copied=len(load.pages))) for load in plan.loads]
        taken = self._device.free_at - before if self.overlaps else None
        result = StepResult(sampled, load_seconds=tuple(copies), seconds=taken, launched=launched)
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

    def close(self) -> None:
        """Do nothing: this executor starts no processes."""

    def _answer(self, plan: StepPlan) -> None:
        for answer in self._disk.done():
            self._report(answer)
        for adapter_hash in plan.cancelled_fetches:
            for answer in self._disk.cancel(adapter_hash):
                self._report(answer)


def _position_token(seed: int, position: int) -> int:
    return (seed * 0x9E3779B1 + position) & TOKEN_MASK
