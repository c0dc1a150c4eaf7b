"""Cuts the chunks of a step into tiles of query rows, and long contexts of short chunks into splits, on the device,
once per step and window. Both depend only on a chunk and its own context."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from lora_kernels.backend import AttentionBatch
from lora_kernels.gpu.launch import with_constants
from lora_kernels.gpu.triton_context import MIN_DOT, AttentionCall, seqs_width
from lora_kernels.gpu.triton_partials import Partials, make_partials
from lora_kernels.tuning import require_power_of_two

ITEM = tl.constexpr(6)
"""int32 numbers of a work item."""
BLOCK = 128
"""Work items, or rows, that a program writes at once."""


@dataclass(frozen=True, slots=True)
class PrefillTuning:
    """Parameters that an autotuner may vary. The first five decide a result's bits, so an engine keeps them for life.
    Raises ValueError if `block_m`, `block_n` or `max_splits` is not a power of two."""

    block_m: int = 128
    """Minimum number of (row, head of the group) pairs of a tile, a power of two; see `height`."""
    block_n: int = 64
    """Tokens that a program reads at once, a power of two."""
    fill: int = 264
    """Number of programs that fill the GPU; a chunk that makes fewer is split into up to this many."""
    split_tokens: int = 2048
    """Minimum tokens of every split but the last, rounded up to `block_n`."""
    max_splits: int = 16
    """Maximum splits of a tile's context, a power of two."""
    num_warps: int = 8
    num_stages: int = 3
    """`num_warps` and `num_stages`: launch options."""
    programs: int = 264
    """Number of programs launched, as many as fit on the device at the same time."""

    def __post_init__(self) -> None:
        for name in ("block_m", "block_n", "max_splits"):
            require_power_of_two(name, getattr(self, name))

    def height(self, group: int) -> int:
        """Return the (row, head) pairs of a tile, a power of two, at least one query row of `group` heads."""
        return max(self.block_m, MIN_DOT, triton.next_power_of_2(group))

    def tile_rows(self, group: int) -> int:
        """Return the query rows of a tile."""
        return self.height(group) // group


@dataclass(frozen=True, slots=True)
class PrefillRoom:
    """Upper bounds of a plan's size."""

    items: int
    """Work items."""
    rows: int
    """Query rows whose context may be split."""
    parts: int
    """Parts of these rows (`Partials`), one for each split of each row."""


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """The work items of a step's chunks, for layers with the same window. Made once per step."""

    items: Tensor
    """int32 [room for items, 6]. (sequence, tile's first query row in its chunk, first token, token after the last,
    part of the tile's first row, distance to the next row's part); the part is -1 where the tile is not split. An item
    without tokens is empty."""
    rows: Tensor
    """int32 [room for rows, 3], the `rows` argument of `merge`."""
    counts: Tensor
    """int32 [2]. Number of items, and of rows that are merged."""
    partials: Partials
    """Memory for the parts. It has none if no tile can be split."""


def plan_prefill(
    batch: AttentionBatch, call: AttentionCall, tuning: PrefillTuning, reserved: Partials | None = None
) -> PrefillPlan:
    """Launch the kernel that cuts the chunks of `batch`, and return the memory that holds the plan.

    Args:
        reserved: memory for the parts, which is used if it is large enough. None means that there is none.
    """
    room, device = _room(batch, call, tuning), batch.query_starts.device
    if reserved is None or len(reserved.totals) < room.parts:
        reserved = make_partials(room.parts, call.query.shape[1], call.query.shape[2], device)
    plan = PrefillPlan(
        items=torch.empty(room.items, ITEM.value, dtype=torch.int32, device=device),
        rows=torch.empty(room.rows, 3, dtype=torch.int32, device=device),
        counts=torch.empty(2, dtype=torch.int32, device=device),
        partials=reserved,
    )
    num_seqs = len(batch.context_lens)
    kernel = with_constants(plan_kernel, **plan_constants(num_seqs, call, tuning), num_warps=1)
    sizes = (call.window or 0, num_seqs)
    kernel((num_seqs,), plan.items, plan.rows, plan.counts, batch.query_starts, batch.context_lens, *sizes)
    return plan


def plan_constants(num_seqs: int, call: AttentionCall, tuning: PrefillTuning) -> dict[str, int | bool]:
    """Return the compile-time constants of `plan_kernel`."""
    return {
        "HAS_WINDOW": call.window is not None,
        "SEQS": seqs_width(num_seqs),
        "TILE_ROWS": tuning.tile_rows(call.group),
        "BLOCK_N": tuning.block_n,
        "FILL": tuning.fill // call.kv.shape[3],
        "SPLIT_TOKENS": tuning.split_tokens,
        "MAX_SPLITS": tuning.max_splits,
        "BLOCK": BLOCK,
    }


def largest_room(rows: int, num_seqs: int, span: int, group: int, kv_heads: int, tuning: PrefillTuning) -> PrefillRoom:
    """Return upper bounds for the plans of all steps with at most `rows` rows and `num_seqs` sequences in which no tile
    reads more than `span` tokens."""
    tiles = rows // tuning.tile_rows(group) + min(num_seqs, rows // 2)
    splits = max(1, min(tuning.max_splits, tuning.fill // kv_heads, -(-span // tuning.split_tokens)))
    return PrefillRoom(tiles * splits, *((rows, rows * splits) if splits > 1 else (0, 0)))


def _room(batch: AttentionBatch, call: AttentionCall, tuning: PrefillTuning) -> PrefillRoom:
    """Return upper bounds for the plan of a batch, from its lengths on the host, counted as `plan_kernel` counts."""
    span, kv_heads = _longest_span(batch.max_context, call, tuning), call.kv.shape[3]
    if batch.has_any_lengths:
        return largest_room(batch.max_query, len(batch.context_lens), span, call.group, kv_heads, tuning)
    starts, tile_rows, most = batch.host_query_starts, tuning.tile_rows(call.group), tuning.fill // kv_heads
    items = rows = parts = 0
    for sequence in range(batch.num_decodes, len(batch.host_context_lens)):
        length = starts[sequence + 1] - starts[sequence]
        tiles = -(-length // tile_rows)
        wanted = min(max(most // tiles, 1), tuning.max_splits)
        splits = min(wanted, -(-min(batch.host_context_lens[sequence], span) // tuning.split_tokens))
        items += tiles * splits
        rows, parts = (rows + length, parts + length * splits) if splits > 1 else (rows, parts)
    return PrefillRoom(items, rows, parts)


def _longest_span(max_context: int, call: AttentionCall, tuning: PrefillTuning) -> int:
    """Return an upper bound of the tokens that a tile reads: with a window, those that its first or its last row sees,
    and the rest of the block in which the window begins."""
    if call.window is None:
        return max_context
    return min(max_context, call.window + tuning.tile_rows(call.group) + tuning.block_n - 2)


@triton.jit
def split_tile(
    tile,
    length,
    context,
    wanted,
    window,
    HAS_WINDOW: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr,
):
    """Return the first token that tile number `tile` of a chunk reads, the token after the last, and the tokens of each
    split, in whole blocks: at most `wanted` splits of at least SPLIT_TOKENS."""
    rows = tl.minimum(length - tile * TILE_ROWS, TILE_ROWS)
    end = context - length + tile * TILE_ROWS + rows
    begin = end * 0
    if HAS_WINDOW:
        begin = tl.maximum(end - rows - window + 1, 0) // BLOCK_N * BLOCK_N
    size = tl.maximum(tl.cdiv(end - begin, wanted), SPLIT_TOKENS)
    return begin, end, tl.cdiv(size, BLOCK_N) * BLOCK_N


@triton.jit(do_not_specialize=["query_starts_ptr", "contexts_ptr", "window", "num_seqs"])
def plan_kernel(
    items_ptr,
    rows_ptr,
    counts_ptr,
    query_starts_ptr,
    contexts_ptr,
    window,
    num_seqs,
    HAS_WINDOW: tl.constexpr,
    SEQS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FILL: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the items and the merged rows of one sequence, none for one row, behind those of sequences that read more,
    so that the last items to start are short. FILL tiles of one KV head fill the GPU."""
    index = tl.arange(0, SEQS)
    here = index < num_seqs
    starts = tl.load(query_starts_ptr + index, mask=here, other=0)
    lengths = tl.load(query_starts_ptr + index + 1, mask=here, other=0) - starts
    spans = tl.load(contexts_ptr + index, mask=here, other=0)
    if HAS_WINDOW:
        spans = tl.minimum(spans, window + TILE_ROWS + BLOCK_N - 2)
    tiles = tl.where(lengths > 1, tl.cdiv(lengths, TILE_ROWS), 0)
    wanted = tl.minimum(tl.maximum(FILL // tl.maximum(tiles, 1), 1), MAX_SPLITS)
    splits = tl.where(tiles > 0, tl.minimum(wanted, tl.cdiv(spans, SPLIT_TOKENS)), 0)
    sequence = tl.program_id(0)
    mine = index == sequence
    my_span = tl.sum(tl.where(mine, spans, 0), 0)
    before = (spans > my_span) | ((spans == my_span) & (index < sequence))
    merged = tl.where(splits > 1, lengths, 0)
    first_item = tl.sum(tl.where(before, tiles * splits, 0), 0)
    first_row = tl.sum(tl.where(before, merged, 0), 0)
    first_part = tl.sum(tl.where(before, merged * splits, 0), 0)
    if sequence == 0:
        tl.store(counts_ptr, tl.sum(tiles * splits, 0))
        tl.store(counts_ptr + 1, tl.sum(merged, 0))

    my_start = tl.sum(tl.where(mine, starts, 0), 0)
    length = tl.sum(tl.where(mine, lengths, 0), 0)
    context = tl.load(contexts_ptr + sequence)
    my_tiles = tl.sum(tl.where(mine, tiles, 0), 0)
    my_wanted = tl.sum(tl.where(mine, wanted, 0), 0)
    my_splits = tl.sum(tl.where(mine, splits, 0), 0)
    for done in range(0, my_tiles * my_splits, BLOCK):
        item = done + tl.arange(0, BLOCK)
        tile = my_tiles - 1 - item // my_splits  # the last tile of a chunk reads most
        begin, end, size = split_tile(
            tile, length, context, my_wanted, window, HAS_WINDOW, TILE_ROWS, BLOCK_N, SPLIT_TOKENS
        )
        split = item % my_splits
        is_split = end - begin > size
        first = tile * TILE_ROWS
        place = items_ptr + (first_item + item) * ITEM
        exists = item < my_tiles * my_splits
        tl.store(place, sequence + item * 0, mask=exists)
        tl.store(place + 1, first, mask=exists)
        tl.store(place + 2, begin + split * size, mask=exists)
        tl.store(place + 3, tl.minimum(begin + (split + 1) * size, end), mask=exists)
        tl.store(place + 4, tl.where(is_split, first_part + first * my_splits + split, -1), mask=exists)
        tl.store(place + 5, my_splits + item * 0, mask=exists)
    for done in range(0, tl.where(my_splits > 1, length, 0), BLOCK):
        row = done + tl.arange(0, BLOCK)
        begin, end, size = split_tile(
            row // TILE_ROWS, length, context, my_wanted, window, HAS_WINDOW, TILE_ROWS, BLOCK_N, SPLIT_TOKENS
        )
        place = rows_ptr + (first_row + row) * 3
        tl.store(place, my_start + row, mask=row < length)
        tl.store(place + 1, first_part + row * my_splits, mask=row < length)
        tl.store(place + 2, tl.cdiv(end - begin, size), mask=row < length)
