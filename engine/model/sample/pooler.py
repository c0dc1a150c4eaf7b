"""Pools hidden states into vectors, in fp32 after the norm, once a step has computed its residual stream. A mean over
several chunks keeps its sum on the device between the steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.core.messages.requests import Pooling, PoolingKind
from engine.core.messages.step import PooledVector
from engine.model.batch.results import ResultBlocks, StepResults
from engine.model.batch.rows import PooledChunk
from lora_kernels.pinned import upload


@dataclass(frozen=True, slots=True)
class _PoolerEntry:
    pooling: Pooling
    num_tokens: int

    @property
    def divisor(self) -> int:
        return self.num_tokens if self.pooling.kind is PoolingKind.MEAN else 1


@dataclass(frozen=True, slots=True)
class Vectors:
    """Embedding vectors of one step, while they are copied to the host: `host` is fp32 [len(request_ids), hidden_size],
    and each request gets the first elements of its row, as many as `dimensions` says."""

    request_ids: tuple[str, ...]
    dimensions: tuple[int, ...]
    host: Tensor
    results: StepResults

    def read(self) -> dict[str, PooledVector | None]:
        """Return the step's embedding vectors by request id; None for one with NaN or infinite elements. The device
        must have finished the step."""
        self.results.check()
        rows = zip(self.request_ids, self.host.numpy(), self.dimensions, strict=True)
        return {name: _vector(name, row[:count]) for name, row, count in rows}


def _vector(request_id: str, row: npt.NDArray[np.float32]) -> PooledVector | None:
    return PooledVector(request_id, row.tobytes()) if np.isfinite(row).all() else None


class Pooler:
    """Pools hidden states into embedding vectors for the running requests that ask for them, at most `max_seqs`.

    Args:
        norm: the model's final norm, from [num_rows, hidden_size] of the residual stream to hidden states.
    """

    def __init__(self, norm: Callable[[Tensor], Tensor], hidden_size: int, max_seqs: int, device: torch.device) -> None:
        self._norm = norm
        self._hidden_size = hidden_size
        self._device = device
        self._entries: dict[str, _PoolerEntry] = {}
        self._sums: dict[str, Tensor] = {}
        """Sums over the rows of earlier chunks, fp32 [hidden_size], of requests for means."""
        self._results = ResultBlocks(max_seqs * hidden_size * torch.float32.itemsize, device)

    def add(self, request_id: str, pooling: Pooling, num_tokens: int) -> None:
        """Add a request for an embedding vector with the length of its prompt in tokens, or begin it anew after a
        preemption."""
        self._entries[request_id] = _PoolerEntry(pooling, num_tokens)

    def remove(self, request_id: str) -> None:
        """Drop a request's pooling state. Does nothing for a request that asks for no vector."""
        self._entries.pop(request_id, None)
        self._sums.pop(request_id, None)

    def warm_up(self, dtype: torch.dtype) -> None:
        """Pool a row of zeros once for each kind of pooling, so that no kernel is loaded while requests wait."""
        row = torch.zeros(1, self._hidden_size, dtype=dtype, device=self._device)
        for kind in PoolingKind:
            self.add(kind.value, Pooling(kind), 1)
            self.start(row, (PooledChunk(kind.value, 0, 1, is_last=True),))
            self.remove(kind.value)

    def start(self, residual: Tensor, chunks: Sequence[PooledChunk]) -> Vectors | None:
        """Pool a step's chunks from `residual` [num_rows, hidden_size], the stream before the final norm, and start to
        copy the vectors of complete prompts to the host. None means that no vector is complete."""
        spans = [(chunk, first) for chunk in chunks if (first := self._first_row(chunk)) < chunk.end]
        if not spans:
            return None
        spans.sort(key=lambda span: not span[0].is_last)
        sums = self._summed(residual, [(first, chunk.end) for chunk, first in spans])
        for (chunk, _), row in zip(spans, sums, strict=True):
            self._carry(chunk, row)
        done = tuple(chunk.request_id for chunk, _ in spans if chunk.is_last)
        return self._finish(done, sums[: len(done)]) if done else None

    def _first_row(self, chunk: PooledChunk) -> int:
        """Return the first row of a chunk whose hidden state the request's vector needs: all rows for a mean, else only
        the prompt's last row. `chunk.end` means that none is needed."""
        if self._entries[chunk.request_id].pooling.kind is PoolingKind.MEAN:
            return chunk.first
        return chunk.end - chunk.is_last

    def _summed(self, residual: Tensor, spans: Sequence[tuple[int, int]]) -> Tensor:
        """Return the sum of the hidden states in each span of rows (from `first` to before `end`), fp32 [len(spans),
        hidden_size]."""
        rows = np.concatenate([np.arange(first, end) for first, end in spans])
        lengths = np.array([end - first for first, end in spans])
        numbers = upload(np.concatenate((rows, lengths)), self._device)
        hidden = self._norm(residual.index_select(0, numbers[: len(rows)])).float()
        # Unsafe means that the lengths are not checked, for which the host would wait for a GPU.
        return torch.segment_reduce(hidden, "sum", lengths=numbers[len(rows) :], unsafe=True)

    def _carry(self, chunk: PooledChunk, row: Tensor) -> None:
        """Continue a mean over several chunks: add the sum of the request's earlier chunks to `row`, which has the sum
        of this chunk, in place, and keep the result for the next chunk unless this one is the last."""
        before = self._sums.pop(chunk.request_id, None)
        if before is not None:
            row += before
        if not chunk.is_last:
            self._sums[chunk.request_id] = row.clone()  # a view would keep the sums of the step's other requests

    def _finish(self, request_ids: tuple[str, ...], sums: Tensor) -> Vectors:
        entries = [self._entries[request_id] for request_id in request_ids]
        dimensions = [min(entry.pooling.dimensions or self._hidden_size, self._hidden_size) for entry in entries]
        facts = [[entry.divisor for entry in entries], dimensions, [entry.pooling.normalize for entry in entries]]
        divisors, counts, normalized = upload(np.array(facts, dtype=np.int64), self._device).unsqueeze(-1)
        kept = torch.arange(self._hidden_size, device=self._device) < counts
        vectors = torch.where(kept, sums / divisors, 0.0)
        vectors = torch.where(normalized > 0, F.normalize(vectors, dim=-1), vectors)
        results = self._results.begin()
        return Vectors(request_ids, tuple(dimensions), results.download(vectors), results)
