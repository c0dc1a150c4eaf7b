"""The plans that FlashInfer's wrappers make on the host, for steps that are launched and for captured ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lora_kernels.backend import AttentionBatch
from lora_kernels.gpu.triton_context import AttentionCall
from lora_kernels.pinned import upload, upload_into

Longs = npt.NDArray[np.int64]


class Layer(NamedTuple):
    """The properties of a layer that its plan depends on. `window` is as in `Backend.attention`."""

    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    scale: float
    cap: float | None
    window: int | None

    @classmethod
    def of(cls, call: AttentionCall) -> Layer:
        block_size, kv_heads, head_dim = call.kv.shape[2:]
        scale, cap, heads = call.scores.scale, call.scores.cap, call.query.shape[1]
        return cls(heads, kv_heads, head_dim, block_size, call.query.dtype, scale, cap, call.window)


@dataclass(frozen=True, slots=True)
class PageLists:
    """The rows and pages of a batch, in the form in which FlashInfer plans them.

    Attributes:
        query_starts: int32 [num_seqs + 1], on the host. See `AttentionBatch`.
        starts: int32 [num_seqs + 1], on the host. Pages of sequence i are `pages[starts[i]:starts[i + 1]]`.
        last: int32 [num_seqs], on the host. Tokens in the last page of each sequence, at least 1.
        pages: int32 [starts[-1]], on the device.
    """

    query_starts: Tensor
    starts: Tensor
    last: Tensor
    pages: Tensor


@dataclass(frozen=True, slots=True)
class ListBuffers:
    """Device memory at fixed addresses for the page lists (see `PageLists`) of captured steps, int32. Each tensor is as
    large as the largest step needs."""

    query_starts: Tensor
    starts: Tensor
    last: Tensor
    pages: Tensor


class PlannedWrapper:
    """One of FlashInfer's wrappers, which plans and computes the attention of one kind of layer."""

    def __init__(self, wrapper: Any, layer: Layer, has_prompts: bool, device: torch.device) -> None:
        self._wrapper, self._layer, self._has_prompts = wrapper, layer, has_prompts
        self._planned = torch.cuda.Event() if device.type == "cuda" else None

    def plan(self, lists: PageLists) -> None:
        """Plans the next step, in stream order. Waits until the previous plan's lists have been copied to the device,
        because this plan overwrites the pinned memory from which they are copied. On a GPU, they were copied before the
        previous step ran."""
        if self._planned is not None:
            self._planned.synchronize()
        layer = self._layer
        pages = lists.starts, lists.pages, lists.last, layer.heads, layer.kv_heads, layer.head_dim, layer.block_size
        options: dict[str, Any] = {
            "q_data_type": layer.dtype,
            "kv_data_type": layer.dtype,
            "sm_scale": layer.scale,
            "logits_soft_cap": layer.cap,
            "window_left": -1 if layer.window is None else layer.window - 1,
        }
        if self._has_prompts:
            self._wrapper.plan(lists.query_starts, *pages, causal=True, **options)
        else:
            self._wrapper.plan(*pages, **options)
        if self._planned is not None:
            self._planned.record()

    def run(self, call: AttentionCall) -> None:
        self._wrapper.run(call.query, call.kv, out=call.out)


Make = Callable[[Layer, torch.device], PlannedWrapper]
"""Makes the wrapper of a kind of layer on a device."""


class StepWrappers:
    """The wrappers for steps of one kind or size: one for each kind of layer, made when the first such layer comes."""

    def __init__(self, make: Make) -> None:
        self._make = make
        self._wrappers: dict[Layer, PlannedWrapper] = {}
        self._planned: set[Layer] = set()
        self._lists: PageLists

    def begin(self, lists: PageLists) -> None:
        """Starts a step with the page lists of its batch. `attend` plans a kind of layer at its first call for such a
        layer."""
        self._lists, self._planned = lists, set()

    def attend(self, call: AttentionCall) -> None:
        """Computes one layer's attention into `call.out`."""
        layer = Layer.of(call)
        if layer not in self._wrappers:
            self._wrappers[layer] = self._make(layer, call.query.device)
        if layer not in self._planned:
            self._plan(layer)
        self._wrappers[layer].run(call)

    def plan_all(self) -> None:
        """Plans the step for every kind of layer that has a wrapper, because a replay does not call `attend`."""
        for layer in self._wrappers:
            self._plan(layer)

    def _plan(self, layer: Layer) -> None:
        self._wrappers[layer].plan(self._lists)
        self._planned.add(layer)


class CapturedWrappers(StepWrappers):
    """The wrappers of a captured step (`CapturedPlans`). Padding sequences have one token, in page 0."""

    def __init__(self, make: Make, buffers: ListBuffers, rows: int, seqs: int, block_size: int) -> None:
        """Plans `rows` rows of `seqs` sequences, the most that any step has, because the first plan decides the size of
        all later ones."""
        super().__init__(make)
        self._buffers, self._seqs, self._block_size = buffers, seqs, block_size
        lengths = np.full(seqs, rows // seqs)
        lengths[: rows % seqs] += 1
        starts = np.append(0, np.cumsum(lengths))
        self.renew(starts, lengths, np.zeros((seqs, -(-int(lengths.max()) // block_size)), dtype=np.int32))

    def renew(self, query_starts: Longs, contexts: Longs, tables: npt.NDArray[np.int32]) -> None:
        """Plans the step that is replayed next; see `CapturedPlans`."""
        padding = self._seqs - len(contexts)
        starts, last = page_starts(np.append(contexts, np.ones(padding, dtype=np.int64)), self._block_size)
        pages = np.zeros(starts[-1], dtype=np.int32)
        pages[: len(pages) - padding] = tables.reshape(-1)[places(starts[: len(contexts) + 1], tables.shape[1])]
        upload_into(self._buffers.pages[: len(pages)], pages)
        rows = np.append(query_starts, np.full(padding, query_starts[-1]))
        self.begin(PageLists(ints(rows), ints(starts), ints(last), self._buffers.pages[: len(pages)]))
        self.plan_all()


def list_pages(batch: AttentionBatch, block_size: int) -> PageLists:
    """Returns the lists of a step that is launched, whose block tables are on the device alone."""
    starts, last = page_starts(np.array(batch.host_context_lens), block_size)
    found = upload(places(starts, batch.block_tables.shape[1]), batch.block_tables.device)
    pages = batch.block_tables.reshape(-1).index_select(0, found)
    return PageLists(ints(np.array(batch.host_query_starts)), ints(starts), ints(last), pages)


def page_starts(contexts: Longs, block_size: int) -> tuple[Longs, Longs]:
    """Returns where the pages of each sequence start in one concatenated list, [num_seqs + 1], and the number of tokens
    in the last page of each, [num_seqs]."""
    blocks = -(-contexts // block_size)
    return np.append(0, np.cumsum(blocks)), contexts - (blocks - 1) * block_size


def places(starts: Longs, width: int) -> Longs:
    """Returns, for every page of a concatenated list with these `starts` (`page_starts`), its index in flattened block
    tables of `width` blocks: int64 [starts[-1]]."""
    return np.arange(starts[-1]) + np.repeat(np.arange(len(starts) - 1) * width - starts[:-1], np.diff(starts))


def ints(array: Longs) -> Tensor:
    return torch.from_numpy(array.astype(np.int32))
