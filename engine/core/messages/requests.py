"""Requests and the events that answer them: plain data, without behaviour beyond arithmetic on their own fields.

All parts of the engine share these types. messages/step.py has those that pass between the engine and an executor.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import NamedTuple

from engine.core.messages.grammar import Grammar

AdapterHash = str
"""Content hash of an adapter's configuration and weights: its identity everywhere below the gateway."""
PageId = int
HostPageId = int
"""Number of a page in host memory that can hold a copy of a device page."""
PrefixKey = bytes
"""Digest that identifies a full KV page by its adapter, its realm (see `PrefixUse.realm`) and all tokens of the
sequence up to the page's end (see memory/prefix.py)."""


class Lane(IntEnum):
    """Priority class of a request: interactive traffic or batch work. The lane with the lower value is served first."""

    INTERACTIVE = 0
    BATCH = 1


class LaneMode(Enum):
    """State of a lane, as set by an operator: open, paused or draining."""

    OPEN = "open"
    PAUSED = "paused"
    """No waiting request of the lane starts. Running requests continue, and new ones are accepted and wait."""
    DRAINING = "draining"
    """New requests are refused, except those that an earlier engine process had accepted. Accepted requests run to
    their end."""


class ErrorCode(Enum):
    """Reason why a request was refused or ended with an error. The values are those of the public error table."""

    INVALID_REQUEST = "invalid_request"
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    MODEL_NOT_FOUND = "model_not_found"
    LANE_QUEUE_FULL = "lane_queue_full"
    QUEUE_TIMEOUT = "queue_timeout"
    ADAPTER_UNAVAILABLE = "adapter_unavailable"
    CANCELLED = "preempted"
    """An administrator cancelled the request."""
    INVALID_GRAMMAR = "invalid_grammar"
    MODEL_OUTPUT_INVALID = "model_output_invalid"
    """The model's output for the request is NaN or infinite."""


class Cause(Enum):
    """Resource for which a sequence is preempted: KV pages, one of the `max_seqs` slots of running sequences, or the
    pages that a starting sequence and its adapter need together."""

    PAGES = "pages"
    SLOT = "slot"
    ADAPTER = "adapter"


@dataclass(frozen=True, slots=True)
class Refusal:
    code: ErrorCode
    message: str
    retry_after: float | None = None
    """Seconds after which a retry makes sense. None means that a retry never does."""


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"
    POOLED = "pooled"
    """The request asked for a vector, which the event carries."""
    ABORT = "abort"
    ERROR = "error"


class SamplingParams(NamedTuple):
    """Parameters of one request: how its tokens are sampled and reported, and when its answer ends. Names and ranges
    are those of the OpenAI and vLLM APIs."""

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """Sample only from the k likeliest tokens; 0 disables the limit."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    """64-bit seed. The random draw for a position depends only on (seed, position), so that a sequence that is resumed
    after a preemption or in another engine process draws the same numbers."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    """Number of likeliest alternatives to report with each token's own logprob. None means that no logprobs are
    computed."""
    grammar: Grammar | None = None
    prompt_logprobs: int | None = None
    """Number of likeliest alternatives to report with the logprob of each prompt token after the first. None means that
    no logprobs of the prompt are computed. With them, `max_tokens` may be 0."""
    speculates: bool = True
    """True means that steps may compute proposed tokens for the request, if the engine proposes any."""

    @property
    def with_greedy(self) -> SamplingParams:
        """Return these parameters with `temperature` 0 in place of a `top_p` of 0, which also leaves only the likeliest
        token."""
        return self if self.top_p else self._replace(temperature=0.0, top_p=1.0)

    @property
    def penalties(self) -> tuple[float, float, float]:
        """The repetition, frequency and presence penalties."""
        return self.repetition_penalty, self.frequency_penalty, self.presence_penalty

    @property
    def has_penalties(self) -> bool:
        """Return whether the choice of a token depends on which tokens were sampled before."""
        return self.penalties != (1.0, 0.0, 0.0)


class PoolingKind(Enum):
    """How the hidden states of a prompt become one vector: that of the last token, or the mean over all tokens."""

    LAST = "last"
    MEAN = "mean"


class Pooling(NamedTuple):
    """Parameters of a request for one vector in place of an answer. The vector is pooled from the output of the model's
    final norm, in fp32."""

    kind: PoolingKind = PoolingKind.LAST
    dimensions: int = 0
    """Number of leading elements to keep; 0 means all."""
    normalize: bool = True
    """Scale the kept elements to a Euclidean length of 1."""
    shares_pages: bool = False
    """Leave the prompt's KV in the prefix cache, for an answer that will follow; a vector of the last token also takes
    cached KV. False means that the prompt neither finds nor leaves cached pages."""


class Origin(NamedTuple):
    """Origin of a request, as its gateway describes it. It is shown to operators; the scheduler ignores it."""

    id: str = ""
    """Unique id of the caller's request at the gateway. A request with several answers has one id for all of them."""
    request_id: str = ""
    """Request id that the caller chose."""
    key: str = ""
    """Short id of the API key."""
    model: str = ""
    """Model name as the caller wrote it."""
    adapter: str = ""
    """Name of the adapter; empty for the base model."""
    reserved_tokens: int = 0
    """Part of the caller's token reservation that belongs to this answer."""


class KvSource(NamedTuple):
    """Where an engine may fetch the KV of a request's tokens from, instead of computing it: another engine of the same
    operator."""

    address: str
    """Address at which the other engine serves its KV pages: `unix:PATH` or `HOST:PORT`."""
    seconds: float
    """Maximum number of seconds, from its arrival, that the request waits for the pages."""
    computes: bool = False
    """True means that the other engine is computing the pages, or is about to, and gives them as they become full.
    False means that it gives those that it has."""


class Request(NamedTuple):
    """A request for one answer, as a gateway submits it. It is immutable; its `Sequence` holds the progress."""

    id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    adapter_hash: AdapterHash | None = None
    lane: Lane = Lane.INTERACTIVE
    priority: int = 0
    """A lower value is served sooner. It orders the requests of one tenant in a lane or, under the `priority` policy,
    of the whole lane."""
    tenant: str = ""
    weight: float = 1.0
    """Weight of the tenant's share, relative to the other tenants of its lane."""
    arrival: float = 0.0
    """Arrival time, in seconds on the engine's clock."""
    deadline: float | None = None
    """When the last token should be generated, in seconds on the engine's clock; None means no deadline. A request that
    is predicted to start after its deadline is refused. Deadlines order batch work, and an accepted request that misses
    its deadline is not ended."""
    ttft: float | None = None
    """TTFT that the request asks for, in seconds. None means the lane's goal."""
    itl: float | None = None
    """ITL that the request asks for, in seconds. None means the lane's goal."""
    origin: Origin = Origin()
    whole: bool = False
    """True means that the client needs no single tokens, so that the engine may hold tokens back and send many in one
    event."""
    produced: tuple[int, ...] = ()
    """Tokens of the answer that an earlier engine process generated. This engine generates the tokens after them; they
    count towards `max_tokens`."""
    moves: int = 0
    """Number of earlier engine processes that held the request and ended. If it is positive, neither a draining lane
    nor a long predicted wait refuses the request."""
    suspect: bool = False
    """True means that an engine process crashed while it computed this request. Its next tokens are therefore computed
    in steps without other requests (see `Sequence.on_trial`)."""
    expected_tokens: int | None = None
    """The gateway's guess of the answer's length in tokens, for an engine that has seen no such answer. It is set where
    `max_tokens` is only a ceiling, which the engine may lower to fit its memory. None means that the caller asked for
    this `max_tokens`."""
    cache_salt: str = ""
    """Only requests with the same salt may share cached prefixes. Empty means no salt, which is a salt of its own."""
    pooling: Pooling | None = None
    """Asks for a vector: `max_tokens` is 0 then, and no KV is shared or kept. None means that tokens are generated."""
    num_scored: int = 0
    """Number of prompt tokens, after the first, whose logprobs an earlier engine process returned. This engine returns
    those of the tokens after them."""
    prediction: tuple[int, ...] = ()
    """Tokens that the caller expects the answer to have for the most part. They are only proposed."""
    kv_source: KvSource | None = None
    """Where KV that this engine lacks is fetched from before the request starts. What does not come in time is
    computed. None means that all of it is computed."""
    request_class: str = ""
    """Name of the request's class within its tenant: a tenant's classes divide the tenant's share of a lane among
    themselves. Empty means no class; such requests of a tenant form a class of their own."""
    class_weight: float = 1.0
    """Weight of the class's share, relative to the other classes of the tenant in the lane."""

    @property
    def party(self) -> str:
        """Name of the party that gets a fair share of the lane: the tenant or, if the request names a class, the class
        of the tenant. No two parties have the same name, because no tenant's name has a NUL."""
        return f"{self.tenant}\0{self.request_class}" if self.request_class else self.tenant


def tenant_of(party: str) -> str:
    """Return the tenant of a party (see `Request.party`): the party itself, or the tenant that it is a class of."""
    return party.partition("\0")[0]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities of a sampled token and its likeliest alternatives, under the model's distribution
    before penalties and temperature are applied."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """Alternatives as (token id, logprob), the most likely first."""


class ProposalCount(NamedTuple):
    """Numbers of tokens that one proposer proposed for a request, and that became part of its answer, so far."""

    proposer: str
    proposed: int
    accepted: int


class TokenEvent(NamedTuple):
    """Event for the client of one request: new tokens, the request's start, or its end. Exactly one event of each
    request has a `finish_reason`."""

    request_id: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    num_cached: int = 0
    refusal: Refusal | None = None
    """Reason of the error that the client receives; set if `finish_reason` is ERROR, otherwise None."""
    device_seconds: float = 0.0
    """Device time of the request so far, in seconds."""
    wait: float = 0.0
    """Seconds from the request's arrival to the step that started it; set in the event that reports the admission."""
    adapter_wait: float = 0.0
    """Seconds from the request's arrival until its adapter was in host memory, set in the event that reports the
    admission; 0 if the adapter was there before."""
    vector: bytes = b""
    """Vector of a pooled request, as in `PooledVector`, in the event that ends it."""
    prompt_logprobs: bytes = b""
    """Logprobs of the next prompt tokens, in the format of messages/prompt_logprobs.py. The first event that has any
    begins with the second token of the prompt."""
    proposals: tuple[ProposalCount, ...] = ()
    """Counts of the request's proposals so far, by proposer; empty before the first proposal."""
