"""Turns a plan's deltas into the rows of one step, using persistent state of the running requests.

All bookkeeping is done in numpy on the host.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from engine.core.messages.requests import PageId
from engine.core.messages.step import Admission, ScheduledChunk
from engine.model.batch.rows import UNKNOWN, HostBatch, Ints, Longs, PooledChunk, ScoredChunk
from lora_kernels.segments import plan_segments


class BatchState:
    """Tokens, block tables and slots of the running requests (at most `max_seqs`, each of at most `max_model_len`
    tokens), on the host. From `admit` to `release`, each request has one line (index) in every array."""

    def __init__(self, max_seqs: int, max_model_len: int, block_size: int) -> None:
        self.block_size = block_size
        self.tokens = np.full((max_seqs, max_model_len), UNKNOWN, dtype=np.int32)
        self.num_tokens = np.zeros(max_seqs, dtype=np.int32)
        self.block_tables = np.zeros((max_seqs, -(-max_model_len // block_size)), dtype=np.int32)
        self.num_blocks = np.zeros(max_seqs, dtype=np.int32)
        self.adapter_slots = np.full(max_seqs, -1, dtype=np.int32)
        self.adapter_begins = np.zeros(max_seqs, dtype=np.int32)
        self.sampler_slots = np.zeros(max_seqs, dtype=np.int32)
        self._lines: dict[str, int] = {}
        self._pooled: set[str] = set()
        """Ids of the running requests for vectors."""
        self._scored: set[str] = set()
        """Ids of the running requests for logprobs of their prompts."""
        self._silent: set[str] = set()
        """Ids of the running requests that generate no tokens."""
        self._free = list(range(max_seqs - 1, -1, -1))

    def __len__(self) -> int:
        return len(self._lines)

    def release(self, request_id: str) -> bool:
        """Forget a request and free its line (its index in the arrays of running requests). Return False if the request
        is not known, because it was aborted before it ran."""
        line = self._lines.pop(request_id, None)
        if line is None:
            return False
        for ids in (self._pooled, self._scored, self._silent):
            ids.discard(request_id)
        self.block_tables[line] = 0
        self.num_blocks[line] = 0
        self._free.append(line)
        return True

    def admit(self, admission: Admission, adapter_slot: int, sampler_slot: int = 0) -> None:
        """Add a request with its tokens, the pages of its block table, its adapter slot (-1 for the base model) and its
        sampler slot. Raises ValueError if the request runs already, or every line is taken."""
        if admission.request_id in self._lines or not self._free:
            reason = "runs already" if admission.request_id in self._lines else "finds every line taken"
            raise ValueError(f"request {admission.request_id} {reason}")
        line = self._lines[admission.request_id] = self._free.pop()
        self.tokens[line, : len(admission.tokens)] = admission.tokens
        self.tokens[line, len(admission.tokens) :] = UNKNOWN
        self.num_tokens[line] = len(admission.tokens)
        self.adapter_slots[line] = adapter_slot
        self.adapter_begins[line] = admission.adapter_begin
        self.sampler_slots[line] = sampler_slot
        self._add_pages(line, admission.pages)
        if admission.pooling is not None:
            self._pooled.add(admission.request_id)
        if admission.params.prompt_logprobs is not None:
            self._scored.add(admission.request_id)
        if not admission.params.max_tokens:
            self._silent.add(admission.request_id)

    def append(self, request_id: str, token: int) -> None:
        """Append a sampled token id to a running request. Drops a token beyond `max_model_len`: it ends its request and
        is never computed."""
        line = self._lines[request_id]
        if self.num_tokens[line] < self.tokens.shape[1]:
            self.tokens[line, self.num_tokens[line]] = token
            self.num_tokens[line] += 1

    def known(self, request_id: str) -> Ints:
        """Return a view of a running request's known tokens, int32 [num_known]."""
        line = self._lines[request_id]
        return self.tokens[line, : self.num_tokens[line]]

    def add_pages(self, request_id: str, pages: Sequence[PageId]) -> None:
        """Append pages to a running request's block table."""
        self._add_pages(self._lines[request_id], pages)

    def rewrite(self, request_id: str, start: int, tokens: Ints) -> None:
        """Replace all tokens of a running request from position `start` on by `tokens`. The draft model calls this when
        its guesses were refused, and to add tokens."""
        line, end = self._lines[request_id], start + len(tokens)
        self.tokens[line, start:end] = tokens
        self.num_tokens[line] = end

    def gather(self, chunks: Sequence[ScheduledChunk]) -> HostBatch:
        """Append each chunk's new pages to its request's block table, and return the rows of the step that computes
        `chunks` (not empty): one-token chunks first, then longer ones, both ordered by adapter slot."""
        # A chunk with proposals becomes chunks of one token that share a block table: a layer writes the K and V of all
        # rows before any attends, so that they are computed like decodes of several requests.
        proposals = {chunk.request_id: chunk.proposals for chunk in chunks if chunk.proposals}
        ordered = sorted(self._split(chunks) if proposals else chunks, key=self._row_order)
        lines = np.asarray([self._lines[chunk.request_id] for chunk in ordered], dtype=np.int64)
        for line, chunk in zip(lines, ordered, strict=True):
            self._add_pages(int(line), chunk.new_pages)
        span = _span(ordered)
        samples = [chunk.samples and chunk.request_id not in self._silent for chunk in ordered]
        row_lines = np.repeat(lines, span.lengths)
        slots = self.adapter_slots[row_lines]
        return HostBatch(
            token_ids=self.tokens[row_lines, span.positions],
            sampler_slots=self.sampler_slots[row_lines],
            positions=span.positions,
            kv_slots=self._kv_slots(row_lines, span.positions),
            query_starts=span.query_starts,
            contexts=span.contexts,
            block_tables=self.block_tables[lines, : -(-int(span.contexts.max()) // self.block_size)],
            segments=plan_segments(np.where(span.positions < self.adapter_begins[row_lines], -1, slots)),
            sample_rows=span.query_starts[1:][samples] - 1,
            sample_ids=tuple(
                chunk.request_id for chunk, is_sampled in zip(ordered, samples, strict=True) if is_sampled
            ),
            proposals=proposals,
            pooled=self._pooled_chunks(ordered, span.query_starts) if self._pooled else (),
            scored=self._scored_chunks(ordered, span.query_starts) if self._scored else (),
        )

    def _split(self, chunks: Iterable[ScheduledChunk]) -> Iterator[ScheduledChunk]:
        """Yield the step's chunks, but split each one that has proposals (speculated tokens) into chunks of one token.
        Writes the proposals behind the request's known tokens, where `append` overwrites them with the sampled
        tokens."""
        for chunk in chunks:
            if not chunk.proposals:
                yield chunk
                continue
            first, end = chunk.start + 1, chunk.start + chunk.num_tokens
            self.tokens[self._lines[chunk.request_id], first:end] = chunk.proposals
            for place in range(chunk.start, end):
                yield ScheduledChunk(chunk.request_id, place, 1, chunk.new_pages if place < first else (), samples=True)

    def _pooled_chunks(self, ordered: Sequence[ScheduledChunk], query_starts: Longs) -> tuple[PooledChunk, ...]:
        spans = zip(ordered, query_starts[:-1].tolist(), query_starts[1:].tolist(), strict=True)
        return tuple(
            PooledChunk(chunk.request_id, first, end, chunk.samples)
            for chunk, first, end in spans
            if chunk.request_id in self._pooled
        )

    def _scored_chunks(self, ordered: Sequence[ScheduledChunk], query_starts: Longs) -> tuple[ScoredChunk, ...]:
        spans = zip(ordered, query_starts[:-1].tolist(), query_starts[1:].tolist(), strict=True)
        return tuple(
            ScoredChunk(chunk.request_id, first, end, chunk.start, chunk.samples)
            for chunk, first, end in spans
            if chunk.request_id in self._scored
        )

    def _row_order(self, chunk: ScheduledChunk) -> tuple[bool, int]:
        """Sort key of a step's chunks: one-token chunks first, then by adapter slot, so that LoRA kernels read an
        adapter's rows in place."""
        return chunk.num_tokens > 1, int(self.adapter_slots[self._lines[chunk.request_id]])

    def _add_pages(self, line: int, pages: Sequence[PageId]) -> None:
        first = self.num_blocks[line]
        self.block_tables[line, first : first + len(pages)] = pages
        self.num_blocks[line] += len(pages)

    def _kv_slots(self, row_lines: Longs, positions: Longs) -> Longs:
        block, offset = np.divmod(positions, self.block_size)
        return self.block_tables[row_lines, block].astype(np.int64) * self.block_size + offset


@dataclass(frozen=True, slots=True)
class _Span:
    """The rows of a list of chunks, int64: `lengths` and `contexts` (tokens up to the chunk's end), [num_seqs],
    `query_starts` (first rows, and the number of rows), [num_seqs + 1], and `positions` in sequences, [num_rows]."""

    lengths: Longs
    contexts: Longs
    query_starts: Longs
    positions: Longs


def _span(chunks: Sequence[ScheduledChunk]) -> _Span:
    starts = np.asarray([chunk.start for chunk in chunks], dtype=np.int64)
    lengths = np.asarray([chunk.num_tokens for chunk in chunks], dtype=np.int64)
    query_starts = np.append(0, np.cumsum(lengths))
    positions = np.arange(query_starts[-1]) + np.repeat(starts - query_starts[:-1], lengths)
    return _Span(lengths, starts + lengths, query_starts, positions)
