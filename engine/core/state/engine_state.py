"""The complete state of the engine, as plain data. `plan/next_step.py` only reads it, and only the modules
of `commit/` change it."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field

from engine.core.config import CoreConfig
from engine.core.memory.adapter_eviction import Adapters
from engine.core.memory.host_tier import HostTier
from engine.core.memory.moves import KvExport, KvMoves
from engine.core.memory.pages import PagePool
from engine.core.memory.prefix import PrefixCache
from engine.core.messages.moves import FetchEnd
from engine.core.messages.requests import Cause, Lane, LaneMode, PrefixKey, TokenEvent
from engine.core.messages.step import StepPlan
from engine.core.predict.answer_lengths import AnswerLengths
from engine.core.speculate.drafting import DraftRecord
from engine.core.speculate.proposer import AnswerMemories
from engine.core.state.grammars import Grammars
from engine.core.state.ledger import Ledger, StepUnderWay
from engine.core.state.sequence import Sequence
from engine.core.state.waiting import Order, WaitingQueue, lanes_order

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
SIZES = tuple(1 << power for power in range(15))
"""1 to 16,384, in powers of two."""


class Buckets:
    """Histogram like Prometheus's: the number of values in each range, and the sum of all. Adding a value takes under a
    microsecond."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        """`bounds` are the inclusive upper bounds of all ranges but the last, ascending."""
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        """Number of values in each range; the last range has no upper bound."""
        self.sum = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


@dataclass(slots=True)
class AdapterCounts:
    """Moves of adapters since the engine started: loads to the device, and fetches from disk to host memory."""

    loads: int = 0
    load_seconds: float = 0.0
    evictions: int = 0
    fetches: int = 0
    fetch_seconds: float = 0.0
    fetch_failures: int = 0
    host_evictions: int = 0


@dataclass(slots=True)
class KvCounts:
    """Moves of KV pages since the engine started: to the host and back, and between engines."""

    saved: int = 0
    restored: int = 0
    pages_in: int = 0
    pages_out: int = 0
    seconds_in: float = 0.0
    fetches: dict[FetchEnd, int] = field(default_factory=lambda: dict.fromkeys(FetchEnd, 0))


@dataclass(slots=True)
class Counters:
    """Event counts since the engine started. Durations are in seconds; tokens and pages are numbers."""

    steps: int = 0
    late_steps: int = 0
    host_bound_steps: int = 0
    preempted_for: dict[Cause, int] = field(default_factory=lambda: dict.fromkeys(Cause, 0))
    preempted_in: dict[Lane, int] = field(default_factory=lambda: dict.fromkeys(Lane, 0))
    recomputed_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    proposed_tokens: int = 0
    accepted_tokens: int = 0
    adapters: AdapterCounts = field(default_factory=AdapterCounts)
    kv: KvCounts = field(default_factory=KvCounts)
    step_sequences: Buckets = field(default_factory=lambda: Buckets(SIZES))
    """Sequences in a step."""
    step_tokens: Buckets = field(default_factory=lambda: Buckets(SIZES))
    """Tokens that a step computes, with proposals."""
    yield_seconds: Buckets = field(default_factory=lambda: Buckets(SECONDS))
    """Seconds from the arrival of an interactive request that only batch work delays to the step that starts it."""

    @property
    def preemptions(self) -> int:
        return sum(self.preempted_for.values())


@dataclass(slots=True)
class Steps:
    """The steps that were committed, and what the next one passes to the executor."""

    now: float = 0.0
    """When the state last changed, in seconds on the engine's clock."""
    in_flight: StepPlan = field(default_factory=StepPlan)
    """The plan that was committed last."""
    absorbed: StepPlan = field(default_factory=StepPlan)
    """The last plan whose result was absorbed: `in_flight`, or the one before it where steps are planned ahead."""
    under_way: deque[StepUnderWay] = field(default_factory=deque)
    """Steps that were committed and whose results were not absorbed yet, the oldest first."""
    released: list[str] = field(default_factory=list)
    """Ids of requests that were running and ended since the last plan: the next plan tells the executor to forget
    them."""


@dataclass(slots=True)
class Learned:
    """What ended requests have taught of later ones."""

    answers: AnswerMemories = field(default_factory=AnswerMemories)
    """Recent answers by grammars, from which proposals are made."""
    lengths: AnswerLengths = field(default_factory=AnswerLengths)
    drafts: DraftRecord = field(default_factory=DraftRecord)


@dataclass(slots=True)
class EngineState:
    config: CoreConfig
    pool: PagePool
    host: HostTier
    waiting: WaitingQueue
    ledger: Ledger
    prefix: PrefixCache = field(default_factory=PrefixCache)
    moves: KvMoves = field(default_factory=KvMoves)
    adapters: Adapters = field(default_factory=Adapters)
    grammars: Grammars = field(default_factory=Grammars)
    learned: Learned = field(default_factory=Learned)
    sequences: dict[str, Sequence] = field(default_factory=dict)
    """Sequences of all live requests, waiting or running, by request id."""
    running: dict[str, Sequence] = field(default_factory=dict)
    """Running sequences by request id, in the order in which they started."""
    suspects: dict[str, Sequence] = field(default_factory=dict)
    """Live requests that were submitted as suspect, in order of arrival."""
    steps: Steps = field(default_factory=Steps)
    outbox: deque[TokenEvent] = field(default_factory=deque)
    counters: Counters = field(default_factory=Counters)

    @classmethod
    def create(cls, config: CoreConfig, order: Order | None = None) -> EngineState:
        """Return the state of an engine that has no requests. `order` defaults to that of the lanes."""
        return cls(
            config=config,
            pool=PagePool(config.num_pages),
            host=HostTier(config.host_pages if config.scheduling.preemption != "recompute" else 0),
            waiting=WaitingQueue(order or lanes_order(config.scheduling.priority_s)),
            ledger=Ledger(config),
        )

    @property
    def adapter_pages(self) -> int:
        """Number of device pages that hold adapters."""
        return self.adapters.held.pages

    @property
    def host_bytes_free(self) -> int:
        """Bytes of the host memory for adapters that are neither used nor reserved."""
        return self.config.host_adapter_bytes - self.adapters.held.host_bytes

    @property
    def most_held(self) -> int:
        """Maximum number of idle prefix pages that are protected from batch work, so that batch work always finds
        room."""
        return int(self.config.scheduling.hold_share * (self.config.usable_pages - self.adapter_pages))

    @property
    def movable_pages(self) -> int:
        """Number of further host pages that moves between engines may take. At most half of the tier is theirs, so that
        they leave room for preempted sequences."""
        return max(0, self.host.num_pages // 2 - len(self.host.reserved) - len(self.host.leased))

    def is_live(self, seq: Sequence) -> bool:
        """Return whether a sequence has not ended; a new request may have its id by now."""
        return self.sequences.get(seq.id) is seq

    def may_start(self, lane: Lane) -> bool:
        """Return whether requests wait in a lane and the lane is not paused."""
        return bool(self.waiting.groups(lane)) and self.waiting.modes[lane] is not LaneMode.PAUSED

    @property
    def has_work(self) -> bool:
        """Return whether another step is needed: for live requests, for results under way, to report changes to the
        executor or to clients, or until dropped adapters are forgotten. Waiting requests of paused lanes do not
        count."""
        expected = any(not step.plan.is_empty for step in self.steps.under_way)
        live = self.running or any(map(self.may_start, Lane))
        news = self.steps.released or self.outbox or self.grammars.forgotten or self.moves.outbox
        exports = any(map(self._may_export, self.moves.exports.values()))
        return bool(expected or live or news or self.adapters.closing or exports)

    def is_at_hand(self, key: PrefixKey) -> bool:
        """Return whether this engine has the KV page of a prefix key, on the device or in its host tier."""
        return key in self.prefix.page_of or key in self.host.page_of

    def _may_export(self, export: KvExport) -> bool:
        """Return whether an export of KV pages to another engine needs another step, because that step can make a page
        ready for it, or learn that no further page will follow."""
        if export.is_over:
            return False
        left = export.keys[export.num_leased :]
        return not (left and export.waits) or self.is_at_hand(left[0])
