"""`plan_segments`: every row with an adapter once, grouped, in order."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lora_kernels.segments import plan_segments

row_slots = st.lists(st.integers(-1, 6), max_size=60)


def plan(slots):
    return plan_segments(np.array(slots, dtype=np.int32))


@given(row_slots)
def test_rows_of_a_segment_use_its_slot(slots):
    made = plan(slots)
    for index, slot in enumerate(made.slots):
        rows = made.rows[made.starts[index] : made.starts[index + 1]]
        assert rows.tolist() == [row for row, used in enumerate(slots) if used == slot]


@given(row_slots)
def test_segments_cover_the_rows_with_an_adapter(slots):
    made = plan(slots)
    assert sorted(made.rows.tolist()) == [row for row, slot in enumerate(slots) if slot >= 0]
    assert made.slots.tolist() == sorted({slot for slot in slots if slot >= 0})
    assert made.lengths.sum() == len(made.rows)
    assert made.num_segments == len(made.slots) == len(made.starts) - 1


def test_base_rows_make_no_segments():
    made = plan([-1, -1])
    assert made.num_segments == 0
    assert made.starts.tolist() == [0]


def test_types_are_what_kernels_upload():
    made = plan([1, 0, -1])
    assert {made.rows.dtype, made.slots.dtype, made.starts.dtype} == {np.dtype(np.int32)}
