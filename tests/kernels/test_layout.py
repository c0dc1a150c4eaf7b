"""`plan_layout`, `pack_adapter`, `LoraTable`: every row of an adapter is where the table says, and nothing overlaps."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import Shape, make_blocks

from lora_kernels.layout import (
    ALIGN,
    MAX_ELEMENTS,
    RANK_TILE,
    SIDE_A,
    SIDE_B,
    LoraTable,
    pack_adapter,
    plan_layout,
)
from lora_kernels.segments import plan_segments
from lora_kernels.token_rows import TokenIds
from tests.examples import examples

SHAPE = Shape(hidden=24, kv=7, inter=33)
PAGE = 16 * 40
ranks_of_two_layers = st.lists(st.integers(0, 70), min_size=14, max_size=14).map(
    lambda ranks: np.array(ranks, dtype=np.int32).reshape(2, 7)
)


def tiles(layout):
    """(start, stop) of every tile in the adapter's blob."""
    for layer, target in np.argwhere(layout.ranks > 0):
        rank = int(layout.ranks[layer, target])
        for side in (SIDE_A, SIDE_B):
            for first in range(0, rank, RANK_TILE):
                start = int(layout.offsets[layer, target, side, first // RANK_TILE])
                yield start, start + min(RANK_TILE, rank - first) * int(SHAPE.widths[target, side])


@given(ranks_of_two_layers)
@settings(deadline=None)
def test_tiles_are_aligned_disjoint_and_inside_one_page(ranks):
    layout = plan_layout(ranks, SHAPE.widths, PAGE)
    spans = sorted(tiles(layout))
    assert all(start % ALIGN == 0 for start, _ in spans)
    assert all(start // PAGE == (stop - 1) // PAGE for start, stop in spans)
    assert all(left[1] <= right[0] for left, right in itertools.pairwise(spans))
    assert layout.num_pages == (-(-spans[-1][1] // PAGE) if spans else 0)


@given(ranks_of_two_layers, st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=examples(30))
def test_weights_come_back_through_the_table(ranks, random):
    layout = plan_layout(ranks, SHAPE.widths, PAGE)
    blocks = make_blocks(SHAPE, ranks, torch.Generator().manual_seed(0))
    pages = random.sample(range(1, layout.num_pages + 10), layout.num_pages)
    arena = torch.full((layout.num_pages + 10, PAGE), float("nan"))
    arena[pages] = pack_adapter(layout, blocks, PAGE, torch.float32)
    table = LoraTable(3, 2, 7, PAGE, torch.device("cpu"))
    table.set(1, layout, tuple(pages))
    for (layer, target), (a, b) in blocks.items():
        assert table.host_ranks[1, layer, target] == len(a)
        for side, rows in ((SIDE_A, a), (SIDE_B, b.T)):
            for row in range(len(rows)):
                start = int(table.offsets[1, layer, target, side, row // RANK_TILE]) * ALIGN
                start += row % RANK_TILE * rows.shape[1]
                assert torch.equal(arena.view(-1)[start : start + rows.shape[1]], rows[row])


@given(ranks_of_two_layers)
@settings(deadline=None, max_examples=examples(20))
def test_no_page_is_wasted_on_more_than_a_tile(ranks):
    layout = plan_layout(ranks, SHAPE.widths, PAGE)
    largest = RANK_TILE * int(SHAPE.widths.max()) + ALIGN
    used = sum(stop - start for start, stop in tiles(layout))
    assert layout.num_pages <= 1 + -(-used // max(1, PAGE - largest))


def test_cleared_slot_is_the_identity():
    layout = plan_layout(np.full((2, 7), 20, dtype=np.int32), SHAPE.widths, PAGE)
    table = LoraTable(2, 2, 7, PAGE, torch.device("cpu"))
    addresses = table.ranks.data_ptr(), table.offsets.data_ptr()
    table.set(1, layout, tuple(range(1, layout.num_pages + 1)))
    assert table.ranks[1].min() == 20
    table.clear(1)
    assert not table.ranks.any()
    assert not table.offsets.any()
    assert (table.ranks.data_ptr(), table.offsets.data_ptr()) == addresses


def test_an_adapter_on_the_last_pages_of_the_largest_arena_is_found():
    """Its offsets did not fit an int32 when they counted 8 elements, from 32 GiB in bf16 on."""
    page_elems = 1 << 20
    layout = plan_layout(np.full((2, 7), 20, dtype=np.int32), SHAPE.widths, page_elems)
    table = LoraTable(1, 2, 7, page_elems, torch.device("cpu"))
    last = MAX_ELEMENTS // page_elems - 1
    table.set(0, layout, tuple(range(last, last - layout.num_pages, -1)))
    assert int(table.offsets[0, 0, 0, 0, 0]) * ALIGN == last * page_elems + int(layout.offsets[0, 0, 0, 0])
    assert (table.offsets >= 0).all()


def test_host_and_device_copies_agree():
    layout = plan_layout(np.full((2, 7), 20, dtype=np.int32), SHAPE.widths, PAGE)
    table = LoraTable(2, 2, 7, PAGE, torch.device("cpu"))
    table.set(0, layout, tuple(range(1, layout.num_pages + 1)))
    assert np.array_equal(table.ranks.numpy(), table.host_ranks)
    assert np.array_equal(table.offsets.numpy(), table.host_offsets)


def test_every_change_of_a_slot_raises_its_version():
    layout = plan_layout(np.ones((2, 7), dtype=np.int32), SHAPE.widths, PAGE)
    table = LoraTable(2, 2, 7, PAGE, torch.device("cpu"))
    before = table.versions.copy()
    table.set(1, layout, tuple(range(1, layout.num_pages + 1)))
    assert table.versions[1] > before[1]
    assert table.versions[0] == before[0]
    after = table.versions.copy()
    table.clear(1)
    assert table.versions[1] > after[1]


def test_an_adapter_of_rank_zero_needs_no_pages():
    layout = plan_layout(np.zeros((2, 7), dtype=np.int32), SHAPE.widths, PAGE)
    assert layout.num_pages == 0
    assert pack_adapter(layout, {}, PAGE, torch.float32).shape == (0, PAGE)
    table = LoraTable(1, 2, 7, PAGE, torch.device("cpu"))
    table.set(0, layout, ())
    assert not table.host_ranks.any()


@pytest.mark.parametrize("rank", [-1, 257])
def test_ranks_out_of_range_are_refused(rank):
    with pytest.raises(ValueError, match="ranks must be 0 to 256"):
        plan_layout(np.full((1, 7), rank, dtype=np.int32), SHAPE.widths, PAGE)


def test_a_tile_larger_than_a_page_is_refused():
    with pytest.raises(ValueError, match="does not fit a page"):
        plan_layout(np.full((1, 7), 16, dtype=np.int32), SHAPE.widths, 256)


def test_page_size_must_be_aligned():
    with pytest.raises(ValueError, match=f"multiple of {ALIGN}"):
        LoraTable(1, 1, 7, 100, torch.device("cpu"))


@pytest.mark.parametrize("fp8", [False, True])
def test_rows_of_tokens_come_before_the_tiles(fp8):
    """Eleven rows fill more than one page, so that a layer's kernels wait for all of them; those of embedding and head
    overlap."""
    ids = TokenIds(np.arange(8), np.arange(20, 27), 11, 100)
    layout = plan_layout(np.full((2, 7), 3, dtype=np.int32), SHAPE.widths, PAGE, fp8=fp8, tokens=ids)
    rows = torch.randn(11, 100).bfloat16()
    blocks = make_blocks(SHAPE, layout.ranks, torch.Generator().manual_seed(0))
    pages = tuple(range(layout.num_pages, 0, -1))
    arena = torch.full((layout.num_pages + 1, PAGE), float("nan"), dtype=torch.bfloat16)
    arena[list(pages)] = pack_adapter(layout, blocks, PAGE, torch.bfloat16, token_rows=rows)
    table = LoraTable(3, 2, 7, PAGE, torch.device("cpu"), fp8)
    table.set(1, layout, pages)
    for part, expected in ((table.tokens[1].embedding, rows[:8]), (table.tokens[1].head, rows[4:])):
        assert all(
            torch.equal(arena.view(-1)[start : start + 100], row)
            for start, row in zip(part.starts.tolist(), expected, strict=True)
        )
    assert max(layout.token_offsets) < layout.offsets[layout.offsets > 0].min()
    plan = plan_segments(np.array([1, 0], dtype=np.int32))
    assert table.replaces_tokens(plan)
    table.clear(1)
    assert not table.replaces_tokens(plan)
