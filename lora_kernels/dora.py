"""Applies DoRA adapters (Liu et al. 2024, section 4.3), whose projections are g (W x + s B A x) + bias. B includes g;
the base output becomes out (1 + scale) + shift, by the rows of a *scale tile*."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lora_kernels.layout import ALIGN, SCALE_ROWS, LoraTable, ProjectionGroup
from lora_kernels.segments import SegmentPlan

# scale = g - 1, which is near 0 and so keeps g exact to a few thousandths in 16 bits; shift = -scale * bias keeps the
# bias unscaled.


class BaseScales(Protocol):
    """Scales the base model's outputs for DoRA adapters. One object is made per step and serves all layers."""

    def apply(self, out: Tensor, layer: int, group: ProjectionGroup) -> None:
        """Compute `out[row] = out[row] * (1 + scale) + shift` in place, in the columns of each projection for which the
        row's own adapter has a scale tile at `layer`. `out` is the base output, [num_rows, sum(out_features)]."""


@dataclass(frozen=True, slots=True)
class ScaledRows:
    """The rows of a step whose adapters scale any base output: `rows` are batch rows, `adapter_slots` are the slots of
    their adapters in the table."""

    rows: npt.NDArray[np.int64]
    adapter_slots: npt.NDArray[np.int64]


def scaled_rows(table: LoraTable, plan: SegmentPlan) -> ScaledRows | None:
    """Return the batch rows whose adapters scale a base output in any layer, or None if there are none."""
    scaling = table.has_scales[plan.adapter_slots]
    if not scaling.any():
        return None
    chosen = np.repeat(scaling, plan.lengths)
    adapter_slots = np.repeat(plan.adapter_slots, plan.lengths)
    return ScaledRows(plan.rows[chosen].astype(np.int64), adapter_slots[chosen].astype(np.int64))


@dataclass(frozen=True, slots=True)
class ScaledTarget:
    """The scale tiles of one projection, whose outputs are `columns`, for a step's scaled rows. `starts` holds, by
    layer, the int64 offsets of each row's tile in the arena, of zeros where it has none, or None."""

    starts: tuple[Tensor | None, ...]
    tiles: Tensor
    """[num_elements - SCALE_ROWS * out_features + 1, SCALE_ROWS * out_features], a view of the arena whose row i is the
    tile that starts at element i."""
    columns: slice


@dataclass(slots=True)
class TorchScales:
    """`BaseScales` in torch, for any device, for one step. It computes in fp32 and rounds to the dtype of `out`. `rows`
    is `scaled.rows` on the device; `groups` caches the tiles of each projection group that was used in this step."""

    arena: Tensor
    table: LoraTable
    scaled: ScaledRows
    rows: Tensor
    groups: dict[ProjectionGroup, tuple[ScaledTarget, ...]] = field(default_factory=dict)

    def apply(self, out: Tensor, layer: int, group: ProjectionGroup) -> None:
        """Scale the base output `out` [num_rows, sum(out_features)] of one layer in place, see `BaseScales.apply`."""
        if group not in self.groups:
            self.groups[group] = self._find_tiles(group)
        for target in self.groups[group]:
            if (starts := target.starts[layer]) is not None:
                part = out[:, target.columns]
                scale, shift = target.tiles.index_select(0, starts).float().chunk(SCALE_ROWS, dim=1)
                base = part.index_select(0, self.rows).float()
                part.index_copy_(0, self.rows, torch.addcmul(base + shift, base, scale).to(out.dtype))

    def _find_tiles(self, group: ProjectionGroup) -> tuple[ScaledTarget, ...]:
        targets, column = [], 0
        for target, features in zip(group.targets, group.out_features, strict=True):
            width, offsets = SCALE_ROWS * features, self.table.host_scales[self.scaled.adapter_slots, :, target].T
            by_layer = torch.from_numpy(offsets.astype(np.int64) * ALIGN).to(self.arena.device).unbind(0)
            touched = (offset.any() for offset in offsets)
            starts = tuple(start if is_touched else None for start, is_touched in zip(by_layer, touched, strict=True))
            tiles = self.arena.as_strided((self.arena.numel() - width + 1, width), (1, 1))
            targets.append(ScaledTarget(starts, tiles, slice(column, column + features)))
            column += features
        return tuple(targets)


def prepare(arena: Tensor, table: LoraTable, plan: SegmentPlan) -> TorchScales | None:
    """Return one step's `TorchScales`, for all layers, or None if no adapter of the step scales base outputs."""
    scaled = scaled_rows(table, plan)
    if scaled is None:
        return None
    return TorchScales(arena, table, scaled, torch.from_numpy(scaled.rows).to(arena.device))
