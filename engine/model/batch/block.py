"""The input of a captured step: one block of memory at a fixed address, filled by one copy. The LoRA lists come last,
with room for the largest; a step uploads only their beginning."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.model.batch.rows import HostBatch
from lora_kernels.pinned import HostBlock

# kv slots | row order | token ids | positions | contexts | sampler slots | query starts | sample rows | adapter slots |
# block tables | LoRA lists. Only steps with prompts have query starts and sample rows, only models with experts row
# order and adapter slots.

ALIGN = 4
"""Parts begin at multiples of this many int32, which are 16 bytes."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """The sizes that determine the layout of the input block of a captured step."""

    rows: int
    """Rows of the step, padding included."""
    max_blocks: int
    """Maximum length of a block table."""
    lora_numbers: int
    """Maximum number of int32 in the LoRA lists."""
    chunk_seqs: int = 0
    """Maximum number of sequences of a step with prompts. 0 means a decode-only step."""
    has_experts: bool = False
    """True means that the model has layers with experts."""

    @property
    def seqs(self) -> int:
        """Maximum number of sequences of a captured step."""
        return self.chunk_seqs or self.rows

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of int32 in each part of a captured step's input block, without alignment."""
        rows, seqs, starts = self.rows, self.seqs, self.chunk_seqs + 1 if self.chunk_seqs else 0
        slots = rows if self.has_experts else 0
        return (
            2 * rows, 2 * slots, rows, rows, seqs, rows, starts, self.chunk_seqs, slots, seqs * self.max_blocks,
            self.lora_numbers,
        )  # fmt: skip

    @property
    def starts(self) -> tuple[int, ...]:
        """Offsets, in int32, at which the parts of a captured step's input block begin, and at which the last one ends,
        all multiples of ALIGN."""
        return tuple(accumulate((-(-count // ALIGN) * ALIGN for count in self.counts), initial=0))

    @property
    def lora_start(self) -> int:
        """Number of int32 in the input block before the LoRA lists. Every step uploads all of these."""
        return self.starts[-2]

    @property
    def size(self) -> int:
        """Number of int32 in the input block of a captured step."""
        return self.starts[-1]


class StepFields(NamedTuple):
    """The parts of a captured step's input block: tensors on the device, numpy arrays on the host."""

    kv_slots: Any
    """int64 [rows]; -1 in padding rows, like `sampler_slots`."""
    row_order: Any
    """int64 [rows], the rows ordered by adapter slot, padding rows among those of the base model; empty without
    experts."""
    token_ids: Any
    positions: Any
    contexts: Any
    """int32 [seqs]; 0 in padding sequences."""
    sampler_slots: Any
    """`token_ids`, `positions` and `sampler_slots`: int32 [rows]."""
    query_starts: Any
    """int32 [chunk_seqs + 1]; the number of rows, without padding, after the last sequence."""
    sample_rows: Any
    """int32 [chunk_seqs]; 0 beyond the rows that are sampled from."""
    adapter_slots: Any
    """int32 [rows]; -1 in padding rows; empty without experts."""
    block_tables: Any
    """int32 [seqs, max_blocks]."""
    lora: Any
    """int32 [lora_numbers]. See `LoraWorkspace.meta`."""


def cut_block(block: Tensor, shape: StepShape) -> StepFields:
    """Return the parts of a captured step's input block, int32 [at least shape.size], as views."""
    parts = [block[start : start + count] for start, count in zip(shape.starts, shape.counts, strict=False)]
    parts[:2] = [part.view(torch.int64) for part in parts[:2]]
    parts[-2] = parts[-2].view(shape.seqs, shape.max_blocks)
    return StepFields(*parts)


def write_rows(fields: StepFields, batch: HostBatch) -> None:
    """Write a batch, decode-only if the block has no query starts, to a captured step's input block on the host. Rows
    and sequences beyond it become padding; block table entries that no kernel reads keep their values."""
    parts: list[tuple[Any, Any, int]] = [
        (fields.kv_slots, batch.kv_slots, -1),
        (fields.token_ids, batch.token_ids, 0),
        (fields.positions, batch.positions, 0),
        (fields.contexts, batch.contexts, 0),
        (fields.sampler_slots, batch.sampler_slots, -1),
    ]
    if len(fields.query_starts):
        parts += [(fields.query_starts, batch.query_starts, batch.num_rows), (fields.sample_rows, batch.sample_rows, 0)]
    for target, source, padding in parts:
        target[: len(source)] = source
        target[len(source) :] = padding
    seqs, blocks = batch.block_tables.shape
    fields.block_tables[:seqs, :blocks] = batch.block_tables


def write_adapters(fields: StepFields, batch: HostBatch) -> None:
    """Write the adapter slot of each row, and the order of rows by adapter slot, to the input block of a captured step.
    Does nothing for a model without experts."""
    rows = len(fields.adapter_slots)
    if rows:
        fields.adapter_slots[:] = slots = batch.segments.slots_of_rows(rows)
        fields.row_order[:] = np.argsort(slots, kind="stable")


class HostSteps:
    """The host's copy of the input block of captured steps: the host fills the parts that the layout of a step shape
    gives it, and sends them."""

    def __init__(self, shapes: tuple[StepShape, ...], device: torch.device) -> None:
        self._block = HostBlock(max(shape.size for shape in shapes), device)
        self._fields = {
            shape: StepFields(*(part.numpy() for part in cut_block(self._block.numbers, shape))) for shape in shapes
        }

    def begin(self, shape: StepShape) -> StepFields:
        """Wait until the last `send` has been copied, and return the parts of the host's input block for a step of
        `shape`, to be filled."""
        self._block.wait()
        return self._fields[shape]

    def send(self, target: Tensor, count: int) -> None:
        """Start to copy the first `count` int32 of the host's input block to `target` on the device. Does not wait for
        a GPU."""
        self._block.send(target, count)
