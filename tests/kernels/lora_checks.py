"""What the Triton LoRA kernels must satisfy beyond what every backend must, as functions run under the interpreter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from backend_checks import assert_error_within_twice
from interpreter_numbers import tensor_cores
from kernel_cases import LoraCase, Shape, lora_case
from torch import Tensor

from lora_kernels import reference
from lora_kernels.gpu import triton_lora
from lora_kernels.gpu.triton_lora_plan import LoraWorkspace, TritonLora, prepare, record
from lora_kernels.gpu.triton_lora_tuning import SHIPPED, LoraTuning
from lora_kernels.layout import LoraTable, ProjectionGroup
from lora_kernels.segments import SegmentPlan

SMALL = LoraTuning(k_per_split=256, tile_rows=16, long_from=24, long_rows=16, long_k=32, long_expand_rows=8)
"""Blocks so small that every kind of tile, and four parts, occur in cases of little work."""
SMOLLM = Shape(hidden=576, kv=192, inter=1536)
PARTS = Shape(hidden=600, kv=40, inter=72)
"""Wide enough for three parts of the inner dimension, the last of them short."""
OUTPUT, QKV = PARTS.groups[1], PARTS.groups[0]


def run(case: LoraCase, prepared: TritonLora | None, group: ProjectionGroup, layer: int = 1) -> Tensor:
    out, x = case.inputs(group)
    assert prepared is not None
    triton_lora.add(out, x, prepared, layer, group)
    return out


def eager(case: LoraCase, group: ProjectionGroup, tuning: LoraTuning = SHIPPED) -> Tensor:
    return run(case, prepare(case.arena, case.table, case.plan, tuning), group)


def expected(case: LoraCase, group: ProjectionGroup) -> Tensor:
    """In fp32."""
    out, x = case.inputs(group)
    return out.float() + reference.lora_delta(x, case.row_adapter_slots, case.arena, case.table, 1, group)


def lengths(*rows: int) -> list[int]:
    """Slots of segments of so many rows, dealt out like cards."""
    most = max(rows)
    return [adapter_slot for turn in range(most) for adapter_slot, count in enumerate(rows) if turn < count]


def odd_sizes_of_real_models() -> None:
    case = lora_case([8, 33, 1], [0, 1, 2, 1, -1], SMOLLM, page_elems=1 << 15)
    for group in (SMOLLM.groups[0], SMOLLM.groups[3]):
        torch.testing.assert_close(eager(case, group), expected(case, group), rtol=1e-4, atol=1e-4)


def every_kind_of_tile_matches_the_reference() -> None:
    adapters, adapter_slots = [0, 1, 3, 256, 17, 33, 64, 8, 40], lengths(1, 2, 9, 2, 3, 24, 25, 1, 37)
    case = lora_case(adapters, adapter_slots, PARTS, page_elems=1 << 14)
    torch.testing.assert_close(eager(case, OUTPUT, SMALL), expected(case, OUTPUT), rtol=1e-4, atol=1e-4)


def a_row_has_the_same_bits_whichever_rows_share_the_batch(dtype: torch.dtype, fp8: bool) -> None:
    """Alone, and beside 1, 2, 11 and 33 rows of the same adapter: in a narrow tile, a higher one, a long segment's."""
    generator = torch.Generator().manual_seed(3)
    out = torch.randn(1, PARTS.hidden, generator=generator).to(dtype)
    x = torch.randn(1, PARTS.hidden, generator=generator).to(dtype)
    found = set()
    with tensor_cores():
        for mates in ([], [0], [1, 0, -1, 0], [0] * 11, [0] * 33 + [1]):
            case = lora_case([40, 7], [*mates, 0], PARTS, dtype, page_elems=1 << 14, fp8=fp8)
            outs, xs = case.inputs(OUTPUT)
            outs[-1], xs[-1] = out, x
            triton_lora.add(outs, xs, prepare(case.arena, case.table, case.plan, SMALL), 1, OUTPUT)
            found.add(outs[-1].view(torch.int16).numpy().tobytes())
    assert not torch.equal(outs[-1], out[0])
    assert len(found) == 1


def blocks_change_no_bits() -> None:
    """What an autotuner may vary; parts of the inner dimension are what it may not."""
    case = lora_case([40, 7], lengths(30, 3), PARTS, page_elems=1 << 14)
    tunings = (
        SMALL,
        replace(SMALL, narrow_rows=16, narrow_k=256, tile_rows=32, tile_k=32, expand_block=32),
        replace(SMALL, long_from=1, long_rows=32, long_ranks=64, long_k=128, long_shrink_warps=2, long_expand_rows=32),
    )
    with tensor_cores():
        first, *others = (eager(case, OUTPUT, tuning) for tuning in tunings)
    assert all(torch.equal(first, other) for other in others)


def error_is_that_of_two_gemms(dtype: torch.dtype) -> None:
    case = lora_case([8, 16, 33], [0, 1, 2, 2, 0, 1] * 5, dtype=dtype)
    group = case.shape.groups[0]
    out, x = case.inputs(group)
    plain, column = out.clone(), 0
    for target, features in zip(group.targets, group.out_features, strict=True):
        for adapter_slot, blocks in enumerate(case.blocks):
            rows = [row for row, used in enumerate(case.row_adapter_slots) if used == adapter_slot]
            a, b = (part.to(dtype) for part in blocks[1, target])
            plain[rows, column : column + features] += x[rows] @ a.T @ b.T
        column += features
    with tensor_cores():
        for tuning in (SHIPPED, SMALL):
            assert_error_within_twice(eager(case, group, tuning), plain, expected(case, group))


def fp8_matches_what_was_stored(dtype: torch.dtype) -> None:
    """To the precision of the model's dtype: reading e4m3 loses nothing."""
    case = lora_case([8, 1, 33, 0, 17], lengths(1, 2, 9, 1, 30), Shape(49, 7, 81), dtype, fp8=True)
    with tensor_cores():
        for group in case.shape.groups:
            exact, ulp = expected(case, group), torch.finfo(dtype).eps
            torch.testing.assert_close(eager(case, group, SMALL).float(), exact, rtol=2 * ulp, atol=16 * ulp)


def fp8_is_near_what_was_trained() -> None:
    """e4m3 keeps four bits: two such roundings put a product off by a few hundredths of its size."""
    case = lora_case([16, 64], [0, 1, 0, 1], SMOLLM, torch.float16, page_elems=1 << 15, fp8=True)
    group = SMOLLM.groups[1]
    _, x = case.inputs(group)
    stored = reference.lora_delta(x, case.row_adapter_slots, case.arena, case.table, 1, group)
    for adapter_slot in (0, 1):
        a, b = case.blocks[adapter_slot][1, group.targets[0]]
        trained = x[adapter_slot].float() @ a.T @ b.T
        assert 0.005 < (stored[adapter_slot] - trained).norm() / trained.norm() < 0.06


def fp8_zero_b_is_the_identity() -> None:
    case = lora_case([8, 40], [0, 1, 0], dtype=torch.float16, zero_b=True, fp8=True)
    out, _ = case.inputs(case.shape.groups[0])
    assert torch.equal(eager(case, case.shape.groups[0]), out)


def upload(workspace: LoraWorkspace, table: LoraTable, plan: SegmentPlan, tuning: LoraTuning = SHIPPED) -> None:
    """Copy a step's lists into the workspace that recorded launches read, as an engine copies them."""
    host = np.empty(workspace.sections[-1], dtype=np.int32)
    used = workspace.fill(host, table, plan, tuning)
    workspace.meta[:used] = torch.from_numpy(host[:used])


def replay(workspace: LoraWorkspace, case: LoraCase, group: ProjectionGroup, num_rows: int = 64) -> Tensor:
    """What launches recorded before do with this case: everything they get stays where it was."""
    workspace.sums.fill_(float("nan"))
    addresses = workspace.meta.data_ptr(), workspace.sums.data_ptr()
    upload(workspace, case.table, case.plan, SMALL)
    assert (workspace.meta.data_ptr(), workspace.sums.data_ptr()) == addresses
    return run(case, record(case.arena, case.table, workspace, num_rows, SMALL), group)


def recorded_launches_serve_any_set_of_adapters() -> None:
    workspace = LoraWorkspace(64, torch.device("cpu"), max_rank=64, parts=9)
    sets: Sequence[tuple[list[int], list[int]]] = (
        ([40, 7, 0, 64], lengths(3, 30, 2, 9)),
        ([1], [0]),
        ([8, 8], [-1, -1, -1]),
        ([17] * 9, list(range(9))),
    )
    for adapters, adapter_slots in sets:
        case = lora_case(adapters, adapter_slots, PARTS, page_elems=1 << 14)
        found = replay(workspace, case, OUTPUT)
        torch.testing.assert_close(found, expected(case, OUTPUT), rtol=1e-4, atol=1e-4)


def recorded_launches_walk_what_is_beyond_them() -> None:
    """Seven row tiles and their shrink tiles, four each, by programs for few."""
    tuning = replace(SMALL, most_programs=30)
    case = lora_case([64] * 7, list(range(7)), PARTS, page_elems=1 << 14)
    workspace = LoraWorkspace(8, torch.device("cpu"), max_rank=64, parts=9)
    upload(workspace, case.table, case.plan, tuning)
    prepared = record(case.arena, case.table, workspace, 2, tuning)
    assert tuning.num_programs(prepared.lists.shrink.programs, 9) == 3
    assert prepared.lists.rows.programs == 2
    torch.testing.assert_close(run(case, prepared, OUTPUT), expected(case, OUTPUT), rtol=1e-4, atol=1e-4)


def recorded_launches_have_the_bits_of_others() -> None:
    case = lora_case([40, 7, 16], lengths(30, 3, 1), PARTS, page_elems=1 << 14)
    workspace = LoraWorkspace(64, torch.device("cpu"))
    with tensor_cores():
        assert torch.equal(replay(workspace, case, OUTPUT), eager(case, OUTPUT, SMALL))


def too_small_a_workspace_is_refused() -> None:
    case = lora_case([8], [0], PARTS, page_elems=1 << 14)
    workspace = LoraWorkspace(4, torch.device("cpu"), parts=2)
    upload(workspace, case.table, case.plan, SMALL)
    with pytest.raises(ValueError, match="qkv needs 9 sums a rank, not 2"):
        run(case, record(case.arena, case.table, workspace, 4, SMALL), QKV)


def sick_numbers_stay_where_they_are() -> None:
    """A NaN and an infinity in rows of one adapter leave its other rows alone, in every kind of tile."""
    for rows in (3, 12, 30):
        case, group = lora_case([8, 5], lengths(rows, 2)), Shape().groups[0]
        out, x = case.inputs(group)
        x[0], x[2] = float("nan"), float("inf")
        triton_lora.add(out, x, prepare(case.arena, case.table, case.plan, SMALL), 1, group)
        healthy = np.setdiff1d(np.arange(len(out)), [0, 2])
        torch.testing.assert_close(out[healthy], expected(case, group)[healthy], rtol=1e-4, atol=1e-4)
        assert not out[[0, 2]].isfinite().any()


HALVES = (torch.bfloat16, torch.float16)
LORA_CHECKS: dict[str, Callable[[], None]] = {
    **{
        f"lora: same bits, {dtype}{', fp8' if fp8 else ''}": (
            lambda dtype=dtype, fp8=fp8: a_row_has_the_same_bits_whichever_rows_share_the_batch(dtype, fp8)
        )
        # In fp32 a sum in another order shows; in 16 bits rounding may hide it.
        for dtype, fp8 in ((torch.float32, False), (torch.bfloat16, False), (torch.float16, True))
    },
    **{f"lora: error of two gemms, {dtype}": lambda dtype=dtype: error_is_that_of_two_gemms(dtype) for dtype in HALVES},
    **{f"lora: fp8, {dtype}": lambda dtype=dtype: fp8_matches_what_was_stored(dtype) for dtype in HALVES},
    **{
        check.__name__: check
        for check in (
            odd_sizes_of_real_models,
            every_kind_of_tile_matches_the_reference,
            blocks_change_no_bits,
            fp8_is_near_what_was_trained,
            fp8_zero_b_is_the_identity,
            recorded_launches_serve_any_set_of_adapters,
            recorded_launches_walk_what_is_beyond_them,
            recorded_launches_have_the_bits_of_others,
            too_small_a_workspace_is_refused,
            sick_numbers_stay_where_they_are,
        )
    },
}
