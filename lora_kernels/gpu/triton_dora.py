"""DoRA's scaling of base outputs on a GPU, with one launch per projection group. See dora.py."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import triton
import triton.language as tl
from torch import Tensor

from lora_kernels.dora import scaled_rows
from lora_kernels.gpu.launch import with_constants
from lora_kernels.gpu.triton_lora import find_block
from lora_kernels.layout import ALIGN, LoraTable, ProjectionGroup
from lora_kernels.pinned import upload
from lora_kernels.segments import SegmentPlan

BLOCK = 1024


@dataclass(frozen=True, slots=True)
class TritonScales:
    """`BaseScales` in Triton, for one step. `items` is int32 [num_scaled_rows, 2] on the device: (batch row, adapter
    slot) of each row whose adapter scales any base output."""

    arena: Tensor
    table: LoraTable
    items: Tensor

    def apply(self, out: Tensor, layer: int, group: ProjectionGroup) -> None:
        """Scale the base output `out` [num_rows, sum(out_features)] of one layer in place, see `BaseScales.apply`."""
        _, layers, targets = self.table.scales.shape
        blocks = sum(-(-features // BLOCK) for features in group.out_features)
        kernel = with_constants(
            scale_kernel,
            LAYERS=layers,
            TARGETS=targets,
            GROUP=group.targets,
            OUT_FEATURES=group.out_features,
            BLOCK=BLOCK,
            ALIGN=ALIGN,
            num_warps=4,
            num_stages=1,
        )
        kernel((len(self.items), blocks), out, self.arena, self.table.scales, self.items, layer, out.stride(0))


def prepare(arena: Tensor, table: LoraTable, plan: SegmentPlan) -> TritonScales | None:
    """Return one step's `TritonScales`, for all layers, or None if none of its adapters scales base outputs."""
    scaled = scaled_rows(table, plan)
    if scaled is None:
        return None
    items = np.stack([scaled.rows, scaled.adapter_slots], axis=1).astype(np.int32)
    return TritonScales(arena, table, upload(items, arena.device))


@triton.jit(do_not_specialize=["layer"])
def scale_kernel(
    out_ptr,
    arena_ptr,
    scales_ptr,
    items_ptr,
    layer,
    out_stride,
    LAYERS: tl.constexpr,
    TARGETS: tl.constexpr,
    GROUP: tl.constexpr,
    OUT_FEATURES: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Compute out[row, columns] = out (1 + scale) + shift, for one (row, block of columns) with a scale tile."""
    _, target, features, column, within = find_block(tl.program_id(1), GROUP, OUT_FEATURES, BLOCK)
    item = items_ptr + tl.program_id(0) * 2
    row, adapter_slot = tl.load(item).to(tl.int64), tl.load(item + 1)
    start = tl.load(scales_ptr + (adapter_slot * LAYERS + layer) * TARGETS + target).to(tl.int64) * ALIGN
    if start > 0:
        n = within * BLOCK + tl.arange(0, BLOCK)
        mask = n < features
        scale = tl.load(arena_ptr + start + n, mask=mask, other=0.0).to(tl.float32)
        shift = tl.load(arena_ptr + start + features + n, mask=mask, other=0.0).to(tl.float32)
        place = out_ptr + row * out_stride + column + n
        base = tl.load(place, mask=mask, other=0.0)
        total = base.to(tl.float32) + (base.to(tl.float32) * scale + shift)
        tl.store(place, total.to(base.dtype), mask=mask)
