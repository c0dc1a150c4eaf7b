"""The words the engine is written in: plain data, no behaviour beyond arithmetic on itself.

`StepPlan` flows down to an executor, `StepResult` flows back up, `TokenEvent` leaves the engine. None of them knows
about tensors, sockets or clocks, so a plan can cross a process boundary as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import NamedTuple

from engine.core.grammars import Grammar
from engine.core.step_time import NOTHING, StepFeatures

AdapterId = str
"""Content hash of an adapter's configuration and weights: its identity everywhere below the gateway."""
PageId = int
HostPageId = int
"""A page of host memory that holds a copy of one of the device's."""
PrefixKey = bytes
"""Digest of an adapter, a realm and a run of whole pages of tokens from the start of a sequence (see prefix.py)."""


class Lane(IntEnum):
    """Who waits for the answer. Lower value is served first."""

    INTERACTIVE = 0
    BATCH = 1


class LaneMode(Enum):
    """What an operator lets a lane do."""

    OPEN = "open"
    PAUSED = "paused"
    """Nothing of it starts; what runs goes on, what comes waits."""
    DRAINING = "draining"
    """Takes nothing new; what it has taken goes on to its end."""


class ErrorCode(Enum):
    """Why a request was refused; the names are those of the public error table."""

    INVALID_REQUEST = "invalid_request"
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    MODEL_NOT_FOUND = "model_not_found"
    LANE_QUEUE_FULL = "lane_queue_full"
    QUEUE_TIMEOUT = "queue_timeout"
    ADAPTER_UNAVAILABLE = "adapter_unavailable"
    CANCELLED = "preempted"
    """By an administrator."""
    INVALID_GRAMMAR = "invalid_grammar"


class Cause(Enum):
    """What a sequence was preempted for."""

    PAGES = "pages"
    SLOT = "slot"
    ADAPTER = "adapter"


@dataclass(frozen=True, slots=True)
class Refusal:
    code: ErrorCode
    message: str
    retry_after: float | None = None
    """Seconds after which asking again makes sense; None where it never does."""


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class SamplingParams(NamedTuple):
    """How the next token is chosen. Names and ranges are those of the OpenAI and vLLM APIs."""

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """Keep the k likeliest tokens; 0 is off."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    """64-bit. The draw for a position depends on (seed, position) only, so a resumed sequence repeats itself."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    """Number of alternatives to report a token; None computes no logprobs."""
    grammar: Grammar | None = None


class Origin(NamedTuple):
    """Where a request comes from, in words of its gateway: for operators who look. It decides nothing."""

    id: str = ""
    """Of the caller's request, which may have several answers; unique."""
    request_id: str = ""
    """The caller's own."""
    key: str = ""
    """A key's short id."""
    model: str = ""
    """As the caller named it."""
    adapter: str = ""
    """By name; empty for the base model."""
    reserved_tokens: int = 0
    """This answer's part of what was reserved."""


class Request(NamedTuple):
    """One generation, as the gateway submits it."""

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    adapter: AdapterId | None = None
    lane: Lane = Lane.INTERACTIVE
    priority: int = 0
    """Lower is sooner, inside the lane."""
    tenant: str = ""
    weight: float = 1.0
    """Share of the tenant against other tenants of its lane."""
    arrival: float = 0.0
    """Seconds on the engine's clock."""
    deadline: float | None = None
    """When the last token should be there, in seconds on the engine's clock. Orders batch work; ends nothing."""
    ttft: float | None = None
    """Seconds to the first token it asks for; None: the lane's goal."""
    itl: float | None = None
    """Seconds between tokens it asks for; None: the lane's goal."""
    origin: Origin = Origin()
    whole: bool = False
    """Nobody waits for single tokens: they may be told of together, and later."""
    produced: tuple[int, ...] = ()
    """Tokens of the answer that an earlier engine process produced: the answer goes on behind them."""
    moves: int = 0
    """Engine processes that had the request before this one and ended."""
    suspect: bool = False
    """An engine process crashed while it computed this request, so its next tokens are computed in steps of its own."""
    expected_tokens: int | None = None
    """Tokens that its answer will probably have, where max_tokens is only a ceiling; None: max_tokens was asked for."""


@dataclass(frozen=True, slots=True)
class Admission:
    """A sequence starts (or starts again) running: what an executor must know about it from now on."""

    request_id: str
    tokens: tuple[int, ...]
    num_prompt: int
    num_computed: int
    """Tokens already in `pages`, found in the prefix cache or restored from the host."""
    pages: tuple[PageId, ...]
    adapter: AdapterId | None
    params: SamplingParams


class ScheduledChunk(NamedTuple):
    """Compute `num_tokens` tokens of a sequence, beginning at position `start`. A named tuple because a step has
    hundreds: making one costs a quarter of what a frozen dataclass does."""

    request_id: str
    start: int
    num_tokens: int
    new_pages: tuple[PageId, ...]
    """Appended to the sequence's block table before the step."""
    samples: bool
    """The chunk reaches the last known token: the executor returns the next one."""


@dataclass(frozen=True, slots=True)
class AdapterLoad:
    """Copy an adapter from host memory into these device pages."""

    adapter: AdapterId
    pages: tuple[PageId, ...]
    request_id: str = ""
    """The request that waits for it, whose tenant pays."""


@dataclass(frozen=True, slots=True)
class AdapterFetch:
    """Read an adapter from its folder into host memory, beside the steps. Answered once, by one of `FetchAnswer`."""

    adapter: AdapterId
    """What must be found there: other content is a failure."""
    path: str
    num_bytes: int
    """Packed: reserved in host memory until the answer."""


class PageCopy(NamedTuple):
    """Copy one page: from the device to the host in `saves`, from the host to the device in `restores`."""

    page: PageId
    host_page: HostPageId


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Everything one step does, in the order an executor must do it: save, release, evict, load, drop and fetch,
    prepare grammars, restore, admit, compute.

    The plan already fits: committing it cannot fail. Page ids freed by `released` or `evicted` may be reused by
    `loads`, `restores`, `admitted` and `chunks` of the same plan; what `saves` copies is still there when it begins.
    Fetches, and preparations of grammars, are only begun: they go on beside this step and those after it.
    """

    now: float = 0.0
    """When it was made, in seconds on the engine's clock."""
    predicted: float = 0.0
    """Seconds the step-time model expects it to take; 0 while it knows too little, or if nothing is computed."""
    features: StepFeatures = NOTHING
    """What the prediction is made of."""
    alone: float = 0.0
    """Seconds it would take without its batch work, if it carries interactive decodes; else 0."""
    saves: tuple[PageCopy, ...] = ()
    saved_keys: tuple[PrefixKey, ...] = ()
    """What each of `saves` holds."""
    checkpoints: tuple[tuple[str, int], ...] = ()
    """Requests of which more pages are on the host after this step, and how many leading ones."""
    released: tuple[str, ...] = ()
    """Requests the executor forgets: finished or aborted since the last plan, or preempted by this one."""
    preempted: tuple[str, ...] = ()
    causes: tuple[Cause, ...] = ()
    """What each of `preempted` makes room for."""
    dropped_cache: tuple[PageId, ...] = ()
    """Pages taken back from the prefix cache."""
    evicted: tuple[AdapterId, ...] = ()
    loads: tuple[AdapterLoad, ...] = ()
    """May be used by chunks of the same plan."""
    host_dropped: tuple[AdapterId, ...] = ()
    """Adapters whose copy in host memory is given up."""
    fetches: tuple[AdapterFetch, ...] = ()
    cancelled_fetches: tuple[AdapterId, ...] = ()
    """Begun by an earlier plan, and wanted by nobody any more. Answered as if they were not cancelled."""
    prepared: tuple[Grammar, ...] = ()
    prepared_for: tuple[str, ...] = ()
    """For each of `prepared` the id of the request whose tenant is charged with its memory."""
    forgotten: tuple[Grammar, ...] = ()
    restores: tuple[PageCopy, ...] = ()
    admitted: tuple[Admission, ...] = ()
    chunks: tuple[ScheduledChunk, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks)

    @property
    def is_empty(self) -> bool:
        moves = self.evicted or self.loads or self.saves or self.host_dropped or self.fetches or self.cancelled_fetches
        return not (self.released or self.chunks or moves or self.prepared or self.forgotten)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities under the model's own distribution, before penalties and temperature."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """(token id, logprob), most likely first."""


class SampledToken(NamedTuple):
    request_id: str
    token: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """What came of a plan. Every chunk with `samples` has an entry in `sampled`, or in `failed`: its request, and why
    its grammar cannot be followed any further."""

    sampled: tuple[SampledToken, ...] = ()
    failed: tuple[tuple[str, str], ...] = ()
    load_seconds: tuple[float, ...] = ()
    """What the copy of each of the plan's `loads` took."""
    seconds: float | None = None
    """Of the device; None where it computed while everybody waited, so that a clock tells."""


class TokenEvent(NamedTuple):
    """News of one request. Exactly one event of a request's life carries a `finish_reason`."""

    request_id: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    num_cached: int = 0
    refusal: Refusal | None = None
    """Set when the finish_reason is ERROR."""
    device_seconds: float = 0.0
    """What the request has taken of the device so far."""
    wait: float = 0.0
    """With the news of its admission: seconds from its arrival to the step that began it."""
    adapter_wait: float = 0.0
    """And how long its adapter was not even in host memory; 0: it was there."""
