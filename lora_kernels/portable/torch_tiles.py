"""Cuts rows into tiles for the torch backend, and computes where the weights of a tile lie.

A *tile* is a few rows and the adapters they use. Short segments share tiles; long segments are cut into tiles of one
adapter each.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lora_kernels.layout import ALIGN, RANK_TILE, LoraTable
from lora_kernels.segments import SegmentPlan

SHARED_ROWS = 4
"""Rows of a tile of short segments, and the length of the longest segment that shares a tile. 4 measured best."""
MAX_ROWS = (SHARED_ROWS, 16, 64)
"""Maximum rows of a tile, for each class of segment length. Segments longer than the last are cut evenly."""
RANK_CLASSES = (16, 64, 256)
"""Upper bounds of the rank classes. Adapters are padded to the largest rank present within their class."""

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TileBatch:
    """Tiles of one shape.

    Attributes:
        adapter_slots: int64 [num_tiles, adapters]. Adapter slots of each tile; -1 is padding.
        owners: int64 [num_tiles, tile_rows]. Index of the row's adapter among the tile's adapters.
        span: the batch rows of the tiles, if they are consecutive and in order; otherwise None.
        rows: int64 [num_tiles * tile_rows]. Batch row of each tile row; an arbitrary batch row for padding.
        used_rows: int64 [num_used]. Batch rows of the tile rows that are not padding.
        used: int64 [num_used]. Indices of the tile rows that are not padding. None means all of them.
    """

    adapter_slots: IntArray
    owners: IntArray
    span: slice | None
    rows: Tensor
    used_rows: Tensor
    used: Tensor | None

    @property
    def tile_rows(self) -> int:
        return self.owners.shape[1]

    def take(self, batch: Tensor) -> Tensor:
        """Takes the tiles' rows from `batch` [num_rows, width]. Returns [num_tiles, tile_rows, width], which is a view
        if `span` is set and a copy otherwise."""
        rows = batch[self.span] if self.span else batch.index_select(0, self.rows)
        return rows.view(*self.owners.shape, -1)

    def put_back(self, batch: Tensor, tiles: Tensor) -> None:
        """Writes `tiles`, which `take` returned and the caller modified, to their rows of `batch`, without padding.
        Does nothing if they are a view of `batch`."""
        if self.span is None:
            rows = tiles.flatten(0, 1)
            batch.index_copy_(0, self.used_rows, rows if self.used is None else rows.index_select(0, self.used))


def cut_tiles(table: LoraTable, plan: SegmentPlan) -> tuple[TileBatch, ...]:
    """Groups segments into classes by length and rank, and cuts each class into tiles of its own shape.

    Adapters of rank 0 are left out. Segments are ordered by their first row, so that tiles are consecutive rows where
    every row has its own adapter.
    """
    ranks = table.host_ranks[plan.adapter_slots].max(axis=(1, 2), initial=0)
    length_class = np.searchsorted(MAX_ROWS[:-1], plan.lengths)
    rank_class = np.searchsorted(RANK_CLASSES, ranks)
    order = np.argsort(plan.rows[plan.starts[:-1]])
    tiles = []
    for tile_class, max_rows in enumerate(MAX_ROWS):
        for rank in range(len(RANK_CLASSES)):
            chosen = (length_class == tile_class) & (rank_class == rank) & (ranks > 0)
            if chosen.any():
                tiles.append(_cut_class(plan, order[chosen[order]], max_rows))
    return tuple(tiles)


def _cut_class(plan: SegmentPlan, segments: npt.NDArray[np.intp], max_rows: int) -> TileBatch:
    lengths = plan.lengths[segments].astype(np.int64)
    firsts = np.cumsum(lengths) - lengths
    segment = np.repeat(np.arange(len(segments)), lengths)
    index = np.arange(len(segment))
    if max_rows == SHARED_ROWS:
        tile_rows = max_rows
        position = index
        owner = segment - segment[index // tile_rows * tile_rows]
    else:
        tile_rows = int((-(-lengths // -(-lengths // max_rows))).max())
        counts = -(-lengths // tile_rows)
        position = index + np.repeat((np.cumsum(counts) - counts) * tile_rows - firsts, lengths)
        owner = np.zeros_like(segment)
    used_rows = plan.rows[index + np.repeat(plan.starts[segments] - firsts, lengths)].astype(np.int64)
    num_tiles = int(position[-1]) // tile_rows + 1
    rows = np.full(num_tiles * tile_rows, used_rows[0])
    owners = np.zeros_like(rows)
    rows[position] = used_rows
    owners[position] = owner
    adapter_slots = np.full((num_tiles, int(owner.max()) + 1), -1, dtype=np.int64)
    adapter_slots[position // tile_rows, owner] = plan.adapter_slots[segments][segment]
    return TileBatch(
        adapter_slots=adapter_slots,
        owners=owners.reshape(num_tiles, tile_rows),
        span=slice(rows[0], rows[0] + len(rows)) if np.all(np.diff(rows) == 1) else None,
        rows=torch.from_numpy(rows),
        used_rows=torch.from_numpy(used_rows),
        used=None if len(used_rows) == len(rows) else torch.from_numpy(position),
    )


def row_starts(table: LoraTable, adapter_slots: IntArray, target: int, side: int, width: int, rank: int) -> IntArray:
    """Returns the arena elements at which the rows (`width` numbers) of A or B blocks (`side`) begin, at one target.

    The result is int64 [layers, num_tiles, adapters, rank]; 0 for rows beyond a block's rank and for slot -1.
    """
    row = np.arange(rank)
    tile_starts = table.host_offsets[adapter_slots, :, target, side].astype(np.int64) * ALIGN
    starts = tile_starts[..., row // RANK_TILE] + row % RANK_TILE * width
    present = (row < table.host_ranks[adapter_slots, :, target][..., None]) & (adapter_slots >= 0)[:, :, None, None]
    return np.where(present, starts, 0).transpose(2, 0, 1, 3)
