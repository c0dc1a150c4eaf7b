"""`plan_segments`: every row with an adapter once, grouped, in order."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lora_kernels.segments import plan_segments

row_adapter_slots = st.lists(st.integers(-1, 6), max_size=60)


def plan(adapter_slots):
    return plan_segments(np.array(adapter_slots, dtype=np.int32))


@given(row_adapter_slots)
def test_rows_of_a_segment_use_its_slot(adapter_slots):
    made = plan(adapter_slots)
    for index, adapter_slot in enumerate(made.adapter_slots):
        rows = made.rows[made.starts[index] : made.starts[index + 1]]
        assert rows.tolist() == [row for row, used in enumerate(adapter_slots) if used == adapter_slot]


@given(row_adapter_slots)
def test_segments_cover_the_rows_with_an_adapter(adapter_slots):
    made = plan(adapter_slots)
    assert sorted(made.rows.tolist()) == [row for row, adapter_slot in enumerate(adapter_slots) if adapter_slot >= 0]
    assert made.adapter_slots.tolist() == sorted({adapter_slot for adapter_slot in adapter_slots if adapter_slot >= 0})
    assert made.lengths.sum() == len(made.rows)
    assert made.num_segments == len(made.adapter_slots) == len(made.starts) - 1


def test_base_rows_make_no_segments():
    made = plan([-1, -1])
    assert made.num_segments == 0
    assert made.starts.tolist() == [0]


def test_types_are_what_kernels_upload():
    made = plan([1, 0, -1])
    assert {made.rows.dtype, made.adapter_slots.dtype, made.starts.dtype} == {np.dtype(np.int32)}
