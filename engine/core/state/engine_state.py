"""The complete state of the engine, as plain data. `plan/next_step.py` only reads it; `commit/apply.py`,
`commit/step.py`, `commit/adapters.py` and `commit/moves.py` change it."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field

from engine.core.config import CoreConfig
from engine.core.memory.adapter_eviction import AdapterTiers
from engine.core.memory.adapters import Adapter
from engine.core.memory.host_tier import HostTier
from engine.core.memory.moves import KvExport, KvMoves
from engine.core.memory.pages import PagePool
from engine.core.memory.prefix import PrefixCache
from engine.core.messages.moves import FetchEnd
from engine.core.messages.requests import AdapterHash, Cause, Lane, LaneMode, PrefixKey, TokenEvent
from engine.core.messages.step import StepPlan
from engine.core.predict.answer_lengths import AnswerLengths
from engine.core.speculate.drafting import DraftRecord
from engine.core.speculate.proposer import AnswerMemories
from engine.core.state.grammars import Grammars
from engine.core.state.ledger import Ledger
from engine.core.state.sequence import Sequence
from engine.core.state.slow_masks import SlowMasks
from engine.core.state.under_way import StepUnderWay
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
    adapter_loads: int = 0
    adapter_load_seconds: float = 0.0
    adapter_evictions: int = 0
    adapter_fetches: int = 0
    adapter_fetch_seconds: float = 0.0
    adapter_fetch_failures: int = 0
    adapter_host_evictions: int = 0
    pages_saved: int = 0
    pages_restored: int = 0
    kv_pages_in: int = 0
    kv_pages_out: int = 0
    kv_seconds_in: float = 0.0
    kv_fetches: dict[FetchEnd, int] = field(default_factory=lambda: dict.fromkeys(FetchEnd, 0))
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
class EngineState:
    config: CoreConfig
    pool: PagePool
    host: HostTier
    waiting: WaitingQueue
    ledger: Ledger
    prefix: PrefixCache = field(default_factory=PrefixCache)
    moves: KvMoves = field(default_factory=KvMoves)
    adapters: dict[AdapterHash, Adapter] = field(default_factory=dict)
    tiers: AdapterTiers = field(default_factory=AdapterTiers)
    """Totals of the pages, slots and bytes that adapters hold, and the order in which adapters are evicted."""
    grammars: Grammars = field(default_factory=Grammars)
    masks: SlowMasks = field(default_factory=SlowMasks)
    answers: AnswerMemories = field(default_factory=AnswerMemories)
    """Recent answers by grammars, from which proposals are made."""
    lengths: AnswerLengths = field(default_factory=AnswerLengths)
    drafts: DraftRecord = field(default_factory=DraftRecord)
    sequences: dict[str, Sequence] = field(default_factory=dict)
    """Sequences of all live requests, waiting or running, by request id."""
    running: dict[str, Sequence] = field(default_factory=dict)
    """Running sequences by request id, in the order in which they started."""
    suspects: dict[str, Sequence] = field(default_factory=dict)
    """Live requests that were submitted as suspect, in order of arrival."""
    modes: dict[Lane, LaneMode] = field(default_factory=lambda: dict.fromkeys(Lane, LaneMode.OPEN))
    released: list[str] = field(default_factory=list)
    """Ids of requests that were running and ended since the last plan: the next plan tells the executor to forget
    them."""
    now: float = 0.0
    """When the state last changed, in seconds on the engine's clock."""
    in_flight: StepPlan = field(default_factory=StepPlan)
    """The plan that was committed last."""
    absorbed: StepPlan = field(default_factory=StepPlan)
    """The last plan whose result was absorbed: `in_flight`, or the one before it where steps are planned ahead."""
    under_way: deque[StepUnderWay] = field(default_factory=deque)
    """Steps that were committed and whose results were not absorbed yet, the oldest first."""
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
        return self.tiers.held.pages

    @property
    def host_bytes_free(self) -> int:
        """Bytes of the host memory for adapters that are neither used nor reserved."""
        return self.config.host_adapter_bytes - self.tiers.held.host_bytes

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
        return bool(self.waiting.groups(lane)) and self.modes[lane] is not LaneMode.PAUSED

    @property
    def has_work(self) -> bool:
        """Return whether another step is needed: for live requests, for results under way, to report changes to the
        executor or to clients, or until dropped adapters are forgotten. Waiting requests of paused lanes do not
        count."""
        expected = any(not step.plan.is_empty for step in self.under_way)
        live = self.running or any(map(self.may_start, Lane))
        news = self.released or self.outbox or self.tiers.closing or self.grammars.forgotten or self.moves.outbox
        return bool(expected or live or news or any(map(self._may_export, self.moves.exports.values())))

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
