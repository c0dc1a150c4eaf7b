"""Groups the rows of a step by adapter, once per step on the host. A *segment* is the set of rows of one adapter; rows
of the base model are in none, and without segments backends launch nothing."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class SegmentPlan:
    """Rows grouped by adapter."""

    rows: Int32Array
    """int32 [num_lora_rows]. Batch rows that have an adapter, sorted by adapter, stable within one."""
    adapter_slots: Int32Array
    """int32 [num_segments]. Adapter slot (in the `LoraTable`) of each segment, ascending."""
    starts: Int32Array
    """int32 [num_segments + 1]. Segment i is `rows[starts[i]:starts[i + 1]]`."""

    @property
    def num_segments(self) -> int:
        return len(self.adapter_slots)

    @property
    def lengths(self) -> Int32Array:
        """The number of rows of each segment, int32 [num_segments]."""
        return np.diff(self.starts)

    def slots_of_rows(self, num_rows: int) -> Int32Array:
        """Return each row's adapter slot, -1 for the base model, int32 [num_rows]."""
        slots = np.full(num_rows, -1, dtype=np.int32)
        slots[self.rows] = np.repeat(self.adapter_slots, self.lengths)
        return slots


def plan_segments(row_adapter_slots: Int32Array) -> SegmentPlan:
    """Group the rows of a step, given each row's adapter slot (-1 for the base model), int32 [num_rows]."""
    order = np.argsort(row_adapter_slots, kind="stable").astype(np.int32)
    rows = order[int(np.count_nonzero(row_adapter_slots < 0)) :]
    adapter_slots, first = np.unique(row_adapter_slots[rows], return_index=True)
    starts = np.append(first, len(rows)).astype(np.int32)
    return SegmentPlan(rows=rows, adapter_slots=adapter_slots.astype(np.int32), starts=starts)
