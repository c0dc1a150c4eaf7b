"""LoRA in dense torch for few adapters at a time: their weights are stacked side by side and kept from step to step.

Every row is multiplied with every adapter of the stack, and between shrink and expand the products with other adapters
are masked out. This wastes arithmetic, but needs two large products per projection group instead of many small ones,
and gathers no weights while the adapters in use stay the same. Measured on four AVX512-BF16 cores with a 135M model, 32
decode rows and 8 adapters of rank 8, a whole step takes 61 ms, with tiles (torch_lora.py) 74 ms, without adapters 47.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lora_kernels.layout import SIDE_A, SIDE_B, LoraTable, ProjectionGroup
from lora_kernels.linear import Linear, make_linear
from lora_kernels.portable import torch_lora
from lora_kernels.portable.torch_tiles import row_starts
from lora_kernels.segments import SegmentPlan

MAX_INNER = 128
"""Largest sum of the adapters' ranks. Above it the wasted arithmetic costs more than stacking saves."""
MAX_GROUP_BYTES = 128 << 20
"""Largest size in bytes of one projection group's stack, over all layers. Larger groups use tiles, which keep none."""
MAX_SLACK = 2
"""A stack may be this many times as wide as the adapters in use need, because adapters come and go, and rebuilding the
stack costs as much as a step."""

MASK_TYPES = {2: torch.int16, 4: torch.int32}


@dataclass(frozen=True, slots=True)
class GroupStack:
    """The weights of one projection group, one entry per layer. None means that no adapter of the stack touches the
    group there. `inner` is `Stack.inner`, the sum of the adapters' ranks.

    Attributes:
        a: linear layers in_features -> targets * inner.
        b: linear layers targets * inner -> sum(out_features), block-diagonal over targets.
    """

    a: tuple[Linear | None, ...]
    b: tuple[Linear | None, ...]


@dataclass(slots=True)
class Stack:
    """The stacked weights of some adapters, used by all steps that it serves (`serves`). A projection group's weights
    are gathered when the group is first used, and then held in `groups`.

    Attributes:
        adapter_slots: int32 [num_adapters], ascending.
        versions: int64 [num_adapters]. Versions of these slots when the stack was made.
        ranks: int32 [num_adapters]. The largest rank of each adapter; `inner` is the sum of these ranks.
    """

    arena: Tensor
    table: LoraTable
    adapter_slots: npt.NDArray[np.int32]
    versions: npt.NDArray[np.int64]
    ranks: npt.NDArray[np.int32]
    groups: dict[ProjectionGroup, GroupStack] = field(default_factory=dict)

    @property
    def inner(self) -> int:
        return int(self.ranks.sum())

    @property
    def owners(self) -> npt.NDArray[np.int32]:
        """The slot of the adapter to which each of one target's columns belongs, int32 [inner]."""
        return np.repeat(self.adapter_slots, self.ranks)

    def serves(self, arena: Tensor, table: LoraTable, adapter_slots: npt.NDArray[np.int32]) -> bool:
        """Returns whether the stack was made from this arena and table, holds these slots, has had none of its slots
        changed since (these or others), and is at most `MAX_SLACK` times as wide as these slots need."""
        if self.table is not table or self.arena.data_ptr() != arena.data_ptr():
            return False
        is_stale = (table.versions[self.adapter_slots] != self.versions).any()
        if is_stale or not np.isin(adapter_slots, self.adapter_slots).all():
            return False
        return self.inner <= MAX_SLACK * int(self.ranks[np.isin(self.adapter_slots, adapter_slots)].sum())

    def fits(self, group: ProjectionGroup) -> bool:
        elements = self.inner * len(group.targets) * (group.in_features + sum(group.out_features))
        return elements * self.arena.element_size() * self.table.host_ranks.shape[1] <= MAX_GROUP_BYTES

    def group(self, group: ProjectionGroup) -> GroupStack:
        if group not in self.groups:
            self.groups[group] = self._gather(group)
        return self.groups[group]

    def _gather(self, group: ProjectionGroup) -> GroupStack:
        ranks: npt.NDArray[np.int32] = self.table.host_ranks[self.adapter_slots]
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
        """Returns the first arena element of every stacked row of A or B (`side`), int64 [layers, inner]; 0, where the
        arena holds zeros, for rows that an adapter lacks because its rank is lower in that layer and target."""
        largest = int(self.ranks.max())
        adapter_slots = self.adapter_slots[None].astype(np.int64)
        starts: npt.NDArray[np.int64] = row_starts(self.table, adapter_slots, target, side, width, largest)[:, 0]
        present = np.arange(largest) < self.ranks[:, None]
        return torch.from_numpy(np.ascontiguousarray(starts[:, present]))

    def _rows(self, starts: Tensor, width: int) -> Tensor:
        """Gathers rows of `width` elements from the arena. Returns [inner, width]."""
        return self.arena.as_strided((self.arena.numel() - width + 1, width), (1, 1)).index_select(0, starts)


@dataclass(slots=True)
class PreparedStack:
    """The LoRA data of one step: a stack, the step's segments, and tiles for projection groups too large for stacks."""

    stack: Stack
    plan: SegmentPlan
    masks: dict[int, Tensor] = field(default_factory=dict)
    """Number of targets -> mask (see `_mask`) for inputs of `mask_rows` rows."""
    mask_rows: int = -1
    tiles: torch_lora.TiledLora | None = None

    def add(self, out: Tensor, x: Tensor, layer: int, group: ProjectionGroup) -> None:
        """Adds B A x of each row's own adapter to `out` [num_rows, sum(out_features)] in place: `Backend.add_lora`."""
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
        """Returns the mask [num_rows, targets * inner] for the rows of `x`, cached. It has all bits set in the columns
        of a row's own adapter and none elsewhere, so that a bitwise AND also clears infinities and NaN."""
        if len(x) != self.mask_rows:  # the plan is the same, but the number of rows after its last row differs
            self.masks.clear()
            self.mask_rows = len(x)
        if targets not in self.masks:
            row_adapter_slots = np.full(len(x), -1, dtype=np.int32)
            row_adapter_slots[self.plan.rows] = np.repeat(self.plan.adapter_slots, self.plan.lengths)
            own = torch.from_numpy(row_adapter_slots[:, None] == np.tile(self.stack.owners, targets))
            self.masks[targets] = -own.to(MASK_TYPES[x.element_size()])
        return self.masks[targets]


def make_stack(
    arena: Tensor, table: LoraTable, adapter_slots: npt.NDArray[np.int32], max_inner: int = MAX_INNER
) -> Stack | None:
    """Makes a stack of the adapters in `adapter_slots`. Returns None if the sum of their ranks exceeds
    `max_inner` or is 0."""
    ranks = table.host_ranks[adapter_slots].max(axis=(1, 2), initial=0)
    if not 0 < ranks.sum() <= max_inner:
        return None
    return Stack(arena, table, adapter_slots, table.versions[adapter_slots], ranks)


def worth_it(plan: SegmentPlan) -> bool:
    """Returns whether stacking pays for a step: more than half of the rows, up to the last row with an adapter, have
    one. Stacking multiplies the other rows as well, which is wasted."""
    return 2 * len(plan.rows) > int(plan.rows.max(initial=0)) + 1
