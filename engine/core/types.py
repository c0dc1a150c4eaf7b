"""Data types that all parts of the engine share: plain data, without behaviour beyond arithmetic on their own fields.

The engine passes a `StepPlan` to an executor, receives a `StepResult` from it, and sends `TokenEvent`s to its clients.
None of these types refers to tensors, sockets or clocks, so a plan can cross a process boundary as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import NamedTuple

from engine.core.grammars import Grammar
from engine.core.step_time import NOTHING, StepFeatures

AdapterHash = str
"""Content hash of an adapter's configuration and weights: its identity everywhere below the gateway."""
PageId = int
HostPageId = int
"""Number of a page in host memory that can hold a copy of a device page."""
PrefixKey = bytes
"""Digest that identifies a full KV page by its adapter, its realm (see `Sequence.realm`) and all tokens of the sequence
up to the page's end (see prefix.py)."""


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
    """Where the other engine gives pages: `unix:PATH` or `HOST:PORT`."""
    seconds: float
    """Seconds after the request's arrival until which it waits for pages at most."""
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
    """Class of the request among those of its tenant, which share the tenant's share of a lane. Empty means none, which
    is a class of its own."""
    class_weight: float = 1.0
    """Weight of the class's share, relative to the other classes of the tenant in the lane."""

    @property
    def party(self) -> str:
        """Name of what a lane is shared among: the tenant or, if the request names a class, the class of the tenant. No
        two are the same, because no tenant's name has a NUL."""
        return f"{self.tenant}\0{self.request_class}" if self.request_class else self.tenant


def tenant_of(party: str) -> str:
    """Return the tenant that a party is, or is a class of (see `Request.party`)."""
    return party.partition("\0")[0]


@dataclass(frozen=True, slots=True)
class Admission:
    """Data that a plan passes to the executor about a sequence that starts to run, for the first time or after a
    preemption."""

    request_id: str
    tokens: tuple[int, ...]
    num_prompt: int
    num_computed: int
    """Leading tokens whose KV is already in `pages`: found in the prefix cache or restored from host memory."""
    pages: tuple[PageId, ...]
    adapter_hash: AdapterHash | None
    params: SamplingParams
    pooling: Pooling | None = None
    """See `Request.pooling`."""
    adapter_begin: int = 0
    """Position of the first token that the adapter applies to. The base model computes those before it."""
    num_scored: int = 0
    """Number of prompt tokens, after the first, whose logprobs need not be computed any more."""


class ScheduledChunk(NamedTuple):
    """Instruction of a plan to compute `num_tokens` tokens of a sequence in this step, from position `start` (counted
    from 0) on. It is a named tuple because a step has hundreds of chunks, and creating one costs a quarter of what a
    frozen dataclass costs."""

    request_id: str
    start: int
    num_tokens: int
    new_pages: tuple[PageId, ...]
    """Pages to append to the sequence's block table before the step."""
    samples: bool
    """True means that the chunk ends with the newest token of the sequence, so that the executor returns the request's
    next token, which it samples, unless `max_tokens` is 0: then it returns the vector or the end of the logprobs."""
    proposals: tuple[int, ...] = ()
    """Guesses of the tokens after the newest one, which the chunk's rows after its first one compute. The executor
    samples from every row, and keeps the tokens up to the first that differs from the proposal at its place."""
    sources: tuple[str, ...] = ()
    """Name of the proposer of each of `proposals`."""

    @property
    def is_decode(self) -> bool:
        """Return whether each row of the chunk is computed like a decode: it has one token besides its proposals."""
        return self.num_tokens == 1 + len(self.proposals)

    @property
    def decode_context(self) -> int:
        """Sum of the context lengths, in tokens, of the rows of a chunk that is computed like decodes."""
        count = self.num_tokens
        return count * self.start + count * (count + 1) // 2


class DraftAsk(NamedTuple):
    """Instruction of a plan to guess a sequence's next tokens with the draft model, once the step has sampled its
    tokens. The draft model computes those of the known tokens that it does not hold, but at most `most` of them; if it
    then holds them all, it guesses as many tokens as `guesses` says, greedily, one after the other."""

    request_id: str
    most: int
    guesses: int
    new_pages: tuple[PageId, ...]
    """Pages to append to the sequence's pages of the draft model's KV."""
    adapter_hash: AdapterHash | None = None
    """The sequence's adapter, whose part for the draft model, if it has one, guesses."""


class Drafted(NamedTuple):
    """Result of a `DraftAsk`."""

    request_id: str
    num_computed: int
    """Number of known tokens that the draft model computed."""
    num_held: int
    """Number of leading tokens whose KV the draft model now holds, including those of `tokens` but the last."""
    tokens: tuple[int, ...]
    """The guesses; none if the draft model does not hold all known tokens yet."""


@dataclass(frozen=True, slots=True)
class AdapterLoad:
    """Instruction of a plan to copy an adapter from host memory into the given device pages before the step
    computes."""

    adapter_hash: AdapterHash
    pages: tuple[PageId, ...]
    request_id: str = ""
    """Id of the request that waits for the adapter. Its tenant is charged for the copy."""


@dataclass(frozen=True, slots=True)
class AdapterFetch:
    """Instruction of a plan to read an adapter from its folder into host memory, concurrently with the steps. The
    executor answers each fetch with exactly one `FetchAnswer`."""

    adapter_hash: AdapterHash
    """Content hash that the folder must have; the fetch fails if it has another."""
    path: str
    num_bytes: int
    """Packed size in bytes, reserved in host memory until the answer."""


class PageCopy(NamedTuple):
    """Instruction of a plan to copy one KV page: from device to host in `StepPlan.saves`, from host to device in
    `StepPlan.restores`."""

    page: PageId
    host_page: HostPageId


class PageFork(NamedTuple):
    """Instruction of a plan to copy one device page to another, which a starting sequence goes on to fill."""

    source: PageId
    page: PageId


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The work of one step. An executor must perform it in this order: save pages, fork pages (reading all sources
    before it writes), restore pages, release requests, evict adapters, load adapters, drop host copies, cancel and
    start fetches, forget and prepare grammars, admit sequences, compute chunks, guess tokens. The plan fits the
    state that it was made for, so committing it cannot fail. Page ids freed by `released`, `undrafted` or `evicted`
    may be reused by `loads`, `restores`, `admitted`, `chunks` and `drafts` of this plan, or be the targets of
    `forks`; the pages that `saves` and `forks` copy are still intact when the step begins, and no host page is both
    saved to and restored from. Fetches and preparations of grammars are only started by the step: they continue
    concurrently with this step and later ones."""

    now: float = 0.0
    """When the plan was made, in seconds on the engine's clock."""
    predicted: float = 0.0
    """Predicted duration of the step in seconds; 0 while the step-time model is cold or if nothing is computed."""
    features: StepFeatures = NOTHING
    """Amounts of work in the step, from which `predicted` was computed."""
    alone: float = 0.0
    """Predicted duration in seconds of the step without its batch work, if it has interactive decodes; otherwise 0."""
    saves: tuple[PageCopy, ...] = ()
    saved_keys: tuple[PrefixKey, ...] = ()
    """Prefix key of each page in `saves`."""
    checkpoints: tuple[tuple[str, int], ...] = ()
    """(request id, number of leading full pages of KV that are on the host after this step), for requests whose number
    grows."""
    exports: tuple[tuple[int, int], ...] = ()
    """(number of an export, number of its leading pages that are on the host after this step), for exports whose number
    grows."""
    released: tuple[str, ...] = ()
    """Requests that the executor forgets: finished or aborted since the last plan, or preempted by this one."""
    preempted: tuple[str, ...] = ()
    causes: tuple[Cause, ...] = ()
    """The cause of each preemption in `preempted`."""
    dropped_cache: tuple[PageId, ...] = ()
    """Pages to remove from the prefix cache, because this plan uses them for something else."""
    evicted: tuple[AdapterHash, ...] = ()
    loads: tuple[AdapterLoad, ...] = ()
    """Adapters to copy to the device. Chunks of the same plan may use them."""
    host_dropped: tuple[AdapterHash, ...] = ()
    """Adapters whose copy in host memory the executor frees."""
    fetches: tuple[AdapterFetch, ...] = ()
    cancelled_fetches: tuple[AdapterHash, ...] = ()
    """Fetches that an earlier plan started and that no request needs any more. The executor still answers each of
    them."""
    prepared: tuple[Grammar, ...] = ()
    prepared_for: tuple[str, ...] = ()
    """Ids of requests, one for each grammar in `prepared`: their tenants are charged for the grammar's memory."""
    forgotten: tuple[Grammar, ...] = ()
    forks: tuple[PageFork, ...] = ()
    restores: tuple[PageCopy, ...] = ()
    admitted: tuple[Admission, ...] = ()
    chunks: tuple[ScheduledChunk, ...] = ()
    undrafted: tuple[str, ...] = ()
    """Requests that go on running, and whose pages of the draft model's KV are needed for something else: the draft
    model forgets them before the step begins."""
    drafts: tuple[DraftAsk, ...] = ()
    """Sequences of `chunks` that sample, for which the draft model guesses the tokens after the sampled ones."""

    @property
    def num_tokens(self) -> int:
        return sum([chunk.num_tokens for chunk in self.chunks])

    @property
    def is_empty(self) -> bool:
        moves = self.evicted or self.loads or self.saves or self.host_dropped or self.fetches or self.cancelled_fetches
        return not (self.released or self.chunks or moves or self.prepared or self.forgotten or self.exports)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities of a sampled token and its likeliest alternatives, under the model's distribution
    before penalties and temperature are applied."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """Alternatives as (token id, logprob), the most likely first."""


class SampledToken(NamedTuple):
    request_id: str
    token: int
    logprobs: TokenLogprobs | None = None


class PooledVector(NamedTuple):
    request_id: str
    vector: bytes
    """The elements in fp32, little-endian."""


class PromptRows(NamedTuple):
    """Logprobs of consecutive prompt tokens: of those at the positions `start + 1`, `start + 2` and so on, which the
    chunk's rows from `start` on predict. `rows` has the format of prompt_logprobs.py."""

    request_id: str
    start: int
    rows: bytes


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of a plan, from the executor: sampled tokens, vectors, logprobs of prompts and durations. Each chunk with
    `samples` has an entry either in `sampled`, in `pooled` or in `failed`, unless its request has a `max_tokens` of 0
    and asks for no vector: then it has one in `scored`, which may have no rows. A chunk with proposals has one more
    entry in `sampled`, in order, for each proposal that was accepted, also before an entry in `failed`. A chunk whose
    prompt logprobs are wanted has an entry in `scored`, too. An entry in `failed` holds the request id and the reason
    why the request's grammar cannot be followed any further."""

    sampled: tuple[SampledToken, ...] = ()
    pooled: tuple[PooledVector, ...] = ()
    scored: tuple[PromptRows, ...] = ()
    failed: tuple[tuple[str, str], ...] = ()
    forced: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Id of a request with a grammar that sampled a token, and the tokens that the grammar forces to follow, if there
    are any. Executors whose plans have no proposals leave it empty."""
    drafted: tuple[Drafted, ...] = ()
    """Results of the plan's `drafts`, except for requests that have ended or whose grammar failed."""
    draft_seconds: float = 0.0
    """The part of the step's device time, in seconds, that drafting took."""
    load_seconds: tuple[float, ...] = ()
    """Duration in seconds of the copy of each adapter in the plan's `loads`."""
    seconds: float | None = None
    """Device time of the step in seconds. None means that the engine waited while the device computed, so that the
    engine's clock gives the duration."""
    launched: bool = False
    """True means that the host launched the step kernel by kernel while the device computed, and replayed no captured
    step."""


class Launch(NamedTuple):
    """What an executor knows of a step's start when it has submitted the step."""

    late: bool = False
    """True means that the device had run out of work before the step's first work reached it: the previous step had
    finished, and was not collected yet."""
    reached_s: float | None = None
    """Seconds from the call of `submit` until the step's first work was launched. None means that all of the step was
    launched at once, when the call returned."""


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
    """Logprobs of the next prompt tokens, in the format of prompt_logprobs.py. The first event that has any begins with
    the second token of the prompt."""
    proposals: tuple[ProposalCount, ...] = ()
    """Counts of the request's proposals so far, by proposer; empty before the first proposal."""
