"""Paged attention on a GPU: one kernel for decoding and for ragged chunks of prompts.

A program owns one KV head and a tile of query rows of one sequence; all query heads of the KV head (GQA) lie in the
tile, so that K and V are read once for them. Softmax is computed online over blocks of the context (FlashAttention-2,
Dao 2023).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from lora_kernels.backend import AttentionBatch

DECODE_HEIGHT = 16
PREFILL_HEIGHT = 64
LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class QueryTiles:
    """Tiles of query rows, `height` (row, head of the group) pairs each.

    Attributes:
        count: number of tiles.
        height: a power of two, at least the heads of a group.
        places: int32 [count, 2] on the device, (sequence, its first query row in the tile); None where tile i is
            sequence i and has one row.
    """

    count: int
    height: int
    places: Tensor | None


def plan_tiles(batch: AttentionBatch, group: int) -> tuple[QueryTiles, ...]:
    """Tiles of the decoding sequences, and of the others. `group` is the number of query heads of a KV head."""
    tiles = []
    if batch.num_decodes:
        tiles.append(QueryTiles(batch.num_decodes, _height(DECODE_HEIGHT, group), None))
    if batch.num_decodes < len(batch.host_context_lens):
        height = _height(PREFILL_HEIGHT, group)
        places = _cut_chunks(batch, height // group)
        tiles.append(QueryTiles(len(places), height, _upload(places, batch.query_starts.device)))
    return tuple(tiles)


def _height(least: int, group: int) -> int:
    return max(least, triton.next_power_of_2(group))


def _cut_chunks(batch: AttentionBatch, tile_rows: int) -> np.ndarray:
    """int32 [num_tiles, 2]: (sequence, first row), those that see most first, so that the last to start are short."""
    lengths = np.diff(batch.host_query_starts)[batch.num_decodes :]
    counts = -(-lengths // tile_rows)
    chunk = np.repeat(np.arange(len(lengths)), counts)
    first = (np.arange(len(chunk)) - np.repeat(np.cumsum(counts) - counts, counts)) * tile_rows
    seen = np.asarray(batch.host_context_lens)[batch.num_decodes :][chunk] - lengths[chunk] + first
    places = np.stack([chunk + batch.num_decodes, first], axis=1)
    return places[np.argsort(-seen, kind="stable")].astype(np.int32)


def _upload(places: np.ndarray, device: torch.device) -> Tensor:
    host = torch.from_numpy(places)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def write_kv(kv: Tensor, key: Tensor, value: Tensor, batch: AttentionBatch) -> None:
    """See `Backend.write_kv`."""
    num_rows, kv_heads, head_dim = key.shape
    width = kv_heads * head_dim
    write_kernel[(num_rows,)](
        kv,
        key,
        value,
        batch.kv_slots,
        kv.stride(0),
        kv.stride(1),
        key.stride(0),
        value.stride(0),
        BLOCK_SIZE=kv.shape[2],
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
        num_warps=4,
    )


def attend(
    out: Tensor, query: Tensor, kv: Tensor, batch: AttentionBatch, tiles: QueryTiles, scale: float, window: int | None
) -> None:
    """Fills the rows of `out` that the tiles cover. Shapes as in `Backend.attention`."""
    _, heads, head_dim = query.shape
    _, _, block_size, kv_heads, _ = kv.shape
    attention_kernel[(tiles.count, kv_heads)](
        out,
        query,
        kv,
        batch.query_starts,
        batch.context_lens,
        batch.block_tables,
        batch.query_starts if tiles.places is None else tiles.places,
        scale * LOG2_E,
        window or 0,
        query.stride(0),
        out.stride(0),
        kv.stride(0),
        kv.stride(1),
        batch.block_tables.stride(0),
        DECODE=tiles.places is None,
        HAS_WINDOW=window is not None,
        GROUP=heads // kv_heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        BLOCK_M=tiles.height,
        **tuning(head_dim, tiles.height),
    )


def tuning(head_dim: int, height: int) -> dict[str, int]:
    """Block sizes, warps and stages of `attention_kernel` that compile without spilling on sm_80 and sm_90.

    Pages are read through the block table, which takes two of a pipeline's stages: five are needed to have one block
    of K and V on its way while another is used. Tall tiles hide the wait by computing.
    """
    block_d = max(16, triton.next_power_of_2(head_dim))
    tall = height >= PREFILL_HEIGHT
    return {
        "BLOCK_D": block_d,
        "BLOCK_N": 32 if block_d > 128 or (tall and block_d > 64) else 64,
        "num_warps": 8 if tall and block_d > 64 else 4,
        "num_stages": 3 if tall else 5,
    }


@triton.jit
def write_kernel(
    kv_ptr,
    key_ptr,
    value_ptr,
    slots_ptr,
    page_stride,
    side_stride,
    key_stride,
    value_stride,
    BLOCK_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copies K and V of one row to its slot."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    column = tl.arange(0, BLOCK)
    mask = column < WIDTH
    place = kv_ptr + slot // BLOCK_SIZE * page_stride + slot % BLOCK_SIZE * WIDTH + column
    tl.store(place, tl.load(key_ptr + row * key_stride + column, mask=mask), mask=mask)
    tl.store(place + side_stride, tl.load(value_ptr + row * value_stride + column, mask=mask), mask=mask)


@triton.jit(do_not_specialize=["window"])
def attention_kernel(
    out_ptr,
    query_ptr,
    kv_ptr,
    query_starts_ptr,
    context_lens_ptr,
    tables_ptr,
    places_ptr,
    scale,
    window,
    query_stride,
    out_stride,
    page_stride,
    side_stride,
    table_stride,
    DECODE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Attention of one (tile of query rows, KV head). `scale` is for base-2 exponentials."""
    kv_head = tl.program_id(1)
    if DECODE:
        sequence = tl.program_id(0)
        first = 0
        start = sequence
        length = 1
    else:
        sequence = tl.load(places_ptr + tl.program_id(0) * 2)
        first = tl.load(places_ptr + tl.program_id(0) * 2 + 1)
        start = tl.load(query_starts_ptr + sequence)
        length = tl.load(query_starts_ptr + sequence + 1) - start
    context = tl.load(context_lens_ptr + sequence)

    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    token = first + m // GROUP
    position = context - length + token
    row_mask = ((m < BLOCK_M // GROUP * GROUP) & (token < length))[:, None] & (d < HEAD_DIM)[None, :]
    place = (start + token).to(tl.int64)[:, None]
    column = ((kv_head * GROUP + m % GROUP) * HEAD_DIM)[:, None] + d[None, :]
    query = tl.load(query_ptr + place * query_stride + column, mask=row_mask, other=0.0)

    end = tl.minimum(context, context - length + first + BLOCK_M // GROUP)
    begin = 0
    if HAS_WINDOW:
        begin = tl.maximum(context - length + first - window + 1, 0) // BLOCK_N * BLOCK_N
    peak = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    norm = tl.zeros((BLOCK_M,), dtype=tl.float32)
    total = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    table_ptr = tables_ptr + sequence.to(tl.int64) * table_stride
    for block in range(begin, end, BLOCK_N):
        n = block + tl.arange(0, BLOCK_N)
        inside = n < end
        page = tl.load(table_ptr + n // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        token_ptr = kv_ptr + page * page_stride + (n % BLOCK_SIZE * KV_HEADS + kv_head) * HEAD_DIM
        key = tl.load(token_ptr[None, :] + d[:, None], mask=inside[None, :] & (d < HEAD_DIM)[:, None], other=0.0)
        scores = tl.dot(query, key, input_precision="ieee") * scale
        visible = n[None, :] <= position[:, None]
        if HAS_WINDOW:
            visible &= n[None, :] > position[:, None] - window
        scores = tl.where(visible, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        # A row whose window begins after this block has seen nothing yet: keep -inf - -inf out of the exponent.
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp2(scores - shift[:, None])
        fade = tl.exp2(peak - shift)
        norm = norm * fade + tl.sum(weights, 1)
        value_ptr = token_ptr + side_stride
        value = tl.load(value_ptr[:, None] + d[None, :], mask=inside[:, None] & (d < HEAD_DIM)[None, :], other=0.0)
        total = tl.dot(weights.to(value.dtype), value, total * fade[:, None], input_precision="ieee")
        peak = new_peak
    result = total / norm[:, None]
    tl.store(out_ptr + place * out_stride + column, result.to(query.dtype), mask=row_mask)
