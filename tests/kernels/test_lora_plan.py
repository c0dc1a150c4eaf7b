"""Lists of tiles: every row and rank of every adapter once, where kernels look for it."""

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kernel_cases import Shape
from lora_checks import upload

from lora_kernels.gpu.triton_lora_plan import LoraWorkspace, prepare, record
from lora_kernels.gpu.triton_lora_tuning import SHIPPED, LoraTuning
from lora_kernels.layout import LoraTable, plan_layout
from lora_kernels.segments import plan_segments
from tests.examples import examples

SHAPE, PAGE, CPU = Shape(hidden=24, kv=7, inter=33), 1024, torch.device("cpu")
TUNING = LoraTuning(narrow_rows=8, tile_rows=8, long_from=20, long_rows=16, long_ranks=32)
RANKS = (8, 0, 40, 1, 100)


@pytest.fixture(scope="module")
def table():
    table = LoraTable(len(RANKS), 1, 7, PAGE, CPU)
    for slot, rank in enumerate(RANKS):
        layout = plan_layout(np.full((1, 7), rank, dtype=np.int32), SHAPE.widths, PAGE)
        table.set(slot, layout, tuple(range(layout.num_pages)))
    return table


def tiles(listed):
    return listed.tiles[: int(listed.count)].tolist()


def rows_and_ranks(rows, listed, height, ranks):
    """(slot, batch row, rank), as often as a program computes it."""
    for slot, first, count, first_rank in tiles(listed):
        assert 1 <= count <= height
        for row in rows[first : first + count].tolist():
            for rank in range(first_rank, min(first_rank + ranks, RANKS[slot])):
                yield slot, row, rank


@given(st.lists(st.integers(-1, 4), max_size=90))
@settings(deadline=None, max_examples=examples(50))
def test_every_row_and_rank_is_computed_once(table, slots):
    prepared = prepare(torch.zeros(8), table, plan_segments(np.array(slots, dtype=np.int32)), TUNING)
    wanted = [(slot, row, rank) for row, slot in enumerate(slots) if slot >= 0 for rank in range(RANKS[slot])]
    if prepared is None:
        assert not wanted
        return
    lists = prepared.lists
    short = list(rows_and_ranks(prepared.rows, lists.shrink, 8, 16))
    long = list(rows_and_ranks(prepared.rows, lists.long_shrink, 16, 32))
    assert sorted(short + long) == sorted(wanted)
    assert all(slots.count(slot) < 20 for slot, _, _ in short) and all(slots.count(slot) >= 20 for slot, _, _ in long)
    for rows, shrink in ((lists.rows, lists.shrink), (lists.long_rows, lists.long_shrink)):
        assert tiles(rows) == [tile for tile in tiles(shrink) if tile[3] == 0]
        assert rows.programs == int(rows.count) and shrink.programs == int(shrink.count)


@given(st.lists(st.integers(-1, 4), max_size=30))
@settings(deadline=None, max_examples=examples(50))
def test_a_workspace_holds_the_same_in_one_list(table, slots):
    """Long segments have no launch of their own in a recorded step; one upload replaces the other."""
    workspace, plan = LoraWorkspace(30, CPU, max_rank=100), plan_segments(np.array(slots, dtype=np.int32))
    recorded = record(torch.zeros(8), table, workspace, 30, TUNING)
    upload(workspace, table, plan_segments(np.full(30, 4, dtype=np.int32)), TUNING)
    upload(workspace, table, plan, TUNING)
    wanted = [(slot, row, rank) for row, slot in enumerate(slots) if slot >= 0 for rank in range(RANKS[slot])]
    assert sorted(rows_and_ranks(recorded.rows, recorded.lists.shrink, 8, 16)) == sorted(wanted)
    assert recorded.lists.long_shrink.programs == recorded.lists.long_rows.programs == 0


@given(st.lists(st.integers(-1, 4), max_size=90))
@example([4] * 90)
@example([4] * 40 + [2] * 49 + [0])
@example([4] * 19 + [2] * 17 + [0] * 19 + [3] * 17 + [4] * 18)
@settings(deadline=None, max_examples=examples(50))
def test_a_workspace_of_steps_with_prompts_has_room_for_long_segments(table, slots):
    workspace = LoraWorkspace(90, CPU, max_rank=100, max_segments=5, tuning=TUNING)
    recorded = record(torch.zeros(8), table, workspace, 90, TUNING, has_long=True)
    upload(workspace, table, plan_segments(np.array(slots, dtype=np.int32)), TUNING)
    lists = recorded.lists
    for listed in (lists.rows, lists.shrink, lists.long_rows, lists.long_shrink):
        assert int(listed.count) <= len(listed.tiles)
    wanted = [(slot, row, rank) for row, slot in enumerate(slots) if slot >= 0 for rank in range(RANKS[slot])]
    short = list(rows_and_ranks(recorded.rows, lists.shrink, 8, 16))
    long = list(rows_and_ranks(recorded.rows, lists.long_shrink, 16, 32))
    assert sorted(short + long) == sorted(wanted)
    assert all(slots.count(slot) < 20 for slot, _, _ in short) and all(slots.count(slot) >= 20 for slot, _, _ in long)
    assert lists.long_rows.programs and lists.long_shrink.programs


@pytest.mark.parametrize("slots", [[0] * 5, [4]])
def test_what_does_not_fit_a_workspace_is_refused(table, slots):
    workspace = LoraWorkspace(4, CPU, max_rank=64)
    with pytest.raises(ValueError, match="do not fit this workspace"):
        upload(workspace, table, plan_segments(np.array(slots, dtype=np.int32)))


def test_a_recorded_launch_depends_on_its_size_only(table):
    programs = [
        (recorded.lists.rows.programs, recorded.lists.shrink.programs)
        for rows in (1, 8, 64, 256)
        for recorded in [record(torch.zeros(8), table, LoraWorkspace(256, CPU), rows)]
    ]
    assert programs == [(1, 16), (8, 128), (64, 1024), (256, 4096)]


def test_a_launch_has_no_more_programs_than_fill_a_device():
    tuning = LoraTuning(most_programs=2048)
    assert [tuning.num_programs(tiles, 224) for tiles in (0, 5, 64)] == [0, 5, 9]
    assert tuning.num_programs(64, 5000) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"narrow_k": 96}, "narrow_k must be a power of two, not 96"),
        ({"tile_k": 512}, "tile_k must be 32 to 256, not 512"),
        ({"narrow_rows": 4}, "narrow_rows must be 8 to tile_rows, not 4"),
        ({"long_ranks": 8}, "8 ranks is less than an instruction"),
        ({"expand_block": 128, "expand_warps": 4}, "expand_warps must be less than 4 for tiles of 128 rows of weights"),
        ({"long_ranks": 64, "long_shrink_warps": 4}, "long_shrink_warps must be less than 4"),
        ({"max_splits": 0}, "max_splits must be a power of two, not 0"),
    ],
)
def test_sizes_that_do_not_work_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        LoraTuning(**change)


@pytest.mark.parametrize(("width", "parts"), [(1, 1), (576, 1), (1024, 1), (1536, 2), (4096, 4), (14336, 8)])
def test_parts_depend_on_the_inner_dimension_only(width, parts):
    assert SHIPPED.num_splits(width) == parts
