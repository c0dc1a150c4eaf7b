"""Plans one step's attention on the CPU: the argument block that layers share, and the items, each of up to `ITEM_ROWS`
query rows of one sequence for one KV head or for all."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lora_kernels.backend import AttentionBatch
from lora_kernels.cpu.openmp import TICKETS
from lora_kernels.cpu.products import MAX_ROWS
from lora_kernels.cpu.simd import LANES

TILE = 64
"""Tokens per softmax step, in whole pages: enough to hide its fixed cost, and few enough for the first-level cache."""
ITEM_ROWS = 16
"""Maximum query rows of an item, which read K and V together."""
CACHE_LINE = 64
NO_WINDOW = 1 << 40

Int32Array = npt.NDArray[np.int32]


class AttentionArguments(ctypes.Structure):
    """Argument block of the attention kernel: addresses, and strides in bytes. `items` is described at `plan_items`;
    `sinks` and `cap` are 0 if scores have none. `of_step` names the fields that change every step (`Tape.renew`)."""

    _fields_ = [
        *TICKETS,
        *((name, ctypes.c_int64) for name in ("num_items", "items", "query", "query_row", "query_head", "out")),
        *((name, ctypes.c_int64) for name in ("kv", "page", "side", "token", "head", "block_size")),
        *((name, ctypes.c_int64) for name in ("tables", "table", "heads", "group", "dims", "window")),
        *((name, ctypes.c_int64) for name in ("scratch", "scratch_bytes", "scratch_rows", "sinks")),
        ("scale", ctypes.c_float),
        ("cap", ctypes.c_float),
    ]
    of_step = ("num_items", "items", "tables", "table", "scratch", "scratch_bytes", "scratch_rows")


class AttentionForm(NamedTuple):
    """The parameters that layers must share to use one plan: query heads, shape and stride of one layer's KV (in
    numbers), bytes of a number, factor and cap of the scores (`Scores`), and window (None: no limit)."""

    heads: int
    kv_shape: tuple[int, ...]
    kv_stride: tuple[int, ...]
    number_bytes: int
    scale: float
    cap: float | None
    window: int | None


@dataclass(frozen=True, slots=True)
class NumbaAttentionPlan:
    """A step's argument block and the memory it points to, for all layers of one form. Each layer sets the addresses
    `query`, `out`, `kv` and `sinks`, and the strides of the query, before it runs the kernel."""

    block: AttentionArguments
    items: Int32Array
    scratch: Tensor
    batch: AttentionBatch


def plan_attention(form: AttentionForm, batch: AttentionBatch) -> NumbaAttentionPlan:
    heads, (block_size, kv_heads, dims) = form.heads, form.kv_shape[2:]
    items = plan_items(batch, kv_heads, torch.get_num_threads())
    rows = max(MAX_ROWS, int((items[:, 2] * items[:, 5]).max()) * heads // kv_heads)
    scratch = torch.empty(torch.get_num_threads(), _scratch_bytes(rows, dims, block_size), dtype=torch.uint8)
    page, side, token, head = (stride * form.number_bytes for stride in form.kv_stride[:4])
    block = AttentionArguments(
        num_items=len(items),
        items=items.ctypes.data,
        page=page,
        side=side,
        token=token,
        head=head,
        block_size=block_size,
        tables=batch.block_tables.data_ptr(),
        table=batch.block_tables.stride(0) * 4,
        heads=heads,
        group=heads // kv_heads,
        dims=dims,
        window=form.window or NO_WINDOW,
        scratch=scratch.data_ptr(),
        scratch_bytes=scratch.shape[1],
        scratch_rows=rows,
        scale=form.scale,
        cap=form.cap or 0.0,
    )
    return NumbaAttentionPlan(block, items, scratch, batch)


def plan_items(batch: AttentionBatch, kv_heads: int, threads: int) -> Int32Array:
    """Cut a batch into items. Return int32 [num_items, 6]: (sequence, first query row, number of query rows, position
    of the first row, first KV head, number of KV heads), longest items first."""
    # An item has all KV heads, which share the pages' cache lines, if that makes at least four items per thread.
    starts = np.asarray(batch.host_query_starts)
    contexts = np.asarray(batch.host_context_lens)
    lengths = np.diff(starts)
    counts = -(-lengths // ITEM_ROWS)
    sequence = np.repeat(np.arange(len(lengths)), counts)
    row = (np.arange(len(sequence)) - np.repeat(np.cumsum(counts) - counts, counts)) * ITEM_ROWS
    rows = np.minimum(ITEM_ROWS, lengths[sequence] - row)
    position = contexts[sequence] - lengths[sequence] + row
    items = np.stack([sequence, starts[sequence] + row, rows, position, 0 * row, 0 * row + kv_heads], axis=1)
    items = items[np.argsort(-(position + rows) * rows, kind="stable")].astype(np.int32)
    if len(items) >= 4 * threads:
        return items
    items = np.repeat(items, kv_heads, axis=0)
    items[:, 4] = np.arange(len(items)) % kv_heads
    items[:, 5] = 1
    return items


def _scratch_bytes(rows: int, dims: int, block_size: int) -> int:
    """Return the scratch bytes of one thread, in whole cache lines: query, sums, maximum and total of every row, and
    scores of four rows."""
    padded = -(-dims // LANES) * LANES
    tile = max(1, TILE // block_size) * block_size + LANES
    return -(-4 * (2 * rows * padded + MAX_ROWS * tile + 2 * rows) // CACHE_LINE) * CACHE_LINE
