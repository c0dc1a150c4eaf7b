"""Configuration of the scheduling core: frozen, validated once. Every constant has its reason beside it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import isfinite

SCHEDULERS = ("continuous", "dynamic", "static")
POLICIES = ("lanes", "fcfs", "sjf", "priority")
PREEMPTIONS = ("checkpoint", "swap", "recompute")
MOST_KNOTS = 8
SHARES = (
    "batch_floor",
    "promoted_share",
    "deadline_margin",
    "watermark",
    "forgetting",
    "spare_progress",
    "hold_share",
    "locality_share",
)


def _check(owner: object, minimum: float, *names: str) -> None:
    for name in names:
        if not getattr(owner, name) >= minimum:
            raise ValueError(f"{name} must be at least {minimum:g}, not {getattr(owner, name)}")
        if not isfinite(getattr(owner, name)):
            raise ValueError(f"{name} must be a finite number, not {getattr(owner, name)}")


@dataclass(frozen=True, slots=True)
class LaneGoals:
    """What a lane promises, and what it refuses rather than break the promise.

    Raises:
        ValueError: a value is out of range; the message names it.
    """

    ttft_s: float
    """Time to first token, in seconds from arrival. A request may ask for another, at least a quarter of it."""
    itl_s: float
    """Time between two tokens, in seconds. A request may ask for another, at least a quarter of it."""
    attainment: float = 0.99
    """Share of requests and tokens that should be in time. Batch work shares steps with interactive ones just so far
    that no more than the rest of the tokens are late."""
    max_wait_s: float = 0.0
    """A request predicted to wait longer than this before it runs is refused at once with the true Retry-After;
    0: any wait is accepted. Setting it to `ttft_s` refuses whatever would miss its goal."""

    def __post_init__(self) -> None:
        _check(self, 0, "ttft_s", "itl_s", "max_wait_s")
        if not (self.ttft_s > 0 and self.itl_s > 0):
            raise ValueError(f"ttft_s and itl_s must be positive, not {self.ttft_s} and {self.itl_s}")
        if not 0 <= self.attainment <= 1:
            raise ValueError(f"attainment must be between 0 and 1, not {self.attainment}")


STRICTEST_GOAL = 0.25
"""Of the lane's goals: what a request may ask for at most, so that it cannot take the machine for itself."""


def goal_of(asked: float | None, promised: float) -> float:
    """Seconds: what a request asks for, as far as its lane lets it."""
    return promised if asked is None else max(asked, promised * STRICTEST_GOAL)


INTERACTIVE_GOALS = LaneGoals(ttft_s=0.5, itl_s=0.1)
"""MLPerf's conversational limits for 8B models (0.5 s, 30 to 100 ms): what people take for instant."""
BATCH_GOALS = LaneGoals(ttft_s=3600.0, itl_s=60.0, attainment=0.0)
"""Nobody watches a batch: these only give its percentiles something to be measured against."""


@dataclass(frozen=True, slots=True)
class Scheduling:
    """How a step is filled, who makes room and who goes first.

    Raises:
        ValueError: a value is out of range; the message names it.
    """

    scheduler: str = "continuous"
    """continuous: requests join and leave at any step. static: `max_seqs` requests are gathered, start together, and
    the next ones wait until the last has ended. dynamic: the same with whoever came within a window."""
    policy: str = "lanes"
    """lanes: everything described here. fcfs, sjf (shortest job first) and priority: one queue in that order under a
    static token budget, for comparison."""
    window_s: float = 0.05
    """Of `dynamic`: how long the first request of a batch waits for others. Of `static`: 20 times this, so that the
    last requests of a run, too few for a batch, do not wait for ever."""

    ttft_stretch: float = 1.0
    """Batch work may lengthen a step that carries a prompt of a higher lane to at most this multiple of what it would
    take without. Nothing by default: prompts that come in bursts sit out every step before theirs, and 1.05 in
    simulation of an H100 made the p99 of their TTFT 1.15 times as long on the Mooncake trace, for the same batch
    throughput."""
    itl_stretch: float = 1.46
    """The same for a step that carries only decodes of a higher lane: below 1.5, the goal for its p99, with room for
    the steps in which it does not hold because a prompt was added."""
    tail_share: float = 1.0
    """A step with interactive decodes only may in any case last this share of the 98th percentile of those they would
    be in without batch work: prompts of others make that tail, and batch work below it makes it no longer. Less keeps
    typical tokens faster and costs batch throughput: on two cores, where a decode takes 27 ms and the tail is 76, batch
    work kept 0.69 of it with 0 (every step within its stretch), and 0.88 with 1; simulated with 2,000 adapters on an
    H100, 0.58 with 0.4 and 0.90 with 1."""
    probe_every: int = 100
    """One step in so many carries nothing beside its interactive work, so that it stays known what that takes without.
    Measured: never seen alone, a step of 6.5 ms was believed to take 11, and stretched to 16."""
    yield_stretch: float = 3.0
    """A step without a higher lane lasts at most this multiple of a step of one decode, since a request that arrives
    has to sit it out. Below 2 the weights are read for too few tokens; above 4 the wait is felt."""
    yield_bound_s: float = 0.25
    """And never longer than this, however slow the device."""
    min_chunk: int = 16
    """Prompt tokens that an interactive prefill gets even when decodes are late, so that it cannot starve: a page."""
    full_chunk: float = 5.0
    """Beside batch work, a step with an interactive prompt may always last this multiple of one decode's, and beyond it
    only as long as the tail may be: cut shorter, more than a fifth of a prompt's time would go into reading the weights
    again."""
    long_prompt_steps: float = 2.0
    """A prompt that has more than so many full steps to go leaves half of each to others, and goes behind them: nobody
    should sit out the 60 steps of 120,000 tokens."""
    batch_floor: float = 0.03
    """Share of device time over `floor_window_s` that batch work gets whatever the interactive lane would like, short
    of a predicted miss: 2 s a minute keeps its clients' connections and deadlines alive."""
    floor_window_s: float = 60.0

    harvest_below: float = 0.7
    """While batch deadlines need less than this share of the device time batch work has been getting, they are left
    alone: grouping by adapter and prefix is worth more."""
    promote_from: float = 1.0
    """From this need on, batch work is promoted: its floor becomes `promoted_share`."""
    promoted_share: float = 0.25
    """Bounds what a flood of tight deadlines can take from the interactive lane."""
    deadline_margin: float = 0.05
    """Share of the time left that is kept back for surprises."""

    preemption: str = "checkpoint"
    """What becomes of a preempted sequence's KV. recompute: forgotten (but for the prefix cache). swap: copied to host
    pages as it is preempted. checkpoint: copied page by page while it runs, so that yielding copies nothing."""
    checkpoint_pages: int = 2
    """Pages copied to the host a step, at most. Decodes fill one page a sequence in `block_size` steps, so two keep up
    with 32 of them at 16 tokens a page; a copy of a page is short beside a step."""
    max_preemptions: int = 3
    """A sequence preempted this often is only taken again when nothing else is left: thrashing costs more than it
    gives."""
    spare_progress: float = 0.95
    """The same for one that has this share of its tokens: its pages come back by themselves in a moment."""
    watermark: float = 0.01
    """Share of pages a batch sequence leaves free when it starts, for those that run to grow into."""

    hold_s: float = 300.0
    """A cached prefix last used by the interactive lane is safe from batch work for so long: the pause after which
    people rarely come back to a chat. (Holding idle adapters alike was tried: with 2,000 of them it took two thirds of
    the batch throughput and gave 3 % of TTFT.)"""
    hold_share: float = 0.5
    """But never more of them than this share of the pages without an adapter: a batch must find room for itself."""
    quantum_s: float = 0.05
    """Device time one tenant may be ahead of another before locality (a resident adapter, a cached prefix) stops being
    a reason to serve it first. Small beside a request, large beside a step."""
    locality_window: int = 8
    """Waiting requests of a tenant looked at for locality."""
    locality_share: float = 0.5
    """Of its lane's goal for the first token, after which the first of them goes before more local ones. Measured on
    two cores, 32 chats at once over 1,000 adapters: passed over for `adapter_age_s`, those whose adapter was in host
    memory waited 1.9 s in the median, and the others 0.5."""
    priority_s: float = 10.0
    """Waiting time that one step of `priority` is worth: priorities order requests of a tenant, and age."""
    adapter_age_s: float = 2.0
    """A request that has waited this long for an adapter keeps others from starting with the resident adapter that is
    served most, until it makes room."""

    forgetting: float = 0.99
    """Of the step-time model: a step counts for 1/e after a hundred others of its size, so that it follows a device
    that heats up and not a moment's noise."""
    knots: tuple[int, ...] = (32, 128, 512)
    """Of the step-time model: numbers of tokens at which a token more may begin to cost more, as when the arithmetic
    no longer hides behind reading the weights. That is at some 25 tokens on a CPU and 200 on an H100; four apart, they
    are near enough to any device's."""
    margin_floor: float = 1.05
    margin_ceiling: float = 1.5
    """Predictions are multiplied by the 95th percentile of actual / predicted over the last steps, within these."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "knots", tuple(self.knots))  # a list, where it comes from JSON
        if list(self.knots) != sorted(set(self.knots)) or any(knot < 1 for knot in self.knots):
            raise ValueError(f"knots must be positive and ascending, not {self.knots}")
        for name, allowed in (("scheduler", SCHEDULERS), ("policy", POLICIES), ("preemption", PREEMPTIONS)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, not {getattr(self, name)!r}")
        _check(self, 1, "ttft_stretch", "itl_stretch", "yield_stretch", "min_chunk", "max_preemptions")
        _check(self, 1, "full_chunk", "long_prompt_steps")
        _check(self, 2, "probe_every")
        _check(self, 1, "locality_window", "margin_floor", "margin_ceiling")
        _check(self, 0, *(item.name for item in fields(self) if item.type == "float"), "checkpoint_pages")
        if self.margin_floor > self.margin_ceiling:
            raise ValueError(f"margin_floor ({self.margin_floor}) must not be above margin_ceiling")
        if len(self.knots) > MOST_KNOTS or not (self.floor_window_s and self.yield_bound_s and self.quantum_s):
            raise ValueError(f"at most {MOST_KNOTS} knots; floor_window_s, yield_bound_s, quantum_s must be positive")
        for name in SHARES:
            if getattr(self, name) > 1:
                raise ValueError(f"{name} is a share and must be at most 1, not {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class CoreConfig:
    """Sizes and limits the planner works within.

    Raises:
        ValueError: a value is out of range; the message names it.
    """

    num_pages: int
    """Pages in the pool. Page 0 is the null page: always zero, never handed out."""
    block_size: int = 16
    """Tokens a page."""
    host_pages: int = 0
    """Pages of host memory that preempted KV may be copied to; 0: none."""
    max_seqs: int = 32
    """Sequences running at once."""
    max_model_len: int = 2048
    """Prompt and output tokens of one sequence."""
    token_budget: int = 256
    """Tokens computed a step, over all sequences: what the executor has memory for."""
    max_resident_adapters: int = 1024
    """Rows of the adapter indirection table; what truly bounds residency is pages."""
    min_kv_pages: int = 0
    """Pages that adapters may never take. With 0 both compete for all of them, which wastes none: idle adapters yield
    to KV, and those in use bring sequences that end."""
    max_adapter_pages: int = 0
    """Pages that adapters may take at most; 0: all but `min_kv_pages`."""
    host_adapter_bytes: int = 2 << 30
    """Bound on packed adapters in host memory, those on their way there included."""
    max_fetches: int = 4
    """Adapters being read at a time: enough to keep a disk busy while others are packed. One is kept for the
    interactive lane, so that a batch's fetches are never all in its way."""
    prefetch_window: int = 32
    """Waiting requests of a lane whose adapters are read and grammars prepared ahead: as many as an engine starts
    at once."""
    max_preparations: int = 2
    """Grammars being prepared at a time, one of them kept for the interactive lane: each takes a core from the steps,
    for milliseconds as a rule and for a quarter of a second at worst."""
    grammar_bytes: int = 256 << 20
    """Memory of the prepared grammars that live requests need, shared by tenants' weights; beyond it each tenant may
    have one, and requests for others wait."""
    adapter_half_life_s: float = 300.0
    """A start counts half as much for keeping an adapter when it is so long ago: the pause after which people rarely
    come back, as for `hold_s`."""
    fetch_backoff_s: float = 1.0
    """After a failed fetch, requests for the adapter are refused for so long, twice as long after each further one: a
    folder that is gone rarely comes back within a second, and asking costs a thread and a disk."""
    max_waiting: int = 10_000
    """Requests in the waiting queue before new ones are refused, or take the place of one of a lower lane. Beyond it
    each tenant may have one request waiting in each lane."""
    eos_token_ids: tuple[int, ...] = ()
    prefix_caching: bool = True
    share_prefixes: bool = False
    """Between tenants too, who may then find out what others have asked."""
    interactive: LaneGoals = INTERACTIVE_GOALS
    batch: LaneGoals = BATCH_GOALS
    scheduling: Scheduling = Scheduling()

    def __post_init__(self) -> None:
        _check(self, 1, "block_size", "max_seqs", "max_model_len", "token_budget", "max_resident_adapters")
        _check(self, 1, "max_waiting")
        _check(self, 1, "max_fetches", "prefetch_window", "max_preparations", "grammar_bytes")
        _check(self, 0, "host_pages", "min_kv_pages", "max_adapter_pages", "host_adapter_bytes", "fetch_backoff_s")
        if not self.adapter_half_life_s > 0:
            raise ValueError(f"adapter_half_life_s must be positive, not {self.adapter_half_life_s}")
        if self.num_pages < 2:
            raise ValueError(f"num_pages must be at least 2 (page 0 is the null page), not {self.num_pages}")
        if self.token_budget < self.max_seqs:
            raise ValueError(f"token_budget ({self.token_budget}) must be at least max_seqs ({self.max_seqs})")

    @property
    def usable_pages(self) -> int:
        return self.num_pages - 1

    @property
    def adapter_pages(self) -> int:
        """Pages that adapters may take together."""
        spare = max(0, self.usable_pages - self.min_kv_pages)
        return min(self.max_adapter_pages or spare, spare)

    @property
    def goals(self) -> tuple[LaneGoals, LaneGoals]:
        """By lane."""
        return self.interactive, self.batch

    @property
    def long_prompt(self) -> float:
        """Tokens from which a prompt takes many steps."""
        return self.scheduling.long_prompt_steps * self.token_budget

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens of KV."""
        return -(-num_tokens // self.block_size)
