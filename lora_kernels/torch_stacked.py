"""LoRA in dense torch, for few adapters at a time: their weights stacked side by side, and kept from step to step.

Every row is multiplied with every adapter of the stack, and what is not its own is masked out in between. That is
arithmetic for nothing, but two large products a projection group instead of many small ones, and no weight is gathered
while the adapters in use stay the same. Measured on four AVX512-BF16 cores, 135M model, 32 decode rows, 8 adapters of
rank 8 on all projections: a whole step takes 61 ms, 74 with tiles (torch_lora.py), and 47 without adapters.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lora_kernels import torch_lora
from lora_kernels.layout import SIDE_A, SIDE_B, LoraTable, ProjectionGroup
from lora_kernels.linear import Linear, make_linear
from lora_kernels.segments import SegmentPlan
from lora_kernels.torch_tiles import row_starts

MAX_INNER = 128
"""Ranks of all adapters together. Beyond it the arithmetic for nothing outweighs what it saves."""
MAX_GROUP_BYTES = 128 << 20
"""Of one projection group's stack, all layers together. A larger group is served by tiles, which keep nothing."""
MAX_SLACK = 2
"""A stack may be this many times as wide as the adapters in use: they come and go, and stacking again costs a step."""

MASK_TYPES = {2: torch.int16, 4: torch.int32}


@dataclass(frozen=True, slots=True)
class GroupStack:
    """One projection group's weights, a layer each; None where no adapter touches the layer.

    Attributes:
        a: in_features -> targets * inner.
        b: targets * inner -> sum(out_features), block-diagonal over targets.
    """

    a: tuple[Linear | None, ...]
    b: tuple[Linear | None, ...]


@dataclass(slots=True)
class Stack:
    """Weights of some adapters, gathered when a projection group is first met.

    Attributes:
        slots: int32 [num_adapters], ascending.
        versions: int64 [num_adapters]. Of the table's slots when the stack was made.
        ranks: int32 [num_adapters]. The largest of each adapter; `inner` is their sum.
    """

    arena: Tensor
    table: LoraTable
    slots: npt.NDArray[np.int32]
    versions: npt.NDArray[np.int64]
    ranks: npt.NDArray[np.int32]
    groups: dict[ProjectionGroup, GroupStack] = field(default_factory=dict)

    @property
    def inner(self) -> int:
        return int(self.ranks.sum())

    @property
    def owners(self) -> npt.NDArray[np.int32]:
        """int32 [inner]. Slot of the adapter that each column belongs to."""
        return np.repeat(self.slots, self.ranks)

    def serves(self, arena: Tensor, table: LoraTable, slots: npt.NDArray[np.int32]) -> bool:
        """Whether the stack holds what these slots hold now, and not much else."""
        if self.table is not table or self.arena.data_ptr() != arena.data_ptr():
            return False
        if not np.isin(slots, self.slots).all() or (table.versions[self.slots] != self.versions).any():
            return False
        return self.inner <= MAX_SLACK * int(self.ranks[np.isin(self.slots, slots)].sum())

    def fits(self, group: ProjectionGroup) -> bool:
        elements = self.inner * len(group.targets) * (group.in_features + sum(group.out_features))
        return elements * self.arena.element_size() * self.table.host_ranks.shape[1] <= MAX_GROUP_BYTES

    def group(self, group: ProjectionGroup) -> GroupStack:
        if group not in self.groups:
            self.groups[group] = self._gather(group)
        return self.groups[group]

    def _gather(self, group: ProjectionGroup) -> GroupStack:
        ranks: npt.NDArray[np.int32] = self.table.host_ranks[self.slots]
        a_starts = [self._starts(target, SIDE_A, group.in_features) for target in group.targets]
        b_widths = tuple(zip(group.targets, group.out_features, strict=True))
        b_starts = [self._starts(target, SIDE_B, width) for target, width in b_widths]
        a: list[Linear | None] = []
        b: list[Linear | None] = []
        for layer, touched in enumerate(np.any(ranks[:, :, group.targets] > 0, axis=(0, 2)).tolist()):
            rows = [self._rows(starts[layer], group.in_features) for starts in a_starts]
            blocks = [
                self._rows(starts[layer], width) for starts, width in zip(b_starts, group.out_features, strict=True)
            ]
            a.append(make_linear(torch.cat(rows)) if touched else None)
            b.append(make_linear(torch.block_diag(*blocks).T.contiguous()) if touched else None)
        return GroupStack(tuple(a), tuple(b))

    def _starts(self, target: int, side: int, width: int) -> Tensor:
        """int64 [layers, inner]. First element of every row; 0, which is zeros, where an adapter has fewer rows."""
        largest = int(self.ranks.max())
        slots = self.slots[None].astype(np.int64)
        starts: npt.NDArray[np.int64] = row_starts(self.table, slots, target, side, width, largest)[:, 0]
        present = np.arange(largest) < self.ranks[:, None]
        return torch.from_numpy(np.ascontiguousarray(starts[:, present]))

    def _rows(self, starts: Tensor, width: int) -> Tensor:
        """[inner, width]"""
        return self.arena.as_strided((self.arena.numel() - width + 1, width), (1, 1)).index_select(0, starts)


@dataclass(slots=True)
class PreparedStack:
    """A stack and the rows of one step."""

    stack: Stack
    plan: SegmentPlan
    masks: dict[int, Tensor] = field(default_factory=dict)
    """Number of targets -> mask, for steps of `mask_rows` rows."""
    mask_rows: int = -1
    tiles: torch_lora.PreparedLora | None = None

    def add(self, out: Tensor, x: Tensor, layer: int, group: ProjectionGroup) -> None:
        """See `Backend.add_lora`."""
        if not self.stack.fits(group):
            self._add_tiles(out, x, layer, group)
            return
        weights = self.stack.group(group)
        a, b = weights.a[layer], weights.b[layer]
        if a is None or b is None:
            return
        shrunk = a(x)
        shrunk.view(MASK_TYPES[x.element_size()]).bitwise_and_(self._mask(x, len(group.targets)))
        out += b(shrunk)

    def _add_tiles(self, out: Tensor, x: Tensor, layer: int, group: ProjectionGroup) -> None:
        if self.tiles is None:
            self.tiles = torch_lora.prepare(self.stack.arena, self.stack.table, self.plan)
        if self.tiles is not None:
            self.tiles.add(out, x, layer, group)

    def _mask(self, x: Tensor, targets: int) -> Tensor:
        """[num_rows, targets * inner]. All ones in binary at a row's own columns, else 0: silences infinities too."""
        if len(x) != self.mask_rows:  # the same plan, with more or fewer rows after the last one that has an adapter
            self.masks.clear()
            self.mask_rows = len(x)
        if targets not in self.masks:
            row_slots = np.full(len(x), -1, dtype=np.int32)
            row_slots[self.plan.rows] = np.repeat(self.plan.slots, self.plan.lengths)
            own = torch.from_numpy(row_slots[:, None] == np.tile(self.stack.owners, targets))
            self.masks[targets] = -own.to(MASK_TYPES[x.element_size()])
        return self.masks[targets]


def make_stack(
    arena: Tensor, table: LoraTable, slots: npt.NDArray[np.int32], max_inner: int = MAX_INNER
) -> Stack | None:
    """None if the ranks of these adapters are together above `max_inner`, or all 0."""
    ranks = table.host_ranks[slots].max(axis=(1, 2), initial=0)
    if not 0 < ranks.sum() <= max_inner:
        return None
    return Stack(arena, table, slots, table.versions[slots], ranks)


def worth_it(plan: SegmentPlan) -> bool:
    """Whether most rows have an adapter; the others would be multiplied for nothing."""
    return 2 * len(plan.rows) > int(plan.rows.max(initial=0)) + 1
