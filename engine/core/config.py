"""Configuration of the scheduling core. Objects are frozen and validated once; each constant documents its reason."""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import isfinite

PREEMPTIONS = ("checkpoint", "swap", "recompute")
MOST_KNOTS = 8
SHARES = (
    "batch_floor",
    "promoted_share",
    "watermark",
    "forgetting",
    "hold_share",
)

LONG_PROMPT_STEPS = 2.0
"""A prompt that still needs more than this many full steps leaves half of each step to other requests and goes behind
them, so that no request has to wait for the 60 steps of a prompt of 120,000 tokens."""


def _check(owner: object, minimum: float, *names: str) -> None:
    for name in names:
        if not getattr(owner, name) >= minimum:
            raise ValueError(f"{name} must be at least {minimum:g}, not {getattr(owner, name)}")
        if not isfinite(getattr(owner, name)):
            raise ValueError(f"{name} must be a finite number, not {getattr(owner, name)}")


@dataclass(frozen=True, slots=True)
class LaneGoals:
    """Latency goals of a lane, the share of tokens that should meet them, and the predicted wait beyond which the lane
    refuses a request. Raises ValueError, which names the value, if one is out of range."""

    ttft_s: float
    """TTFT goal, in seconds from arrival. A request may ask for another goal, of at least a quarter of this one."""
    itl_s: float
    """ITL goal, in seconds. A request may ask for another goal, of at least a quarter of this one."""
    attainment: float = 0.99
    """Share of first tokens (TTFT) and of further tokens (ITL) that should be in time. Batch work may extend
    interactive steps only while no more than the remaining share of tokens (1 % by default) is late."""
    max_wait_s: float = 0.0
    """A request that is predicted to wait longer than this many seconds before it runs is refused at once, with the
    predicted Retry-After. 0 accepts any wait. The value of `ttft_s` refuses each request that would miss its goal."""

    def __post_init__(self) -> None:
        _check(self, 0, "ttft_s", "itl_s", "max_wait_s")
        if not (self.ttft_s > 0 and self.itl_s > 0):
            raise ValueError(f"ttft_s and itl_s must be positive, not {self.ttft_s} and {self.itl_s}")
        if not 0 <= self.attainment <= 1:
            raise ValueError(f"attainment must be between 0 and 1, not {self.attainment}")


STRICTEST_GOAL = 0.25
"""Smallest multiple of the lane's goals that a request may ask for, so that it cannot take the machine for itself."""


def goal_of(asked: float | None, promised: float) -> float:
    """Return the TTFT or ITL goal of a request in seconds: what it asks for (`asked`), but at least `STRICTEST_GOAL`
    times its lane's goal (`promised`). If `asked` is None, the request gets its lane's goal."""
    return promised if asked is None else max(asked, promised * STRICTEST_GOAL)


INTERACTIVE_GOALS = LaneGoals(ttft_s=0.5, itl_s=0.1)
"""Default goals of the interactive lane: MLPerf's conversational limits for 8B models (0.5 s, 30 to 100 ms), which
people perceive as instant."""
BATCH_GOALS = LaneGoals(ttft_s=3600.0, itl_s=60.0, attainment=0.0)
"""Default goals of the batch lane. No user watches a batch, so they only define which tokens its attainment counts as
late."""


@dataclass(frozen=True, slots=True)
class Scheduling:
    """Rules of the scheduler: how a step is filled, which sequences are preempted, in which order requests start, which
    cached prefixes are held, and how step times are learned. Raises ValueError, which names the value, if one is out of
    range."""

    ttft_stretch: float = 1.0
    """Batch work may lengthen a step that carries a prompt of a higher lane to at most this multiple of the step's
    duration without batch work. By default it may not lengthen the step at all: prompts that come in bursts wait for
    every step before theirs, and 1.05 in simulation of an H100 made the p99 of their TTFT 1.15 times as long on the
    Mooncake trace, for the same batch throughput."""
    itl_stretch: float = 1.46
    """Like `ttft_stretch`, for a step that carries only decodes of a higher lane. It is below 1.5, the goal for the p99
    of the stretch, to leave room for the steps that exceed it because a prompt was added."""
    tail_share: float = 1.0
    """A step whose interactive work is only decodes may always last this share of the tail, which is the 98th
    percentile of the duration of the steps that the decodes would be in without batch work. Other requests' prompts
    cause that tail, and batch work that stays below it makes it no longer. A lower value makes typical tokens faster
    and costs batch throughput: on two cores, where a decode takes 27 ms and the tail is 76 ms, batch work kept 0.69 of
    its throughput with 0 (each step within its stretch) and 0.88 with 1; in simulation of an H100 with 2,000 adapters,
    0.58 with 0.4 and 0.90 with 1."""
    probe_every: int = 100
    """Each step whose number is a multiple of this carries no batch work beside interactive work, unless batch work is
    below its floor, so that the model keeps learning how long interactive work takes alone. Measured without such
    steps: the model believed that a step of 6.5 ms took 11 ms, and batch work stretched it to 16 ms."""
    yield_stretch: float = 3.0
    """A step without work of a higher lane lasts at most this multiple of a step of one decode, because a request that
    arrives has to wait for the step's end. Below 2 the weights are read for too few tokens; above 4 the wait is
    noticeable."""
    yield_bound_s: float = 0.25
    """Upper bound, in seconds, of a step without work of a higher lane, however slow the device is."""
    min_chunk: int = 16
    """Prompt tokens that an interactive prefill gets even when decodes are late, so that it cannot starve: one page. At
    a long context they are fewer, if so many take longer than two ITL goals (see plan/limits.py)."""
    batch_floor: float = 0.03
    """Minimum share of device time over `floor_window_s` that batch work gets, even where interactive steps become
    longer, unless an interactive token is predicted to be late. 2 s per minute keep the connections and deadlines of
    batch clients alive."""
    floor_window_s: float = 60.0

    promoted_share: float = 0.25
    """Minimum share of device time for batch work whose deadlines need it. It bounds what a flood of tight deadlines
    can take from the interactive lane."""

    preemption: str = "checkpoint"
    """How the KV of a preempted sequence is kept. recompute: it is dropped, except from the prefix cache. swap: it is
    copied to host pages when the sequence is preempted. checkpoint: that of a batch sequence is copied page by page
    while it runs, so that its preemption copies nothing; an interactive one is copied as with swap."""
    checkpoint_pages: int = 0
    """Maximum number of pages that a step copies to the host as checkpoints. 0 means as many as `max_seqs` decoding
    sequences fill in a step: each fills one in `block_size` steps. A copy of a page is short compared with a step."""
    watermark: float = 0.01
    """Share of the pages that a batch sequence leaves free when it starts, so that running sequences can grow."""

    hold_s: float = 300.0
    """Seconds for which batch work may not evict a cached prefix that the interactive lane used last: after such a
    pause people rarely come back to a chat. (Holding idle adapters in the same way was tried: with 2,000 adapters it
    cost two thirds of the batch throughput and gained 3 % of TTFT.)"""
    hold_share: float = 0.5
    """Maximum number of idle prefix pages that `hold_s` protects from batch work, as a share of the pages without an
    adapter, so that batch work always finds room."""
    priority_s: float = 10.0
    """Seconds of waiting time that one level of `priority` is worth. Priorities order the requests of a tenant, and a
    waiting request of low priority eventually goes before newer requests of high priority."""
    adapter_age_s: float = 2.0
    """Once a request has waited this many seconds for an adapter, no more sequences start with the resident adapter
    that is served most, until that adapter can be evicted. Copies in host memory that other requests wait for may be
    freed too."""

    forgetting: float = 0.99
    """Factor by which the step-time model discounts a step with each later step of the same size: after a hundred of
    them a step counts for 1/e, so that the model follows a device that heats up but not momentary noise."""
    knots: tuple[int, ...] = (32, 128, 512)
    """Token counts above which the step-time model allows each further token to cost more, as when arithmetic is no
    longer hidden behind reading the weights. This happens at about 25 tokens on a CPU and 200 on an H100; knots at a
    ratio of four are close enough to any device's threshold."""
    margin_floor: float = 1.05
    margin_ceiling: float = 1.5
    """Predictions are multiplied by the 95th percentile of actual / predicted duration over recent steps, clamped to
    the range from `margin_floor` to `margin_ceiling`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "knots", tuple(self.knots))  # a list, where it comes from JSON
        if list(self.knots) != sorted(set(self.knots)) or any(knot < 1 for knot in self.knots):
            raise ValueError(f"knots must be positive and ascending, not {self.knots}")
        if self.preemption not in PREEMPTIONS:
            raise ValueError(f"preemption must be one of {', '.join(PREEMPTIONS)}, not {self.preemption!r}")
        _check(self, 1, "ttft_stretch", "itl_stretch", "yield_stretch", "min_chunk")
        _check(self, 2, "probe_every")
        _check(self, 1, "margin_floor", "margin_ceiling")
        _check(self, 0, *(item.name for item in fields(self) if item.type == "float"), "checkpoint_pages")
        if self.margin_floor > self.margin_ceiling:
            raise ValueError(f"margin_floor ({self.margin_floor}) must not be above margin_ceiling")
        if len(self.knots) > MOST_KNOTS or not (self.floor_window_s and self.yield_bound_s):
            raise ValueError(f"at most {MOST_KNOTS} knots; floor_window_s and yield_bound_s must be positive")
        for name in SHARES:
            if getattr(self, name) > 1:
                raise ValueError(f"{name} is a share and must be at most 1, not {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class CoreConfig:
    """Sizes and limits that plans must respect, goals of the lanes, and rules of the scheduler. Raises ValueError,
    which names the value, if one is out of range."""

    num_pages: int
    """Pages of device memory in the pool that KV and adapters share. Page 0 is the null page: always zero, never
    allocated."""
    block_size: int = 16
    """Tokens per page."""
    host_pages: int = 0
    """Pages of host memory for copies of KV (see `Scheduling.preemption`); 0 disables the copies."""
    max_seqs: int = 32
    """Maximum number of running sequences."""
    max_model_len: int = 2048
    """Maximum number of prompt and output tokens of one sequence."""
    token_budget: int = 256
    """Maximum number of tokens computed in a step over all sequences, for which the executor has memory."""
    chosen_experts: float = 1.0
    """Share of a layer's experts that are chosen for a token. 1 means that the model has none."""
    max_resident_adapters: int = 1024
    """Rows of the adapter indirection table. In practice, pages are what limits the number of resident adapters."""
    min_kv_pages: int = 0
    """Pages that adapters may never take. With 0, KV and adapters compete for all pages, so that none is wasted: idle
    adapters are evicted for KV, and adapters in use belong to sequences that will end."""
    max_adapter_pages: int = 0
    """Maximum number of pages for adapters; 0 means all pages except `min_kv_pages`."""
    host_adapter_bytes: int = 2 << 30
    """Maximum size in bytes of the packed adapters in host memory, including adapters that are being fetched."""
    max_fetches: int = 4
    """Maximum number of concurrent adapter fetches: enough to keep a disk busy while other adapters are packed. One of
    them is reserved for the interactive lane, so that batch fetches never block all of its fetches."""
    prefetch_window: int = 32
    """Number of a lane's waiting requests for which adapters are fetched and grammars are prepared in advance: as many
    as an engine starts at once."""
    max_preparations: int = 2
    """Maximum number of concurrent grammar preparations, one of them reserved for the interactive lane. Each takes a
    CPU core from the steps, usually for milliseconds and in the worst case for a quarter of a second."""
    grammar_bytes: int = 256 << 20
    """Bytes for the prepared grammars that live requests need, shared between tenants by weight. Beyond this limit each
    tenant may have one grammar, and requests for further grammars wait."""
    adapter_half_life_s: float = 300.0
    """Seconds after which a start with an adapter counts half as much in the order in which adapters are evicted: after
    such a pause people rarely come back, as for `hold_s`."""
    fetch_backoff_s: float = 1.0
    """Seconds for which requests for an adapter are refused after its fetch failed, doubled with each further failure.
    A missing folder rarely reappears within a second, and each attempt occupies a thread and the disk."""
    max_waiting: int = 10_000
    """Number of waiting requests from which on a new request is refused or replaces a waiting request of a lower lane.
    Beyond this limit, a tenant without waiting requests in a lane may still add one there."""
    eos_token_ids: tuple[int, ...] = ()
    vocab_size: int = 0
    """Number of rows of the model's embedding. A request with a token id beyond them is refused, because it would end
    the engine process. 0 means that the executor computes with any id."""
    pools_only: bool = False
    """True means that the model has no head, so that requests for tokens are refused."""
    prefix_caching: bool = True
    share_prefixes: bool = False
    """True means that tenants share cached prefixes, which may let a tenant find out what other tenants have asked."""
    speculation: bool = False
    """True means that steps may compute proposed tokens (see plan/proposals.py). The executor must support them."""
    draft_block: int = 0
    """Tokens of the draft model's KV in a page; 0 means that there is no draft model."""
    interactive: LaneGoals = INTERACTIVE_GOALS
    batch: LaneGoals = BATCH_GOALS
    scheduling: Scheduling = Scheduling()

    def __post_init__(self) -> None:
        _check(self, 1, "block_size", "max_seqs", "max_model_len", "token_budget", "max_resident_adapters")
        _check(self, 1, "max_waiting")
        _check(self, 1, "max_fetches", "prefetch_window", "max_preparations", "grammar_bytes")
        _check(self, 0, "draft_block", "host_pages", "min_kv_pages", "max_adapter_pages", "vocab_size")
        _check(self, 0, "host_adapter_bytes", "fetch_backoff_s")
        if not 0 < self.chosen_experts <= 1:
            raise ValueError(f"chosen_experts must be above 0 and at most 1, not {self.chosen_experts}")
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
        """Maximum number of pages that all adapters together may take."""
        spare = max(0, self.usable_pages - self.min_kv_pages)
        return min(self.max_adapter_pages or spare, spare)

    @property
    def goals(self) -> tuple[LaneGoals, LaneGoals]:
        """Latency goals of the lanes, indexed by `Lane`."""
        return self.interactive, self.batch

    @property
    def long_prompt(self) -> float:
        """Number of remaining tokens above which a prompt counts as long (see `LONG_PROMPT_STEPS`)."""
        return LONG_PROMPT_STEPS * self.token_budget

    def pages_for(self, num_tokens: int) -> int:
        """Return the number of pages that hold `num_tokens` tokens of KV, rounded up."""
        return -(-num_tokens // self.block_size)
