"""LoRA in vectorised torch: rows are cut into tiles, and tiles of one shape become batched products.

A tile multiplies each of its rows with all of its adapters and masks out the products with other rows' adapters. The
extra arithmetic is free compared with reading the weights, and it saves most of a small product's fixed cost. A and B
rows are gathered from the arena by index. An index without a row points at offset 0, the null page, which is always
zero.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from lora_kernels.layout import SIDE_A, SIDE_B, LoraTable, ProjectionGroup
from lora_kernels.portable.torch_tiles import IntArray, TileBatch, cut_tiles, row_starts
from lora_kernels.segments import SegmentPlan

MASK_TYPES = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Gather:
    """Copies a layer's weight rows, each `width` numbers, of one tile batch out of the arena.

    Attributes:
        windows: [num_elements - width + 1, width]. A view of the arena whose row i starts at element i.
        starts: one entry per layer, int64 [num_rows]. First element of every row.
        rows: [num_rows, width]. Destination of the gathered rows.
    """

    windows: Tensor
    starts: tuple[Tensor, ...]
    rows: Tensor

    def fill(self, layer: int) -> None:
        torch.index_select(self.windows, 0, self.starts[layer], out=self.rows)


@dataclass(frozen=True, slots=True)
class TargetWeights:
    """The B weights of one projection of a tile batch. `inner` is the number of adapters per tile times the
    largest rank of any in this group; weights of lower ranks are padded with zeros.

    Attributes:
        b: [num_tiles, inner, out_features], a view of the rows that `gather` fills.
        shrunk: [num_tiles, tile_rows, inner], the projection's slice of `TileWeights.shrunk`.
        columns: the projection's slice of the group's output.
    """

    gather: Gather
    b: Tensor
    shrunk: Tensor
    columns: slice


@dataclass(frozen=True, slots=True)
class TileWeights:
    """The weights of a tile batch for one projection group, and its working memory.

    Attributes:
        a: [num_tiles, in_features, targets * inner], a view of the rows that `gather` fills.
        shrunk: [num_tiles, tile_rows, targets * inner]. Products of x with A.
        bits: the memory of `shrunk` as integers.
        own: mask of the shape of `bits`, with all bits set at products of a row with its own adapter and none
            elsewhere, so that a bitwise AND also clears infinities. None means that every tile has one adapter.
    """

    gather: Gather
    a: Tensor
    shrunk: Tensor
    bits: Tensor
    own: Tensor | None
    targets: tuple[TargetWeights, ...]

    def add(self, out: Tensor, x: Tensor, layer: int, touched: tuple[bool, ...]) -> None:
        """Adds B A x to `out` [num_tiles, tile_rows, sum(out_features)], for x [num_tiles, tile_rows, in_features].
        `touched` says for each target whether any adapter touches it in this layer; other targets are skipped."""
        self.gather.fill(layer)
        torch.bmm(x, self.a, out=self.shrunk)
        if self.own is not None:
            self.bits.bitwise_and_(self.own)
        for target, is_touched in zip(self.targets, touched, strict=True):
            if is_touched:
                target.gather.fill(layer)
                out[:, :, target.columns].baddbmm_(target.shrunk, target.b)


@dataclass(frozen=True, slots=True)
class GroupWeights:
    """A projection group's weights, for each tile batch in which an adapter touches the group. `touched`
    [layers][targets] says which projections any adapter of the step touches."""

    batches: tuple[tuple[TileBatch, TileWeights], ...]
    touched: tuple[tuple[bool, ...], ...]


@dataclass(slots=True)
class TiledLora:
    """The LoRA data of one step, which all layers share. `tiles` hold the step's rows; weights are gathered into
    `scratch`. `groups` holds the indices of each projection group's weights, computed when the group is first used."""

    arena: Tensor
    table: LoraTable
    tiles: tuple[TileBatch, ...]
    scratch: Tensor
    groups: dict[ProjectionGroup, GroupWeights] = field(default_factory=dict)

    def add(self, out: Tensor, x: Tensor, layer: int, group: ProjectionGroup) -> None:
        """Adds B A x of each row's own adapter to `out` [num_rows, sum(out_features)] in place: `Backend.add_lora`."""
        weights = self.weights(group)
        touched = weights.touched[layer]
        if not any(touched):
            return
        for tile, batch in weights.batches:
            tile_out = tile.take(out)
            batch.add(tile_out, tile.take(x), layer, touched)
            tile.put_back(out, tile_out)

    def weights(self, group: ProjectionGroup) -> GroupWeights:
        if group not in self.groups:
            self.groups[group] = self._index_group(group)
        return self.groups[group]

    def _index_group(self, group: ProjectionGroup) -> GroupWeights:
        adapter_slots = np.concatenate([tile.adapter_slots[tile.adapter_slots >= 0] for tile in self.tiles])
        ranks = self.table.host_ranks[:, :, group.targets]
        touched = (ranks[adapter_slots] > 0).any(axis=0)
        return GroupWeights(
            batches=tuple(
                (tile, self._index_tiles(tile, group, rank))
                for tile in self.tiles
                if (rank := int(ranks[tile.adapter_slots[tile.adapter_slots >= 0]].max())) > 0
            ),
            touched=tuple(tuple(row) for row in touched.tolist()),
        )

    def _index_tiles(self, tile: TileBatch, group: ProjectionGroup, rank: int) -> TileWeights:
        """Returns where a tile batch's weights of a projection group lie, and allocates its working memory. `rank` is
        the largest rank of the batch's adapters in this group."""
        num_tiles, adapters = tile.adapter_slots.shape
        starts = [row_starts(self.table, tile.adapter_slots, t, SIDE_A, group.in_features, rank) for t in group.targets]
        gather = self._gather(np.stack(starts, axis=2), group.in_features)
        shrunk = self.arena.new_empty(num_tiles, tile.tile_rows, len(group.targets) * adapters * rank)
        bits = shrunk.view(MASK_TYPES[shrunk.element_size()])
        return TileWeights(
            gather=gather,
            a=gather.rows.view(num_tiles, -1, group.in_features).mT,
            shrunk=shrunk,
            bits=bits,
            own=_own_products(tile, rank, bits) if adapters > 1 else None,
            targets=self._index_targets(tile, group, rank, shrunk),
        )

    def _index_targets(
        self, tile: TileBatch, group: ProjectionGroup, rank: int, shrunk: Tensor
    ) -> tuple[TargetWeights, ...]:
        targets = []
        column = 0
        parts = shrunk.chunk(len(group.targets), dim=2)
        for target, features, part in zip(group.targets, group.out_features, parts, strict=True):
            gather = self._gather(row_starts(self.table, tile.adapter_slots, target, SIDE_B, features, rank), features)
            b = gather.rows.view(len(tile.adapter_slots), -1, features)
            targets.append(TargetWeights(gather, b, part, slice(column, column + features)))
            column += features
        return tuple(targets)

    def _gather(self, starts: IntArray, width: int) -> Gather:
        """Returns a `Gather` of rows of `width` numbers that begin at the arena elements `starts` [layers, ...].
        Gathers share one scratch buffer, so that it stays in cache; a larger one replaces it where it is too small."""
        by_layer = torch.from_numpy(starts.reshape(len(starts), -1)).unbind(0)
        size = by_layer[0].numel() * width
        if self.scratch.numel() < size:
            self.scratch = self.arena.new_empty(size)
        windows = self.arena.as_strided((self.arena.numel() - width + 1, width), (1, 1))
        return Gather(windows, by_layer, self.scratch[:size].view(-1, width))


def prepare(arena: Tensor, table: LoraTable, plan: SegmentPlan) -> TiledLora | None:
    """Returns the LoRA data of one step, or None if no row has an adapter with a rank above 0."""
    tiles = cut_tiles(table, plan)
    return TiledLora(arena, table, tiles, scratch=arena.new_empty(0)) if tiles else None


def _own_products(tile: TileBatch, rank: int, bits: Tensor) -> Tensor:
    """Returns the mask `TileWeights.own`, of the shape and dtype of `bits`: all bits set where a column is the product
    of the row with its own adapter, else 0. An adapter has `rank` adjacent columns in each target."""
    adapters = tile.adapter_slots.shape[1]
    of_column = np.arange(bits.shape[2]) // rank % adapters
    return -torch.from_numpy(tile.owners[:, :, None] == of_column).to(bits.dtype)
