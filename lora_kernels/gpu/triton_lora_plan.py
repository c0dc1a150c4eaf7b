"""Plans the LoRA kernels of a step as lists of tiles: a *row tile* is some rows of a segment, a *shrink tile* also some
ranks. Long segments have larger tiles. With a workspace, launches fit a CUDA graph."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lora_kernels import pinned
from lora_kernels.gpu.triton_lora_tuning import SHIPPED, LoraTuning
from lora_kernels.layout import MAX_RANK, RANK_TILE, LoraTable
from lora_kernels.segments import SegmentPlan

Int32Array = npt.NDArray[np.int32]

MAX_PARTS = 24
"""Maximum number of sums per row and rank: three projections that share an input, in eight parts each."""
NO_TILES: Int32Array = np.empty((0, 4), dtype=np.int32)
COUNT = 4
"""Header numbers per list: its number of tiles, and padding that aligns the next count to 16 bytes."""
HEADER = 4 * COUNT
"""Size of the header, in numbers, before the rows and the lists: the counts in the order of `TileLists`."""
MAX_PROGRAMS = 65535
"""Maximum size of a launch's second axis. Programs walk over the tiles beyond it."""


@dataclass(frozen=True, slots=True)
class TileList:
    """A list of tiles that kernels walk."""

    tiles: Tensor
    """int32 [capacity, 4] on the device. (adapter slot, first index into the rows, number of rows, first rank)."""
    count: Tensor
    """int32 [1] on the device. Number of tiles in the list."""
    programs: int
    """Maximum number of tiles, and of programs that a launch has along the list; 0 means that nothing is launched."""


@dataclass(frozen=True, slots=True)
class TileLists:
    """The row and shrink tiles of short segments, and those of long segments."""

    rows: TileList
    shrink: TileList
    long_rows: TileList
    long_shrink: TileList


@dataclass(frozen=True, slots=True)
class TritonLora:
    """The LoRA data of one step, or of one recorded launch sequence, which all layers share."""

    arena: Tensor
    """flat, in the model's dtype."""
    table: LoraTable
    rows: Tensor
    """int32 [max_rows] on the device. Batch rows sorted by adapter."""
    lists: TileLists
    sums: Tensor
    """fp32 [parts, max_rows, max_rank] on the device. Results of shrink, which expand reads."""
    tuning: LoraTuning


class LoraWorkspace:
    """Device memory at fixed addresses, for launches that are recorded once and replayed.

    Args:
        max_rows, max_rank: of the largest step that the workspace serves.
        max_segments: of a step with prompts. None means a decode-only step, in which no segment is long.
        parts: largest product of `LoraTuning.num_splits` and number of targets of any projection group.
        meta: int32 [workspace_numbers(max_rows, max_rank)], aligned to 16 bytes. None means that it is allocated.
        sums: fp32 [parts, at least max_rows, max_rank], which other workspaces may use between steps. None as for
            `meta`.
    """

    def __init__(
        self,
        max_rows: int,
        device: torch.device,
        max_rank: int = MAX_RANK,
        parts: int = MAX_PARTS,
        meta: Tensor | None = None,
        sums: Tensor | None = None,
        max_segments: int | None = None,
        tuning: LoraTuning = SHIPPED,
    ) -> None:
        self.max_rows, self.max_rank = max_rows, round_up(max_rank, RANK_TILE)
        self.long_from = max_rows + 1 if max_segments is None else tuning.long_from
        self.capacities = _capacities(max_rows, self.max_rank, max_segments, tuning)
        self.sections = list_sections(max_rows, self.capacities)
        self.meta = torch.zeros(self.sections[-1], dtype=torch.int32, device=device) if meta is None else meta
        self.sums = make_sums(max_rows, device, self.max_rank, parts) if sums is None else sums

    def fill(self, host: Int32Array, table: LoraTable, plan: SegmentPlan, tuning: LoraTuning = SHIPPED) -> int:
        """Write a step's counts, rows and tile lists into `host`, int32 memory laid out like `meta`. Return how many
        leading numbers to copy to `meta`. Raises ValueError for more rows or a larger rank than the workspace
        serves."""
        ranks = table.max_ranks[plan.adapter_slots]
        if len(plan.rows) > self.max_rows or ranks.max(initial=0) > self.max_rank:
            raise ValueError(f"{len(plan.rows)} rows of rank {ranks.max(initial=0)} do not fit this workspace")
        lists = _cut(plan, ranks, tuning, self.long_from)
        return _write(host, self.sections, plan.rows, lists)


def make_sums(max_rows: int, device: torch.device, max_rank: int = MAX_RANK, parts: int = MAX_PARTS) -> Tensor:
    """Allocate the `sums` of a `LoraWorkspace`: uninitialised fp32 [parts, max_rows, max_rank rounded up to 16]."""
    return torch.empty((parts, max_rows, round_up(max_rank, RANK_TILE)), dtype=torch.float32, device=device)


def workspace_numbers(
    max_rows: int, max_rank: int = MAX_RANK, max_segments: int | None = None, tuning: LoraTuning = SHIPPED
) -> int:
    """Return the size of `LoraWorkspace.meta` in int32 numbers, a multiple of four."""
    return list_sections(max_rows, _capacities(max_rows, round_up(max_rank, RANK_TILE), max_segments, tuning))[-1]


def prepare(arena: Tensor, table: LoraTable, plan: SegmentPlan, tuning: LoraTuning = SHIPPED) -> TritonLora | None:
    """Return the LoRA data of one step whose launches are not recorded, or None if no row has an adapter with a rank
    above 0. Makes one upload and does not wait for it."""
    ranks = table.max_ranks[plan.adapter_slots]
    if not ranks.any():
        return None
    lists = _cut(plan, ranks, tuning, tuning.long_from)
    counts = tuple(len(tiles) for tiles in lists)
    sections = list_sections(len(plan.rows), counts)
    host = np.empty(sections[-1], dtype=np.int32)
    _write(host, sections, plan.rows, lists)
    meta = pinned.upload(host, arena.device)
    max_rank = round_up(int(ranks.max()), RANK_TILE)
    sums = torch.empty((MAX_PARTS, len(plan.rows), max_rank), dtype=torch.float32, device=arena.device)
    rows = meta[HEADER : HEADER + len(plan.rows)]
    return TritonLora(arena, table, rows, tile_lists(meta, sections, counts), sums, tuning)


def record(
    arena: Tensor,
    table: LoraTable,
    workspace: LoraWorkspace,
    num_rows: int,
    tuning: LoraTuning = SHIPPED,
    has_long: bool = False,
) -> TritonLora:
    """Return LoRA data for launches that are recorded once. They serve any step of up to `num_rows` rows whose lists
    have been copied into the workspace (`LoraWorkspace.fill`), and which has long segments only if `has_long`."""
    tiles = min(num_rows, workspace.capacities[0])
    shrink = tiles * workspace.max_rank // RANK_TILE
    programs = (tiles, shrink, *(workspace.capacities[2:] if has_long else (0, 0)))
    rows = workspace.meta[HEADER : HEADER + workspace.max_rows]
    lists = tile_lists(workspace.meta, workspace.sections, programs)
    return TritonLora(arena, table, rows, lists, workspace.sums, tuning)


def _cut(
    plan: SegmentPlan, ranks: Int32Array, tuning: LoraTuning, long_from: int
) -> tuple[Int32Array, Int32Array, Int32Array, Int32Array]:
    """Return the tiles of each list, int32 [num_tiles, 4], in the order of `TileLists`. Segments of at least
    `long_from` rows are long; those whose adapter has rank 0 have no tiles. `ranks` is each segment's largest rank."""
    long = plan.lengths >= long_from
    if not long.any():
        return *_cut_tiles(plan, ranks, tuning.tile_rows, RANK_TILE), NO_TILES, NO_TILES
    short = _cut_tiles(plan, np.where(long, 0, ranks), tuning.tile_rows, RANK_TILE)
    return *short, *_cut_tiles(plan, np.where(long, ranks, 0), tuning.long_rows, tuning.long_ranks)


def _cut_tiles(plan: SegmentPlan, ranks: Int32Array, tile_rows: int, tile_ranks: int) -> tuple[Int32Array, Int32Array]:
    """Return the row tiles of segments with a rank, and the shrink tiles that cover all ranks of each row tile, both
    int32 [num_tiles, 4] as in `TileList`. Adapters with the highest ranks come first."""
    order = np.argsort(-ranks, kind="stable")[: int(np.count_nonzero(ranks))]
    counts = -(-np.diff(plan.starts)[order] // tile_rows)
    segment = np.repeat(order, counts)
    first = plan.starts[segment] + _within(counts) * tile_rows
    row_tiles = np.zeros((len(segment), 4), dtype=np.int32)
    row_tiles[:, 0] = plan.adapter_slots[segment]
    row_tiles[:, 1] = first
    row_tiles[:, 2] = np.minimum(plan.starts[segment + 1] - first, tile_rows)
    counts = -(-ranks[segment] // tile_ranks)
    shrink_tiles = np.repeat(row_tiles, counts, axis=0)
    shrink_tiles[:, 3] = _within(counts) * tile_ranks
    return row_tiles, shrink_tiles


def _within(counts: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Return 0, 1, ... count - 1 for each count, concatenated."""
    return np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)


def _capacities(
    max_rows: int, max_rank: int, max_segments: int | None, tuning: LoraTuning
) -> tuple[int, int, int, int]:
    """Return the largest possible number of tiles in each list of a workspace: see `LoraWorkspace`. At most, each
    segment has one tile that is not full, and every tile has all ranks."""
    segments = max_rows if max_segments is None else max_segments
    tiles = min(max_rows, segments + max_rows // tuning.tile_rows)
    long = 0
    if max_segments is not None and max_rows >= tuning.long_from:
        long = min(segments, max_rows // tuning.long_from) + max_rows // tuning.long_rows
    return tiles, tiles * max_rank // RANK_TILE, long, long * -(-max_rank // tuning.long_ranks)


def list_sections(max_rows: int, capacities: tuple[int, ...]) -> tuple[int, ...]:
    """Return the indices, in int32 numbers, at which the rows and then each list begin after the header, and at which
    the last list ends. They are multiples of four, 16 bytes."""
    first_list = HEADER + round_up(max_rows, 4)
    return (HEADER, *(first_list + 4 * tiles for tiles in itertools.accumulate(capacities, initial=0)))


def _write(host: Int32Array, sections: tuple[int, ...], rows: Int32Array, lists: tuple[Int32Array, ...]) -> int:
    """Write header, rows and lists into their sections. Return the index after the last number that is used."""
    host[:HEADER:COUNT] = [len(tiles) for tiles in lists]
    end = HEADER
    for start, part in zip(sections, (rows, *lists), strict=False):
        if part.size:
            end = start + part.size
            host[start:end] = part.reshape(-1)
    return end


def tile_lists(meta: Tensor, sections: tuple[int, ...], programs: tuple[int, ...]) -> TileLists:
    """Return the lists in `meta`, whose sections begin at `sections` (see `list_sections`), for launches of up to so
    many `programs` for each list."""
    counts = meta[:HEADER].split(COUNT)
    spans = itertools.pairwise(sections[1:])
    return TileLists(
        *(
            TileList(meta[start:stop].view(-1, 4), count[:1], min(most, MAX_PROGRAMS))
            for (start, stop), count, most in zip(spans, counts, programs, strict=True)
        )
    )


def round_up(number: int, unit: int) -> int:
    """Return the smallest multiple of `unit` that is not below `number`."""
    return -(-number // unit) * unit
