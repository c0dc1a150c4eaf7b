"""An executor without a model, for tests.

Each token is a digest of its request's adapter, seed and tokens so far, so that a run that was batched, preempted or
served from the prefix cache must generate the same tokens as an undisturbed run.
"""

from __future__ import annotations

import math
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from pathlib import Path

from engine.core.memory.adapters import HostAdapter
from engine.core.messages.commands import AdapterFetched, GrammarReady
from engine.core.messages.requests import AdapterHash, HostPageId, PageId, Pooling
from engine.core.messages.step import (
    Admission,
    DraftAsk,
    Drafted,
    Launch,
    PooledVector,
    PromptRows,
    SampledToken,
    ScheduledChunk,
    StepPlan,
    StepResult,
)
from engine.core.plan.proposals import verified
from engine.executor.base import Claim, Report

FAKE_HIDDEN = 8
"""Maximum number of elements of a vector that `FakeExecutor` returns."""
FAKE_ROWS = 1 << 20
"""Size of the vocabulary that an engine with a `FakeExecutor` has, so that any tokenizer's ids are among it. It draws
from the first `vocab_size` of them, which any tokenizer knows."""


def fake_token(adapter_hash: AdapterHash | None, seed: int, tokens: list[int], vocab_size: int) -> int:
    """Return the token id that follows `tokens`: a digest of adapter, seed and tokens, modulo `vocab_size`."""
    return FakeSampler(adapter_hash, seed, tokens).sample(vocab_size)


class FakeSampler:
    """Samples what `fake_token` returns after one or more tokens, to which others are added. It keeps a digest of all:
    a new one for each token of an answer took two thirds of the time of 750 steps with four long answers."""

    def __init__(self, adapter_hash: AdapterHash | None, seed: int, tokens: Sequence[int]) -> None:
        text = f"{adapter_hash or ''}/{seed}/{','.join(map(str, tokens))}"
        self._digest = blake2b(text.encode(), digest_size=4)

    def add(self, token: int) -> None:
        self._digest.update(f",{token}".encode())

    def sample(self, vocab_size: int, ahead: Sequence[int] = ()) -> int:
        """Return the token that follows the known tokens and, after them, `ahead`."""
        digest = self._digest.copy()
        for token in ahead:
            digest.update(f",{token}".encode())
        return int.from_bytes(digest.digest(), "little") % vocab_size


def fake_vector(adapter_hash: AdapterHash | None, pooling: Pooling, tokens: list[int]) -> bytes:
    """Return a vector as in `PooledVector`, of FAKE_HIDDEN elements or fewer: a digest of adapter, kind and tokens."""
    text = f"{adapter_hash or ''}/{pooling.kind.value}/{','.join(map(str, tokens))}"
    digest = blake2b(text.encode(), digest_size=4 * FAKE_HIDDEN).digest()
    kept = [number / 2**31 for number in struct.unpack(f"<{FAKE_HIDDEN}i", digest)][: pooling.dimensions or None]
    length = math.hypot(*kept) if pooling.normalize else 1.0
    return struct.pack(f"<{len(kept)}f", *(number / length for number in kept))


def fake_rows(adapter_hash: AdapterHash | None, tokens: Sequence[int], width: int) -> Iterator[bytes]:
    """Yield the rows of `messages/prompt_logprobs.py` for all tokens but the first: a token's logprob is a digest of
    the adapter and the tokens up to it, its rank is 1, and its alternatives are the token itself and the ids after it,
    each half as likely as the one before."""
    digest = blake2b(f"{adapter_hash or ''}/{tokens[0]}".encode(), digest_size=2)
    for token in tokens[1:]:
        digest.update(f",{token}".encode())
        logprob = -int.from_bytes(digest.digest(), "little") / 2**12
        tops = [logprob - number * math.log(2) for number in range(width)]
        yield struct.pack(f"<fi{width}i{width}f", logprob, 1, *range(token, token + width), *tops)


def fake_row(adapter_hash: AdapterHash | None, tokens: Sequence[int], width: int) -> bytes:
    """Return the packed logprobs, as in `fake_rows`, of the last of two or more prompt tokens."""
    *_, row = fake_rows(adapter_hash, tokens, width)
    return row


def num_alike(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the number of leading tokens that two sequences have in common."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@dataclass(slots=True)
class FakeSequence:
    """The state of an admitted request in a `FakeExecutor`, until a plan releases it. `tokens` are the admitted tokens
    and those sampled since, all of which `sampler` knows; `pages` are all pages that plans gave it. `held` and
    `draft_pages` are the tokens that the draft model holds and its pages."""

    admission: Admission
    tokens: list[int]
    pages: list[PageId]
    sampler: FakeSampler
    held: list[int] = field(default_factory=list)
    draft_pages: list[PageId] = field(default_factory=list)


class FakePages:
    """Host pages for KV of a `FakeExecutor`, which hold zeros until another engine's pages are written to them. Plans
    do not copy them."""

    page_bytes = 64

    def __init__(self) -> None:
        self._pages: dict[HostPageId, bytearray] = {}

    def page(self, host_page: HostPageId) -> memoryview:
        return memoryview(self._pages.setdefault(host_page, bytearray(self.page_bytes)))

    def settle(self) -> None:
        """Do nothing: no plan copies these pages, so that there is no copy to wait for."""


class FakeExecutor:
    """A deterministic executor that takes no time. Any path is an adapter of rank 8 that takes `adapter_pages` and
    `adapter_bytes`, with a digest of the folder's name as its hash.

    A plan's fetches and grammar preparations are answered when it is submitted; the rest is executed in `collect`. Its
    draft model guesses every token right, but for those at every fifth place.
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
        self.pages = FakePages()
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
        that are wanted, a vector or token for each chunk that samples one, with those after accepted proposals, and
        a load time of 0 seconds for each adapter load."""
        for request_id in plan.released:
            self.sequences.pop(request_id, None)
        for admission in plan.admitted:
            pages, tokens = list(admission.pages), list(admission.tokens)
            sampler = FakeSampler(admission.adapter_hash, admission.params.seed, tokens)
            self.sequences[admission.request_id] = FakeSequence(admission, tokens, pages, sampler)
        for request_id in plan.undrafted:
            seq = self.sequences[request_id]
            seq.held, seq.draft_pages = [], []
        for chunk in plan.chunks:
            self.sequences[chunk.request_id].pages.extend(chunk.new_pages)
        ended = [chunk.request_id for chunk in plan.chunks if chunk.samples]
        asks = {request_id: self.sequences[request_id].admission.pooling for request_id in ended}
        sampled = [
            token
            for chunk in plan.chunks
            if chunk.samples and self._generates(chunk.request_id)
            for token in self._sample(chunk)
        ]
        return StepResult(
            scored=tuple(filter(None, map(self._score, plan.chunks))),
            sampled=tuple(sampled),
            drafted=tuple(map(self._draft, plan.drafts)),
            pooled=tuple(self._pool(request_id, pooling) for request_id, pooling in asks.items() if pooling),
            load_seconds=(0.0,) * len(plan.adapters.loads),
        )

    def fetch(self, plan: StepPlan) -> None:
        """Report every fetch of a plan as done at once, in 0 seconds."""
        for fetch in plan.adapters.fetches:
            self.report(AdapterFetched(fetch.adapter_hash, 0.0))

    def prepare(self, plan: StepPlan) -> None:
        """Report every grammar that `plan` prepares as ready at once. Tokens, being digests, follow no grammar."""
        for grammar in plan.grammars.prepared:
            self.report(GrammarReady(grammar))

    def load_host(self, path: str, claim: Claim) -> HostAdapter:
        digest = blake2b(Path(path).name.encode(), digest_size=16).hexdigest()
        host = HostAdapter(digest, 8, ("q_proj",), self.adapter_pages, self.adapter_bytes)
        if claim(host):
            self.report(AdapterFetched(host.adapter_hash, 0.0))
        return host

    @property
    def page_memory(self) -> FakePages:
        return self.pages

    def close(self) -> None:
        """Do nothing: this executor starts no processes."""

    def _pool(self, request_id: str, pooling: Pooling) -> PooledVector:
        seq = self.sequences[request_id]
        return PooledVector(request_id, fake_vector(seq.admission.adapter_hash, pooling, seq.tokens))

    def _generates(self, request_id: str) -> bool:
        return self.sequences[request_id].admission.params.max_tokens > 0

    def _score(self, chunk: ScheduledChunk) -> PromptRows | None:
        """Return the made-up logprobs of the prompt tokens that a chunk predicts. None means that `StepResult.scored`
        has no entry for the chunk."""
        admission = self.sequences[chunk.request_id].admission
        width = admission.params.prompt_logprobs
        start = max(chunk.start, admission.num_scored)
        stop = min(chunk.start + chunk.num_tokens, admission.num_prompt - 1)
        if width is None or (start >= stop and not (chunk.samples and not admission.params.max_tokens)):
            return None
        prompt = list(admission.tokens[: admission.num_prompt])
        rows = islice(fake_rows(admission.adapter_hash, prompt, width), start, stop)
        return PromptRows(chunk.request_id, start, b"".join(rows))

    def _draft(self, ask: DraftAsk) -> Drafted:
        """Act as a draft model that computes the known tokens which it does not hold yet, at most `ask.most`, and, if
        it then holds all of them, guesses the next ones."""
        seq = self.sequences[ask.request_id]
        seq.draft_pages += ask.new_pages
        del seq.held[num_alike(seq.held, seq.tokens) :]
        computed = seq.tokens[len(seq.held) :][: ask.most]
        seq.held += computed
        guesses = self.guess(seq, ask.guesses) if len(seq.held) == len(seq.tokens) else []
        seq.held += guesses[:-1]
        return Drafted(ask.request_id, len(computed), len(seq.held), tuple(guesses))

    def guess(self, seq: FakeSequence, count: int) -> list[int]:
        """Return the fake draft model's guesses of the next `count` tokens: the tokens that the executor will sample,
        but for a wrong one at every fifth position."""
        guesses: list[int] = []
        for place in range(len(seq.tokens), len(seq.tokens) + count):
            token = seq.sampler.sample(self.vocab_size, guesses)
            guesses.append((token + (place % 5 == 0)) % self.vocab_size)
        return guesses

    def _sample(self, chunk: ScheduledChunk) -> list[SampledToken]:
        """Sample from every row of a chunk as if its proposals were right, and append the tokens that are kept."""
        seq, name = self.sequences[chunk.request_id], chunk.request_id
        rows = (chunk.proposals[:count] for count in range(1 + len(chunk.proposals)))
        sampled = [SampledToken(name, seq.sampler.sample(self.vocab_size, ahead)) for ahead in rows]
        kept = verified(sampled, {name: chunk.proposals})
        for one in kept:
            seq.tokens.append(one.token)
            seq.sampler.add(one.token)
        return kept
