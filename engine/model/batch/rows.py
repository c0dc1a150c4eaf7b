"""The rows of one step, on the host and, uploaded in one buffer, on the device. A token that the host does not know
yet, because the previous step computes it, is UNKNOWN, and the device substitutes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lora_kernels.backend import AttentionBatch
from lora_kernels.pinned import upload
from lora_kernels.segments import SegmentPlan

Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]

UNKNOWN = -1
"""Placeholder in arrays of token ids for a token that the host does not know yet."""


class PooledChunk(NamedTuple):
    """A chunk of a request for an embedding vector, as the pooler needs it: the chunk's rows in the step, from `first`
    to before `end`, and whether the prompt ends with it."""

    request_id: str
    first: int
    end: int
    is_last: bool
    """True means that the chunk ends the prompt, so that the vector is due."""


class ScoredChunk(NamedTuple):
    """A chunk of a request for logprobs of its prompt: its rows in the step, from `first` to before `end`, and the
    position of the first in its sequence."""

    request_id: str
    first: int
    end: int
    start: int
    is_last: bool
    """True means that the chunk ends with the newest token of the sequence."""


@dataclass(frozen=True, slots=True)
class BatchInput:
    """The rows of one step on the device: decodes first, then longer chunks, each sequence's rows in order."""

    token_ids: Tensor
    positions: Tensor
    """`token_ids` and `positions`: integers [num_rows]."""
    attention: AttentionBatch
    """Chunks, contexts and block tables of the step's sequences."""
    segments: SegmentPlan
    """The rows of each adapter, on the host."""
    sample_rows: Tensor | None
    """int32 [num_samples]. Rows whose logits are wanted. None means all rows, in a decode-only step."""
    sample_ids: tuple[str, ...]
    """Id of the request of each sampled row."""
    host_sample_rows: Longs | None = None
    """`sample_rows` on the host, int64. Captured steps have none."""


@dataclass(frozen=True, slots=True)
class HostBatch:
    """The rows of one step on the host, in the order of `BatchInput`, before they are uploaded."""

    token_ids: Ints
    """int32 [num_rows]. UNKNOWN where only the device has the token: the request's last sampled one."""
    sampler_slots: Ints
    """int32 [num_rows]. The sampler's slot of each row's request."""
    positions: Longs
    """int64 [num_rows]. Position of each row in its sequence."""
    kv_slots: Longs
    """int64 [num_rows]. `page * block_size + offset` where each row's K and V are written."""
    query_starts: Longs
    contexts: Longs
    """`query_starts` and `contexts`: int64 [num_seqs + 1], [num_seqs]. See `AttentionBatch`."""
    block_tables: Ints
    """int32 [num_seqs, blocks of the longest context]; 0 where a sequence has no block."""
    segments: SegmentPlan
    sample_rows: Longs
    """int64 [num_samples]. Rows whose logits are wanted."""
    sample_ids: tuple[str, ...]
    """Id of the request of each of `sample_rows`. Requests with proposals have several, in order."""
    proposals: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Request id -> its proposals, which are the tokens of its rows after the first."""
    pooled: tuple[PooledChunk, ...] = ()
    """The chunks of requests for vectors."""
    scored: tuple[ScoredChunk, ...] = ()
    """The chunks of requests for logprobs of their prompts."""

    @property
    def num_rows(self) -> int:
        return len(self.token_ids)

    @property
    def is_decoding(self) -> bool:
        """Return whether the step is decode-only: every sequence has exactly one row, and every row is sampled from."""
        return len(self.contexts) == len(self.sample_ids) == self.num_rows

    def to_device(self, last_tokens: Tensor) -> BatchInput:
        """Upload the batch's own arrays in one copy, for which the host does not wait, and return the step's input,
        views of that copy. UNKNOWN tokens are replaced from `last_tokens` (int64 [max_seqs], on the device)."""
        ints = (self.query_starts, self.contexts, self.block_tables, self.token_ids, self.positions, self.sample_rows)
        kv_slots, (query_starts, contexts, tables, tokens, positions, samples, slots) = _upload(
            self.kv_slots, (*ints, self.sampler_slots), last_tokens.device
        )
        lengths = np.diff(self.query_starts)
        attention = AttentionBatch(
            query_starts=query_starts,
            context_lens=contexts,
            block_tables=tables.view(self.block_tables.shape),
            kv_slots=kv_slots,
            num_decodes=int(np.count_nonzero(lengths == 1)),
            max_query=int(lengths.max()),
            max_context=int(self.contexts.max()),
            host_query_starts=tuple(self.query_starts.tolist()),
            host_context_lens=tuple(self.contexts.tolist()),
        )
        if (self.token_ids == UNKNOWN).any():
            tokens = known_ids(tokens, slots, last_tokens)
        wanted, on_host = (None, None) if self.is_decoding else (samples, self.sample_rows)
        return BatchInput(tokens, positions, attention, self.segments, wanted, self.sample_ids, on_host)


def known_ids(token_ids: Tensor, sampler_slots: Tensor, last_tokens: Tensor) -> Tensor:
    """Return `token_ids` (int32 [num_rows]) as int64, with each UNKNOWN replaced by the entry of `last_tokens` (int64
    [max_seqs]) at the row's sampler slot. The host does not wait."""
    last = last_tokens.index_select(0, sampler_slots.clamp(min=0))
    return torch.where(token_ids == UNKNOWN, last, token_ids)


def _upload(longs: Longs, ints: Sequence[npt.NDArray[np.integer]], device: torch.device) -> tuple[Tensor, list[Tensor]]:
    """Copy `longs` as int64 and each of `ints`, flattened, as int32 to the device. Return device views of one
    buffer."""
    parts = [longs.view(np.int32), *(array.astype(np.int32).ravel() for array in ints)]
    views = upload(np.concatenate(parts), device).split([len(part) for part in parts])
    return views[0].view(torch.int64), list(views[1:])
