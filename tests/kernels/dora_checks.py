"""What scaling base outputs must satisfy, as functions of `prepare`: torch's in the test process, Triton's under the
interpreter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from kernel_cases import LAYERS, Shape, make_blocks
from torch import Tensor

from lora_kernels.layout import LoraTable, ProjectionGroup, pack_adapter, plan_layout
from lora_kernels.segments import SegmentPlan, plan_segments

Prepare = Callable[[Tensor, LoraTable, SegmentPlan], Any]
SHAPE = Shape(hidden=48, kv=16, inter=1100)
PAGE = 16 * 1100
ALL = np.ones((LAYERS, 7), dtype=np.bool_)
NONE = ~ALL
SOME = np.zeros((LAYERS, 7), dtype=np.bool_)
SOME[0, [0, 2]] = SOME[1, 4] = True


@dataclass(frozen=True)
class DoraCase:
    """Adapters at slots 0, 1, ...; `tiles[i]` are the scale tiles of slot i."""

    arena: Tensor
    table: LoraTable
    tiles: list[dict[tuple[int, int], Tensor]]

    def run(
        self, prepare: Prepare, out: Tensor, row_adapter_slots: list[int], layer: int, group: ProjectionGroup
    ) -> Tensor:
        result = out.clone()
        scales = prepare(self.arena, self.table, plan_segments(np.array(row_adapter_slots, dtype=np.int32)))
        if scales is not None:
            scales.apply(result, layer, group)
        return result

    def expected(self, out: Tensor, row_adapter_slots: list[int], layer: int, group: ProjectionGroup) -> Tensor:
        result = out.float().clone()
        for row, adapter_slot in enumerate(row_adapter_slots):
            column = 0
            for target, features in zip(group.targets, group.out_features, strict=True):
                if adapter_slot >= 0 and (layer, target) in self.tiles[adapter_slot]:
                    scale, shift = self.tiles[adapter_slot][layer, target]
                    part = result[row, column : column + features]
                    result[row, column : column + features] = part * (1 + scale) + shift
                column += features
        return result


def dora_case(scaled: list[np.ndarray], dtype: torch.dtype = torch.float32) -> DoraCase:
    """Adapters of rank 3, of which `scaled[i]` [layers, targets] are scaled, in an arena that is NaN elsewhere."""
    generator, ranks = torch.Generator().manual_seed(0), np.full((LAYERS, 7), 3, dtype=np.int32)
    arena = torch.full((8 * len(scaled), PAGE), float("nan"), dtype=dtype)
    arena[0] = 0
    free = (torch.randperm(len(arena) - 1, generator=generator) + 1).tolist()
    table, all_tiles = LoraTable(len(scaled), LAYERS, 7, PAGE, torch.device("cpu")), []
    for adapter_slot, chosen in enumerate(scaled):
        layout = plan_layout(ranks, SHAPE.widths, PAGE, chosen)
        tiles = {
            (int(layer), int(target)): torch.randn(2, int(SHAPE.widths[target, 1]), generator=generator).to(dtype)
            for layer, target in np.argwhere(chosen)
        }
        pages = tuple(free.pop() for _ in range(layout.num_pages))
        arena[list(pages)] = pack_adapter(layout, make_blocks(SHAPE, ranks, generator), PAGE, dtype, tiles)
        table.set(adapter_slot, layout, pages)
        all_tiles.append({place: tile.float() for place, tile in tiles.items()})
    return DoraCase(arena.view(-1), table, all_tiles)


def outputs(rows: int, group: ProjectionGroup, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(rows, sum(group.out_features), generator=torch.Generator().manual_seed(1)).to(dtype)


def every_row_is_scaled_by_its_own(prepare: Prepare) -> None:
    case, adapter_slots = dora_case([ALL, NONE, SOME]), [0, -1, 2, 1, 0, 2, 2, -1]
    for layer in range(LAYERS):
        for group in SHAPE.groups:
            out = outputs(len(adapter_slots), group)
            result = case.run(prepare, out, adapter_slots, layer, group)
            torch.testing.assert_close(result, case.expected(out, adapter_slots, layer, group))
            assert torch.equal(result[[1, 3, 7]], out[[1, 3, 7]])


def nothing_is_prepared_without_such_adapters(prepare: Prepare) -> None:
    case = dora_case([ALL, NONE])
    for adapter_slots in ([], [-1, -1], [1, -1, 1]):
        assert prepare(case.arena, case.table, plan_segments(np.array(adapter_slots, dtype=np.int32))) is None


def rows_keep_their_bits(prepare: Prepare) -> None:
    case, adapter_slots, group = dora_case([ALL, SOME]), [0, 1, 1, -1, 0, 0], SHAPE.groups[0]
    out = outputs(len(adapter_slots), group)
    together = case.run(prepare, out, adapter_slots, 0, group)
    order = [4, 2, 0, 5, 3, 1]
    assert torch.equal(case.run(prepare, out[order], [adapter_slots[i] for i in order], 0, group), together[order])
    for row, adapter_slot in enumerate(adapter_slots):
        assert torch.equal(case.run(prepare, out[row : row + 1], [adapter_slot], 0, group), together[row : row + 1])


def a_cleared_slot_scales_nothing(prepare: Prepare) -> None:
    case = dora_case([ALL, ALL])
    case.table.clear(0)
    out = outputs(3, SHAPE.groups[2])
    result = case.run(prepare, out, [0, 1, 0], 1, SHAPE.groups[2])
    assert torch.equal(result[::2], out[::2])
    torch.testing.assert_close(result[1], case.expected(out, [0, 1, 0], 1, SHAPE.groups[2])[1])
    case.table.clear(1)
    assert prepare(case.arena, case.table, plan_segments(np.zeros(3, dtype=np.int32))) is None


def sixteen_bits_are_rounded_once(prepare: Prepare) -> None:
    case, adapter_slots, group = dora_case([ALL], torch.float16), [0, 0, -1], SHAPE.groups[0]
    out = outputs(3, group, torch.float16)
    exact = case.expected(out, adapter_slots, 0, group)
    error = (case.run(prepare, out, adapter_slots, 0, group).float() - exact).abs()
    assert (error <= exact.abs() * 2**-11 + 2**-24).all()


DORA_CHECKS: dict[str, Callable[[Prepare], None]] = {
    f"dora: {check.__name__}": check
    for check in (
        every_row_is_scaled_by_its_own,
        nothing_is_prepared_without_such_adapters,
        rows_keep_their_bits,
        a_cleared_slot_scales_nothing,
        sixteen_bits_are_rounded_once,
    )
}
