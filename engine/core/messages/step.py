"""The plan of a step and its result: plain data, without behaviour beyond arithmetic on their own fields.

The engine passes a `StepPlan` to an executor, and receives a `StepResult` from it. Neither refers to tensors, sockets
or clocks, so that a plan can cross a process boundary as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from engine.core.messages.features import StepForecast
from engine.core.messages.grammar import Grammar
from engine.core.messages.requests import (
    AdapterHash,
    Cause,
    HostPageId,
    PageId,
    Pooling,
    PrefixKey,
    Refusal,
    SamplingParams,
    TokenLogprobs,
)


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
    """The sequence's adapter. If it has a part for the draft model, the draft model guesses with that part."""


class Drafted(NamedTuple):
    """Result of a `DraftAsk`: the tokens that the draft model guessed for a sequence, and how much of the sequence's KV
    it now holds."""

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


class AdapterMoves(NamedTuple):
    """The adapters that a plan moves."""

    evicted: tuple[AdapterHash, ...] = ()
    loads: tuple[AdapterLoad, ...] = ()
    """Adapters to copy to the device. Chunks of the same plan may use them."""
    dropped: tuple[AdapterHash, ...] = ()
    """Adapters whose copy in host memory the executor frees."""
    fetches: tuple[AdapterFetch, ...] = ()
    cancelled: tuple[AdapterHash, ...] = ()
    """Fetches that an earlier plan started and that no request needs any more. The executor still answers each of
    them."""


class GrammarWork(NamedTuple):
    """What a plan has the executor do for grammars."""

    forgotten: tuple[Grammar, ...] = ()
    prepared: tuple[Grammar, ...] = ()
    prepared_for: tuple[str, ...] = ()
    """Ids of requests, one for each grammar in `prepared`: their tenants are charged for the grammar's memory."""
    masks: tuple[str, ...] = ()
    """Ids of running requests whose next mask the executor computes concurrently with steps, in this order (see
    state/grammars.py). The executor answers each with a `MaskAnswer`."""


class KeptKv(NamedTuple):
    """What the copies of a plan's `saves` are kept for. Only the core reads it."""

    keys: tuple[PrefixKey, ...] = ()
    """Prefix key of each page in `saves`."""
    checkpoints: tuple[tuple[str, int], ...] = ()
    """(request id, number of leading full pages of KV that are on the host after this step), for requests whose number
    grows."""
    exports: tuple[tuple[int, int], ...] = ()
    """(number of an export, number of its leading pages that are on the host after this step), for exports whose number
    grows."""


NO_FORECAST, NO_MOVES, NO_GRAMMARS, NOTHING_KEPT = StepForecast(), AdapterMoves(), GrammarWork(), KeptKv()


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The work of one step. An executor must perform it in this order: save pages, fork pages (reading all sources
    before it writes), restore pages, release requests, evict adapters, load adapters, drop host copies, cancel and
    start fetches, forget and prepare grammars, forget `undrafted`, admit sequences, begin masks, compute chunks, guess
    tokens. The plan fits the state that it was made for, so committing it cannot fail. Page ids freed by `released`,
    `undrafted` or `evicted` may be reused by `loads`, `restores`, `admitted`, `chunks` and `drafts` of this plan, or be
    the targets of `forks`; the pages that `saves` and `forks` copy are still intact when the step begins, and no host
    page is both saved to and restored from. Fetches, preparations of grammars and masks are only started by the step:
    they continue concurrently with this step and later ones."""

    now: float = 0.0
    """When the plan was made, in seconds on the engine's clock."""
    forecast: StepForecast = NO_FORECAST
    saves: tuple[PageCopy, ...] = ()
    kept: KeptKv = NOTHING_KEPT
    released: tuple[str, ...] = ()
    """Requests that the executor forgets: finished or aborted since the last plan, or preempted by this one."""
    preempted: tuple[str, ...] = ()
    causes: tuple[Cause, ...] = ()
    """The cause of each preemption in `preempted`."""
    dropped_cache: tuple[PageId, ...] = ()
    """Pages to remove from the prefix cache, because this plan uses them for something else."""
    adapters: AdapterMoves = NO_MOVES
    grammars: GrammarWork = NO_GRAMMARS
    forks: tuple[PageFork, ...] = ()
    restores: tuple[PageCopy, ...] = ()
    admitted: tuple[Admission, ...] = ()
    chunks: tuple[ScheduledChunk, ...] = ()
    undrafted: tuple[str, ...] = ()
    """Requests that go on running, and whose pages of the draft model's KV are needed for something else: the draft
    model forgets them."""
    drafts: tuple[DraftAsk, ...] = ()
    """Sequences of `chunks` that sample, for which the draft model guesses the tokens after the sampled ones."""

    @property
    def num_tokens(self) -> int:
        return sum([chunk.num_tokens for chunk in self.chunks])

    @property
    def is_empty(self) -> bool:
        if self.released or self.chunks or self.saves or self.kept.exports:
            return False
        return not (any(self.adapters) or any(self.grammars))


class SampledToken(NamedTuple):
    request_id: str
    token: int
    logprobs: TokenLogprobs | None = None
    is_sound: bool = True
    """False means that the row's logits are NaN or infinite, so that the token is arbitrary and ends its request."""


class PooledVector(NamedTuple):
    request_id: str
    vector: bytes
    """The elements in fp32, little-endian."""


class PromptRows(NamedTuple):
    """Logprobs of consecutive prompt tokens: of those at the positions `start + 1`, `start + 2` and so on, which the
    chunk's rows from `start` on predict. `rows` has the format of messages/prompt_logprobs.py."""

    request_id: str
    start: int
    rows: bytes


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of a plan, from the executor: sampled tokens, vectors, logprobs of prompts and durations. Each chunk with
    `samples` has an entry either in `sampled`, in `pooled`, in `failed` or in `unsampled`, unless its request has a
    `max_tokens` of 0 and asks for no vector: then it has one in `scored`, which may have no rows. A chunk with
    proposals has one more entry in `sampled`, in order, for each proposal that was accepted, also before an entry in
    `failed`. A chunk whose prompt logprobs are wanted has an entry in `scored`, too. An entry in `failed` holds the
    request id and why the request cannot go on: its grammar cannot be followed any further, or the model's output for
    it is NaN or infinite."""

    sampled: tuple[SampledToken, ...] = ()
    pooled: tuple[PooledVector, ...] = ()
    scored: tuple[PromptRows, ...] = ()
    failed: tuple[tuple[str, Refusal], ...] = ()
    unsampled: tuple[str, ...] = ()
    """Ids of requests whose mask was not there, so that no token was sampled: the newest token is computed again."""
    masking: tuple[str, ...] = ()
    """Ids of the step's requests whose next mask would take too long for a step. Their next chunks have to wait until a
    plan has asked for their masks and the executor has answered."""
    mask_seconds: float = 0.0
    """The part of the step's duration, in seconds, that computing masks of grammars took."""
    forced: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Id of a request with a grammar that sampled a token, and the tokens that the grammar forces to follow, if there
    are any. Executors whose plans have no proposals leave it empty."""
    drafted: tuple[Drafted, ...] = ()
    """Results of the plan's `drafts`, except for requests that have ended or are in `failed`."""
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
    """What `Executor.submit` returns of a step's start: whether the step reached the device too late to keep it busy,
    and when. The engine's `Pace` learns from it."""

    late: bool = False
    """True means that the device had run out of work before the step's first work reached it: the previous step had
    finished, and was not collected yet."""
    reached_s: float | None = None
    """Seconds from the call of `submit` until the step's first work was launched. None means that all of the step was
    launched at once, when the call returned."""
