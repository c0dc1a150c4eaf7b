"""DoRA's scaling of base outputs, in torch. Triton's is checked by test_triton_backend.py."""

import numpy as np
import pytest
from dora_checks import DORA_CHECKS, PAGE, SHAPE, SOME, dora_case

from lora_kernels import dora
from lora_kernels.layout import ALIGN, plan_layout


@pytest.mark.parametrize("name", DORA_CHECKS)
def test_torch(name):
    DORA_CHECKS[name](dora.prepare)


def test_scale_tiles_lie_before_the_others_and_within_a_page():
    ranks = np.full(SOME.shape, 20, dtype=np.int32)
    layout = plan_layout(ranks, SHAPE.widths, PAGE, SOME)
    assert np.array_equal(layout.scales >= 0, SOME)
    for layer, target in np.argwhere(SOME):
        start, size = int(layout.scales[layer, target]), 2 * int(SHAPE.widths[target, 1])
        assert start % ALIGN == 0
        assert start // PAGE == (start + size - 1) // PAGE
        assert start + size <= layout.offsets[layer, target, 0, 0]


def test_plain_adapters_have_no_scale_tiles():
    ranks = np.full(SOME.shape, 20, dtype=np.int32)
    assert (plan_layout(ranks, SHAPE.widths, PAGE).scales == -1).all()


def test_a_tile_of_an_absent_projection_is_not_planned():
    ranks = np.zeros(SOME.shape, dtype=np.int32)
    assert plan_layout(ranks, SHAPE.widths, PAGE, SOME).num_pages == 0


def test_the_table_points_at_zeros_where_nothing_is_scaled():
    case = dora_case([SOME])
    assert np.array_equal(case.table.host_scales[0] > 0, SOME)
    assert np.array_equal(case.table.scales.numpy(), case.table.host_scales)
