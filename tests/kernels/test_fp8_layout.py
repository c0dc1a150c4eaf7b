"""Adapters in FP8: every number is where the table says, to e4m3's four bits, and nothing overlaps."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import Shape, make_blocks

from lora_kernels import reference
from lora_kernels.layout import FP8_MAX, SIDE_A, SIDE_B, LoraTable, pack_adapter, plan_layout, quantise_rows
from tests.examples import examples

SHAPE = Shape(hidden=24, kv=7, inter=33)
PAGE = 16 * 40


@given(st.lists(st.integers(0, 40), min_size=14, max_size=14), st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=examples(20))
def test_weights_come_back_through_the_table(ranks, random):
    ranks = np.array(ranks, dtype=np.int32).reshape(2, 7)
    layout = plan_layout(ranks, SHAPE.widths, PAGE, fp8=True)
    blocks = make_blocks(SHAPE, ranks, torch.Generator().manual_seed(0))
    pages = random.sample(range(1, layout.num_pages + 10), layout.num_pages)
    arena = torch.full((layout.num_pages + 10, PAGE), float("nan"), dtype=torch.bfloat16)
    arena[pages] = pack_adapter(layout, blocks, PAGE, torch.bfloat16)
    table = LoraTable(1, 2, 7, PAGE, torch.device("cpu"), fp8=True)
    table.set(0, layout, tuple(pages))
    for (layer, target), (a, b) in blocks.items():
        (bits_a, scale_a), (bits_b, scale_b) = quantise_rows(a), quantise_rows(b.T)
        stored_a = reference.gather_block(arena.view(-1), table, 0, layer, target, SIDE_A, a.shape[1])
        stored_b = reference.gather_block(arena.view(-1), table, 0, layer, target, SIDE_B, len(b))
        assert torch.equal(stored_a, bits_a.view(torch.float8_e4m3fn).float())
        assert torch.equal(stored_b, bits_b.view(torch.float8_e4m3fn).float() * (scale_a * scale_b))


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
def test_rows_are_rounded_to_four_bits(scale):
    rows = torch.randn(9, 500, generator=torch.Generator().manual_seed(0)) * scale
    rows[3] = 0
    rows[5, 7] = 50 * scale
    bits, scales = quantise_rows(rows)
    back = bits.view(torch.float8_e4m3fn).float() * scales
    assert (back.abs().amax(1) / rows.abs().amax(1))[[0, 5]].sub(1).abs().max() < 1e-6
    assert ((back - rows).abs() <= torch.maximum(rows.abs() / 16, scales / 512 / 2 * 1.001)).all()
    assert scales[3] == 1 and not bits[3].any()
    assert torch.allclose(scales[5], rows[5].abs().max() / FP8_MAX)


def test_a_table_takes_adapters_of_its_own_kind_only():
    layout = plan_layout(np.ones((2, 7), dtype=np.int32), SHAPE.widths, PAGE, fp8=True)
    with pytest.raises(ValueError, match="not stored in FP8"):
        LoraTable(1, 2, 7, PAGE, torch.device("cpu")).set(0, layout, (1,))
