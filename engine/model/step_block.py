"""A captured step's input: one block of memory at a fixed address, filled by one copy.

    kv slots | token ids | positions | contexts | sampler slots | block tables | LoRA lists

Each size of step lays out the same block anew, so that what it needs lies side by side. The LoRA lists come last: they
have room for the most that can be, of which a step fills, and uploads, only the beginning.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.model.batch import HostBatch

ALIGN = 4
"""Parts begin at multiples of 16 bytes."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """What decides how a block is laid out.

    Attributes:
        rows: of the step, padding included.
        max_blocks: of a block table.
        lora_numbers: int32 that the LoRA lists may take.
    """

    rows: int
    max_blocks: int
    lora_numbers: int

    @property
    def counts(self) -> tuple[int, ...]:
        """int32 of each part."""
        return (2 * self.rows, *[self.rows] * 4, self.rows * self.max_blocks, self.lora_numbers)

    @property
    def starts(self) -> tuple[int, ...]:
        """Where each part begins, in int32, and where the last one ends."""
        return tuple(accumulate((-(-count // ALIGN) * ALIGN for count in self.counts), initial=0))

    @property
    def lora_start(self) -> int:
        """int32 before the LoRA lists: what is uploaded in any case."""
        return self.starts[-2]

    @property
    def size(self) -> int:
        """int32 of a block."""
        return self.starts[-1]


class StepFields(NamedTuple):
    """The parts of a block: tensors on the device, arrays on the host.

    Attributes:
        kv_slots: int64 [rows]; -1 in padding, like `sampler_slots`.
        token_ids, positions, contexts, sampler_slots: int32 [rows].
        block_tables: int32 [rows, max_blocks].
        lora: int32 [lora_numbers]. See `LoraWorkspace.meta`.
    """

    kv_slots: Any
    token_ids: Any
    positions: Any
    contexts: Any
    sampler_slots: Any
    block_tables: Any
    lora: Any


def cut_block(block: Tensor, shape: StepShape) -> StepFields:
    """Views of `block`, int32 [at least shape.size]."""
    parts = [block[start : start + count] for start, count in zip(shape.starts, shape.counts, strict=False)]
    parts[0] = parts[0].view(torch.int64)
    parts[5] = parts[5].view(shape.rows, shape.max_blocks)
    return StepFields(*parts)


def write_rows(fields: StepFields, batch: HostBatch) -> None:
    """A decoding batch into a block on the host; rows beyond it become padding.

    Table entries beyond a context, and tables of padding, are left as they are: nobody reads them.
    """
    rows = batch.num_rows
    parts = (
        (fields.kv_slots, batch.kv_slots, -1),
        (fields.token_ids, batch.token_ids, 0),
        (fields.positions, batch.positions, 0),
        (fields.contexts, batch.contexts, 0),
        (fields.sampler_slots, batch.sampler_slots, -1),
    )
    for target, source, padding in parts:
        target[:rows] = source
        target[rows:] = padding
    fields.block_tables[:rows, : batch.block_tables.shape[1]] = batch.block_tables


class HostBlock:
    """A block on the host, pinned where a GPU reads it, and its parts for each shape of step.

    Args:
        shapes: all that it serves.
    """

    def __init__(self, shapes: tuple[StepShape, ...], device: torch.device) -> None:
        size, on_gpu = max(shape.size for shape in shapes), device.type == "cuda"
        self._block = torch.zeros(size, dtype=torch.int32, pin_memory=on_gpu)
        self._sent = torch.cuda.Event() if on_gpu else None
        self._fields = {
            shape.rows: StepFields(*(part.numpy() for part in cut_block(self._block, shape))) for shape in shapes
        }

    def begin(self, rows: int) -> StepFields:
        """Its parts for a step of so many rows, once what was sent last has left."""
        if self._sent is not None:
            self._sent.synchronize()
        return self._fields[rows]

    def send(self, target: Tensor, numbers: int) -> None:
        """Begins to copy so many numbers, from the first, to `target` on the device."""
        target[:numbers].copy_(self._block[:numbers], non_blocking=True)
        if self._sent is not None:
            self._sent.record()
