"""The draft model: a second, smaller decoder on a CPU, with KV in pages of the same pool, guesses next tokens. It
compares what it holds with a request's known tokens. engine/core/plan/draft_asks.py says when it is asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from engine.config import EngineConfig
from engine.core.messages.requests import AdapterHash, PageId, SamplingParams
from engine.core.messages.step import Admission, DraftAsk, Drafted, ScheduledChunk
from engine.model.adapters.peft.targets import TargetShapes, target_shapes
from engine.model.batch.rows import Ints
from engine.model.batch.state import BatchState
from engine.model.decode.assembly import build_decoder
from engine.model.decode.decoder import Decoder
from engine.model.layers.lora import target_names
from engine.model.memory.arena import Arena, page_shape
from engine.model.memory.host_store import PackedAdapter
from engine.model.runner.sizes import max_model_len
from engine.model.runner.submitted import SubmittedStep
from engine.model.spec.config import ModelSpec
from engine.model.spec.draft import DraftFolder, draft_block
from engine.model.steps.forward import Forward, forward_over
from engine.model.weights.quantize import open_source
from lora_kernels.backend import Backend


class NoDraftModel:
    """A `DraftModel` that proposes nothing, for engines in which no draft model is configured."""

    block = 0

    def load(self, adapter: PackedAdapter | None, adapter_hash: AdapterHash, pages: tuple[PageId, ...]) -> None:
        """Do nothing, because there is no draft model."""

    def evict(self, adapter_hash: AdapterHash) -> None:
        """Do nothing, because there is no draft model."""

    def forget(self, request_id: str) -> None:
        """Do nothing, because there is no draft model."""

    def follow(self, step: SubmittedStep, batch: BatchState) -> tuple[tuple[Drafted, ...], float]:
        """Return no guesses and 0 seconds, because there is no draft model."""
        return (), 0.0


class DraftModel:
    """The draft model of speculative decoding on a CPU: guesses the next tokens of requests, greedily, below
    `vocab_size` and up to one of `eos_token_ids`, for the large model to verify. `forward` computes a step over
    `arena`."""

    def __init__(
        self,
        forward: Forward,
        arena: Arena,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        max_seqs: int,
        max_model_len: int,
        block: int,
        clock: Callable[[], float],
    ) -> None:
        self.block = block
        """Number of tokens of the draft model's KV in a page."""
        self._clock = clock
        self._forward = forward
        self._arena = arena
        self._adapters: set[AdapterHash] = set()
        """Resident adapters that have a part for the draft model, by which it guesses for their requests."""
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._batch = BatchState(max_seqs, max_model_len, block)
        self._held: dict[str, int] = {}
        """Request id -> number of leading tokens in `_batch` whose KV the draft model has in its pages, or computes in
        this call."""
        self._no_tokens = torch.zeros(1, dtype=torch.int64)

    def load(self, adapter: PackedAdapter | None, adapter_hash: AdapterHash, pages: tuple[PageId, ...]) -> None:
        """Load an adapter's part for the draft model into `pages`, and wait for the copy. `adapter` None means that the
        adapter `adapter_hash` has no such part, and nothing is loaded."""
        if adapter is not None:
            self._arena.load_adapter(adapter_hash, adapter.layout, adapter.blob, pages)
            self._arena.copies.finish()
            self._adapters.add(adapter_hash)

    def evict(self, adapter_hash: AdapterHash) -> None:
        """Free the draft model's adapter slot of an adapter, if the adapter has a part for the draft model."""
        if adapter_hash in self._adapters:
            self._adapters.remove(adapter_hash)
            self._arena.evict_adapter(adapter_hash)

    def forget(self, request_id: str) -> None:
        """Drop the draft model's tokens and block table of a request. Does nothing if the draft model does not know the
        request."""
        if self._held.pop(request_id, None) is not None:
            self._batch.release(request_id)

    def follow(self, step: SubmittedStep, batch: BatchState) -> tuple[tuple[Drafted, ...], float]:
        """Answer the asks (`DraftAsk`) of a step whose tokens `batch` already has: take the pages of each, and guess
        for requests that have not ended. Return the guesses, and the seconds that they took."""
        if not step.drafts:
            return (), 0.0
        started, last = self._clock(), {token.request_id: token.token for token in step.tokens}
        ended = {name for name, token in last.items() if token in self._eos_token_ids} | step.failed.keys()
        for ask in step.drafts:
            self._give_pages(ask)
        asks = [ask for ask in step.drafts if ask.request_id not in ended]
        drafted = self.draft(asks, batch.known) if asks else ()
        return drafted, self._clock() - started

    @torch.inference_mode()
    def draft(self, asks: Sequence[DraftAsk], known: Callable[[str], Ints]) -> tuple[Drafted, ...]:
        """Compute the KV that the draft model lacks and guess the next tokens, for all asks in the same passes. `known`
        returns a request's tokens, int32. An ask whose tokens are still lacking gets no guesses."""
        chunks = [self._catch_up(ask, known(ask.request_id)) for ask in asks]
        newest = self._compute(chunks)
        guesses: dict[str, list[int]] = {ask.request_id: [] for ask in asks}
        wanted = {ask.request_id: ask.guesses for ask in asks if self._holds_all(ask.request_id, known)}
        for number in range(1, 1 + max(wanted.values(), default=0)):
            wanted = {name: count for name, count in wanted.items() if count >= number}
            for name in wanted:
                guesses[name].append(newest[name])
            more = [self._append(name, newest[name]) for name, count in wanted.items() if count > number]
            newest = self._compute(more) if more else {}
        return tuple(
            Drafted(ask.request_id, chunk.num_tokens, self._held[ask.request_id], tuple(guesses[ask.request_id]))
            for ask, chunk in zip(asks, chunks, strict=True)
        )

    def _give_pages(self, ask: DraftAsk) -> None:
        """Append the new pages of a request's ask (`DraftAsk`) to its block table in the draft model, or admits the
        request with these pages if the draft model does not know it."""
        if ask.request_id in self._held:
            self._batch.add_pages(ask.request_id, ask.new_pages)
            return
        slot = self._arena.adapter_slot(ask.adapter_hash if ask.adapter_hash in self._adapters else None)
        self._batch.admit(Admission(ask.request_id, (), 0, 0, ask.new_pages, None, SamplingParams()), slot)
        self._held[ask.request_id] = 0

    def _catch_up(self, ask: DraftAsk, known: Ints) -> ScheduledChunk:
        """Take over the request's `known` tokens, at most `ask.most`, from the first one that was not computed or was
        guessed wrong, and return the chunk that computes them, in rows of their own like decodes."""
        name, held = ask.request_id, self._batch.known(ask.request_id)[: self._held[ask.request_id]]
        start = _num_alike(held, known)
        end = min(len(known), start + ask.most)
        self._batch.rewrite(name, start, known[start:end])
        self._held[name] = end
        return ScheduledChunk(name, start, end - start, (), True, tuple(known[start + 1 : end].tolist()))

    def _holds_all(self, request_id: str, known: Callable[[str], Ints]) -> bool:
        return self._held[request_id] == len(known(request_id))

    def _append(self, request_id: str, token: int) -> ScheduledChunk:
        place = self._held[request_id]
        self._batch.rewrite(request_id, place, np.asarray([token], dtype=np.int32))
        self._held[request_id] = place + 1
        return ScheduledChunk(request_id, place, 1, (), samples=True)

    def _compute(self, chunks: Sequence[ScheduledChunk]) -> dict[str, int]:
        """Compute chunks with the draft model, and return the likeliest token after each chunk that samples, by request
        id."""
        batch = self._batch.gather(chunks)
        logits = self._forward(batch.to_device(self._no_tokens)).logits[:, : self._vocab_size]
        tokens = logits.float().numpy().argmax(-1).tolist() if batch.sample_ids else ()
        return dict(zip(batch.sample_ids, tokens, strict=True))  # of several rows, the last one counts


def _num_alike(one: Ints, other: Ints) -> int:
    """Return the number of leading tokens that two arrays have in common."""
    count = min(len(one), len(other))
    differs = one[:count] != other[:count]
    return int(differs.argmax()) if differs.any() else count


class LoadedDraft(NamedTuple):
    """A draft model whose weights are loaded, and the projections of it that adapters may change."""

    decoder: Decoder
    shapes: TargetShapes


def load_draft(draft: DraftFolder | None, dtype: torch.dtype, device: torch.device) -> LoadedDraft | None:
    """Load the weights of a draft model, and return them as a decoder with the projections that adapters may change.
    None means that there is no draft model."""
    if draft is None:
        return None
    source = open_source(draft.config, draft.spec, device)
    decoder = build_decoder(draft.spec, source, dtype, device)
    return LoadedDraft(decoder, target_shapes(draft.spec, source, Path(draft.config.model).name))


def make_draft_model(
    draft: LoadedDraft | None,
    arena: Arena,
    backend: Backend,
    config: EngineConfig,
    spec: ModelSpec,
    clock: Callable[[], float],
) -> DraftModel | NoDraftModel:
    """Return the draft model over the pages of `arena`, or a `NoDraftModel` if `draft` is None. `spec` is the shape of
    the large model, whose pages these are. `clock`, in seconds, measures the time of drafting."""
    if draft is None:
        return NoDraftModel()
    (num_pages, elements), own_spec = arena.pages.shape, draft.decoder.spec
    shape = page_shape(own_spec, draft_block(own_spec, elements))
    dtype, device = arena.pages.dtype, arena.pages.device
    num_targets = len(target_names(own_spec))
    own = Arena(
        shape, num_pages, config.max_resident_adapters, dtype, device, pages=arena.pages, num_targets=num_targets
    )
    forward, max_len = forward_over(draft.decoder, own, backend), max_model_len(config, spec)
    sizes = config.max_seqs, max_len, shape.block_size
    return DraftModel(forward, own, spec.vocab_size, spec.eos_token_ids, *sizes, clock)
