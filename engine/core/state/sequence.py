"""The engine's mutable record of a request, from submission to its end, and the keys by which the prefix cache finds
the pages of its KV (see memory/prefix.py)."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.core.fairness.accounts import Account
from engine.core.memory.prefix import activated_key, next_key, root_key
from engine.core.messages.requests import Lane, PageId, PoolingKind, PrefixKey, Request
from engine.core.speculate.drafting import FIRST_ACCEPTANCE, Drafting
from engine.core.speculate.proposer import Proposer
from engine.core.speculate.tally import ProposalTally

TRIAL_TOKENS = 8
"""Number of tokens that a suspect request must generate before it may share steps again. It exceeds 1 because the crash
happened some tokens after the last one that the gateway received: the events of the last steps were lost."""
TRIAL_TOKENS_HELD = 32
"""Replaces `TRIAL_TOKENS` for a request with `whole` set: its tokens are held back, so that a crash loses more of
them."""


@dataclass(slots=True)
class PrefixUse:
    """How a sequence shares KV pages with others, on the device and on the host."""

    realm: str = ""
    """Sequences of the same realm (see `prefix.realm_of`) may share cached prefixes."""
    adapter_begin: int = 0
    """Position of the first token that the request's adapter applies to (see `adapters.begin_of`)."""
    keys: list[PrefixKey] = field(default_factory=list)
    """Prefix keys of the leading full pages of the sequence's tokens, computed as far as they were needed."""
    num_cached: int = 0
    """Leading tokens whose KV was found in the prefix cache or in host memory when the sequence first started."""
    num_saved: int = 0
    """Number of leading full pages that were copied to the host since the request arrived. Their copies may have been
    evicted."""


@dataclass(slots=True)
class Preemptions:
    """Preemptions of a sequence, and the tokens that it computes again for them."""

    times: int = 0
    num_lost: int = 0
    """Number of tokens that were computed when the sequence was last preempted. Those whose KV is not found again when
    it restarts count as recomputed."""
    num_paid: int = 0
    """Largest number of tokens that were computed at any preemption. The tenant is not billed for computing them
    again."""


@dataclass(slots=True)
class Forecast:
    """Predictions about a request."""

    output: int = 0
    """Predicted number of tokens of the answer (see predict/answer_lengths.py)."""
    seconds: float = 0.0
    """Device seconds that the request was predicted to take when it was submitted."""
    only_batch_delays: bool = False
    """True means that when this interactive request arrived, batch requests ran and all other interactive ones had
    their first tokens, and that it has neither begun nor waited for an adapter since."""
    mask_seconds: float = 0.0
    """Seconds of a core's time that the sequence's last slow mask took, and that the next is assumed to take; 0 before
    the first."""


@dataclass(slots=True)
class Speculation:
    """What proposes a sequence's next tokens, and how often that was right."""

    proposer: Proposer | None = None
    """Proposes the next tokens. None means that the sequence gets one token a step."""
    forced: tuple[int, ...] = ()
    """Tokens that the sequence's grammar forces to follow the known ones, as far as the executor has told."""
    acceptance: float = FIRST_ACCEPTANCE
    """Share of `proposer`'s proposals that were accepted, among those whose predecessors were: a moving average."""
    drafting: Drafting = field(default_factory=Drafting)
    tally: ProposalTally = field(default_factory=ProposalTally)


@dataclass(slots=True, eq=False)
class Sequence:
    """A live request, waiting or running, with its tokens, KV pages and accounting. Steps compute its tokens from
    `num_computed` on, and computing the newest token samples the next one. `commit/apply.py` creates a sequence when it
    accepts the request, `commit/` changes it until the request ends, and the ledger adds the device time."""

    request: Request
    id: str = field(init=False)
    """The request's id."""
    account: Account = field(init=False)
    """Fair-share account that the request's device time is charged to: that of its tenant in its lane or, if the
    request names a class, of that class of the tenant. Set when the request is accepted."""
    tokens: list[int]
    """Known tokens: the prompt, and the answer as far as it has been generated."""
    num_pending: int = 0
    """Number of tokens after the known ones that the steps under way will sample."""
    lane: Lane = Lane.INTERACTIVE
    """The request's lane, or the only lane in use if the policy has one queue for all lanes."""
    num_computed: int = 0
    """Number of leading tokens whose KV is in `pages`, or will be once the steps under way have ended."""
    pages: list[PageId] = field(default_factory=list)
    prefix: PrefixUse = field(default_factory=PrefixUse)
    preempted: Preemptions = field(default_factory=Preemptions)
    due: float = 0.0
    """When the next token should be generated, in seconds on the engine's clock: the TTFT goal after the arrival, then
    the ITL goal after each token."""
    num_scored: int = 0
    """Number of prompt tokens, after the first, whose logprobs have been returned."""
    device_seconds: float = 0.0
    """The sequence's part of the device time of its steps, including tokens that were computed twice and proposals that
    were refused."""
    masks_slowly: bool = False
    """True means that a mask of the sequence's grammar took too long for a step: the sequence gets no proposals and is
    not planned ahead of its pending token, because no mask could be there in time."""
    forecast: Forecast = field(default_factory=Forecast)
    speculation: Speculation = field(default_factory=Speculation)

    def __post_init__(self) -> None:
        self.id = self.request.id

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - len(self.request.prompt_ids)

    @property
    def masks_in_step(self) -> bool:
        """Return whether the sequence follows a grammar whose masks are computed within its steps."""
        return self.request.params.grammar is not None and not self.masks_slowly

    @property
    def on_trial(self) -> bool:
        """Return whether the next tokens must be computed in steps without other requests: the request is suspect (an
        engine process crashed while it computed it) and has generated fewer than `TRIAL_TOKENS` (`TRIAL_TOKENS_HELD` if
        `whole`) tokens in this engine process."""
        if not self.request.suspect:
            return False
        needed = TRIAL_TOKENS_HELD if self.request.whole else TRIAL_TOKENS
        return self.num_generated - len(self.request.produced) < needed

    @property
    def shares_pages(self) -> bool:
        """Return whether the sequence may use KV pages of the prefix cache and of the host tier, and add its own to
        them. A request for a vector may not, unless it asks to: prompts of embeddings rarely repeat, while those of
        chats, which they would evict, do."""
        return self.request.pooling is None or self.request.pooling.shares_pages

    @property
    def is_scored(self) -> bool:
        """Return whether all logprobs of the prompt that the request asks for have been returned; True if it asks for
        none."""
        return self.request.params.prompt_logprobs is None or self.num_scored >= len(self.request.prompt_ids) - 1

    @property
    def num_skippable(self) -> int:
        """Number of leading tokens that need not be computed where their KV is cached: all but the newest or, while
        logprobs of the prompt are missing, those before the first token whose row predicts a missing one. A mean needs
        every token's hidden state."""
        if self.request.pooling is not None and self.request.pooling.kind is PoolingKind.MEAN:
            return 0
        return len(self.tokens) - 1 if self.is_scored else self.num_scored

    @property
    def expected_length(self) -> int:
        """Number of tokens of the prompt and the predicted answer."""
        return len(self.request.prompt_ids) + self.forecast.output

    @property
    def num_tokens(self) -> int:
        """Number of known and pending tokens: the length after the steps under way, unless the sequence ends before."""
        return len(self.tokens) + self.num_pending

    @property
    def num_remaining(self) -> int:
        """Number of tokens that are not computed yet; 1 while decoding."""
        return self.num_tokens - self.num_computed

    @property
    def waits_for_token(self) -> bool:
        """Return whether nothing can be planned for the sequence before its pending token is known, because that token
        is the last one that `max_tokens` allows, or before its vector or its prompt's last logprobs are known, which
        count as a pending token."""
        return self.num_pending > 0 and self.num_generated + self.num_pending >= self.request.params.max_tokens


def page_keys(seq: Sequence, num_full_pages: int, block_size: int) -> list[PrefixKey]:
    """Return the prefix-cache keys of the first `num_full_pages` KV pages of a sequence, all of them full; none if the
    sequence shares no pages. New keys are computed and stored in `seq.prefix.keys`."""
    keys = seq.prefix.keys
    if not seq.shares_pages:
        return keys
    while len(keys) < num_full_pages:
        start = len(keys) * block_size
        keys.append(_page_key(seq, keys, start, start + block_size))
    return keys[:num_full_pages]


def _page_key(seq: Sequence, keys: list[PrefixKey], start: int, end: int) -> PrefixKey:
    """Return the prefix-cache key of the page that holds a sequence's tokens from `start` up to but without `end`, and
    follows the pages with the keys `keys`."""
    begin, adapter_hash = seq.prefix.adapter_begin, seq.request.adapter_hash
    parent = keys[-1] if keys else root_key(adapter_hash if not begin else None, seq.prefix.realm)
    if adapter_hash and begin and start <= begin < end:
        parent = activated_key(parent, adapter_hash, begin - start)
    return next_key(parent, seq.tokens[start:end])


def tail_key(seq: Sequence, block_size: int) -> PrefixKey | None:
    """Return the key by which a sequence with the same prompt finds the KV of the prompt's end, to copy its page: the
    key of the tokens after the last full page, without the prompt's last token, which every sequence computes to sample
    the next one. None means that there are none, or that the sequence shares no pages."""
    count = len(seq.request.prompt_ids) - 1
    full = count // block_size
    if not seq.shares_pages or full * block_size == count:
        return None
    return _page_key(seq, page_keys(seq, full, block_size), full * block_size, count)
