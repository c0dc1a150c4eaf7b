"""Chooses the step sizes (rungs) for which CUDA graphs are captured."""

from __future__ import annotations

from engine.model.batch.block import StepShape
from lora_kernels.gpu.triton_lora_plan import workspace_numbers
from lora_kernels.gpu.triton_lora_tuning import LoraTuning

FIRST_RUNGS = (1, 2, 4)
LEAST_RUNG = 8
RUNGS_AN_OCTAVE = 8
CHUNK_RUNG = 128
"""Rows between the sizes of steps with prompts. Matrix products of that many rows cost little more than reading the
weights, and beyond it their own tiles are mostly 128 rows high."""
LARGEST_CHUNKS = 1024
"""Rows of the largest step with prompts that is captured. A larger one takes the device longer than its launches take
the host."""


def ladder(max_rows: int) -> tuple[int, ...]:
    """Return ascending sizes (rows) for which decode-only steps are captured as CUDA graphs, of which `max_rows` is the
    last: 1, 2, 4, then multiples of 8 up to 128, then such that padding is at most an eighth."""
    rungs = [rung for rung in FIRST_RUNGS if rung < max_rows]
    rung = LEAST_RUNG
    while rung < max_rows:
        rungs.append(rung)
        rung += max(LEAST_RUNG, (1 << (rung.bit_length() - 1)) // RUNGS_AN_OCTAVE)
    return (*rungs, max_rows)


def chunk_ladder(token_budget: int) -> tuple[int, ...]:
    """Return ascending sizes (rows) for which steps with prompts of up to `token_budget` rows are captured: multiples
    of 128 up to 1,024 or the budget, none if no step has two rows."""
    last = min(token_budget, LARGEST_CHUNKS)
    return (*range(CHUNK_RUNG, last, CHUNK_RUNG), last) if last > 1 else ()


def step_shapes(
    max_seqs: int, token_budget: int, max_blocks: int, tuning: LoraTuning, has_experts: bool
) -> tuple[StepShape, ...]:
    """Return the shapes of all steps that are captured as CUDA graphs, the largest first: those of steps with prompts
    and of decode-only steps. A sequence has up to `max_blocks` blocks."""
    shapes = [
        StepShape(rows, max_blocks, workspace_numbers(rows), has_experts=has_experts) for rows in ladder(max_seqs)
    ]
    for rows in chunk_ladder(token_budget):
        seqs = min(rows, max_seqs)
        numbers = workspace_numbers(rows, max_segments=seqs, tuning=tuning)
        shapes.append(StepShape(rows, max_blocks, numbers, seqs, has_experts))
    return tuple(sorted(shapes, key=lambda shape: shape.rows, reverse=True))


def num_graphs(shapes: tuple[StepShape, ...], tuning: LoraTuning) -> int:
    """Return the number of CUDA graphs for steps of these shapes. Each shape has one without LoRA, one with it, and one
    for long segments where a step may have any."""
    return sum(2 + has_long(shape, tuning) for shape in shapes)


def has_long(shape: StepShape, tuning: LoraTuning) -> bool:
    """Return whether a step of this shape may have a LoRA segment of `long_from` rows or more (see `LoraTuning`), for
    which it gets a CUDA graph of its own."""
    return shape.chunk_seqs > 0 and shape.rows >= tuning.long_from
