"""Captures decode-only steps as CUDA graphs, which launch everything between a step's upload and its logits at once.

A ladder of batch sizes has two graphs for each rung, from embedding to logits: one for steps with adapters, and one
for steps without. A step takes the lowest rung that it fits and pads it. Everything that a graph reads has a fixed
address: weights, pages, the adapter table, and one block for the input that changes with each step (step_block.py). So
a graph serves any set of adapters without DoRA, and any contexts. Sampling is launched after it, because the masks of
grammars are known only while the logits are computed. Numbers are in docs/kernels-graphs.md.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from engine.model.arena import Arena
from engine.model.batch import BatchInput, HostBatch, known_ids
from engine.model.decoder import Decoder
from engine.model.lora import LoraStep
from engine.model.sampling import SlotSampler
from engine.model.step_block import HostBlock, StepFields, StepShape, cut_block, write_rows
from lora_kernels.backend import AttentionBatch
from lora_kernels.gpu.triton_backend import TritonBackend
from lora_kernels.gpu.triton_lora_plan import LoraWorkspace, make_sums, workspace_numbers
from lora_kernels.segments import plan_segments

FIRST_RUNGS = (1, 2, 4)
LEAST_RUNG = 8
RUNGS_AN_OCTAVE = 8
NO_ADAPTERS = plan_segments(np.empty(0, dtype=np.int32))

Replay = Callable[[], None]
"""Function that launches recorded work again."""


class LaunchRecorder(Protocol):
    """Records launches so that they can be replayed."""

    def record(self, launch: Callable[[], None]) -> Replay:
        """Calls `launch`, records its kernel launches, and returns a function that launches them again. `launch` may be
        called more than once, and its launches may change only memory that the next replay overwrites."""


class CudaRecorder:
    """Records CUDA graphs that share one memory pool: they must be replayed one by one and keep no results in the
    pool."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, launch: Callable[[], None]) -> Replay:
        """Calls `launch` once to compile kernels and set up libraries, and again to capture its launches in a CUDA
        graph, on a stream of its own. Returns a function that launches the graph."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            launch()
        graph = torch.cuda.CUDAGraph()
        # thread_local, because threads that load adapters may pin memory during the capture.
        with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
            launch()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return graph.replay


def ladder(max_rows: int) -> tuple[int, ...]:
    """Returns ascending step sizes (rows), of which `max_rows` is the last: 1, 2, 4, then multiples of 8 up to 128,
    then such that padding is at most an eighth."""
    rungs = [rung for rung in FIRST_RUNGS if rung < max_rows]
    rung = LEAST_RUNG
    while rung < max_rows:
        rungs.append(rung)
        rung += max(LEAST_RUNG, (1 << (rung.bit_length() - 1)) // RUNGS_AN_OCTAVE)
    return (*rungs, max_rows)


@dataclass(frozen=True, slots=True)
class StepParts:
    """The objects that compute a step on a GPU: model, pages, kernels and sampler."""

    decoder: Decoder
    arena: Arena
    backend: TritonBackend
    sampler: SlotSampler


@dataclass(frozen=True, slots=True)
class Rung:
    """A step size, with the layout of its input block, its LoRA workspace and its two graphs."""

    shape: StepShape
    workspace: LoraWorkspace
    plain: Replay
    with_adapters: Replay


class StepGraphs:
    """The CUDA graphs of decode-only steps, two for each rung (step size). Creating the object captures them, the
    largest rung first; `launch` replays them.

    Args:
        max_rows: rows of the largest step.
        max_model_len: tokens of the longest possible context.
        on_graph: called with the number of graphs captured so far, and the number of all graphs.
    """

    def __init__(
        self,
        parts: StepParts,
        recorder: LaunchRecorder,
        max_rows: int,
        max_model_len: int,
        on_graph: Callable[[int, int], None] = lambda *_: None,
    ) -> None:
        spec, arena, device = parts.decoder.spec, parts.arena, parts.arena.pages.device
        self.rungs = ladder(max_rows)
        self._parts, self._recorder, self._max_context = parts, recorder, max_model_len
        max_blocks = -(-max_model_len // arena.shape.block_size)
        shapes = tuple(StepShape(rows, max_blocks, workspace_numbers(rows)) for rows in self.rungs)
        self._block = torch.zeros(max(shape.size for shape in shapes), dtype=torch.int32, device=device)
        self._host_blocks = cycle((HostBlock(shapes, device), HostBlock(shapes, device)))
        self._logits = torch.zeros(max_rows, spec.vocab_size, dtype=arena.pages.dtype, device=device)
        self._query_starts = torch.arange(max_rows + 1, dtype=torch.int32, device=device)
        self._sums = make_sums(max_rows, device)
        parts.backend.paged_attention.reserve(max_rows, spec.heads, arena.kv(0))
        self._captured = self._capture(shapes, on_graph)

    def fits(self, batch: HostBatch) -> bool:
        """Returns whether a step can be replayed: all rows decode, there are at most `max_rows` of them, and no adapter
        scales outputs (DoRA), because those launches depend on which rows are scaled."""
        is_scaled = self._parts.arena.table.has_scales[batch.segments.adapter_slots].any()
        return batch.is_decoding and batch.num_rows <= self.rungs[-1] and not is_scaled

    @torch.inference_mode()
    def launch(self, batch: HostBatch) -> Tensor:
        """Uploads a step that fits, pads it to the next rung, and replays its graph. Returns the logits of its rows,
        [num_rows, vocab_size], which are valid until the next step. The host does not wait, and may begin the next step
        at once. Raises ValueError if the step does not fit."""
        if not self.fits(batch):
            raise ValueError(f"a step of {batch.num_rows} rows does not fit any graph")
        arena = self._parts.arena
        rung = self._captured[bisect_left(self.rungs, batch.num_rows)]
        has_adapters = bool(arena.table.max_ranks[batch.segments.adapter_slots].any())
        self._upload(rung, batch, has_adapters)
        arena.copies.wait(self._parts.decoder.spec.layers - 1)
        (rung.with_adapters if has_adapters else rung.plain)()
        return self._logits[: batch.num_rows]

    def _upload(self, rung: Rung, batch: HostBatch, has_adapters: bool) -> None:
        """Uploads the padded input of a step in one copy. Two blocks on the host alternate: one is filled while the
        other is copied."""
        block, numbers = next(self._host_blocks), rung.shape.lora_start
        fields = block.begin(rung.shape.rows)
        write_rows(fields, batch)
        if has_adapters:
            backend, table = self._parts.backend, self._parts.arena.table
            numbers += backend.fill_lora(fields.lora, rung.workspace, table, batch.segments)
        block.send(self._block, numbers)

    @torch.inference_mode()
    def _capture(self, shapes: tuple[StepShape, ...], on_graph: Callable[[int, int], None]) -> tuple[Rung, ...]:
        """Captures and returns all rungs. The largest is captured first, so that smaller ones find all their memory in
        the pool."""
        rungs: list[Rung] = []
        for done, shape in enumerate(reversed(shapes)):
            on_graph(2 * done, 2 * len(shapes))
            rungs.append(self._capture_rung(shape))
        on_graph(2 * len(shapes), 2 * len(shapes))
        return tuple(reversed(rungs))

    def _capture_rung(self, shape: StepShape) -> Rung:
        """Captures both graphs of a rung. The block holds only padding meanwhile: no page is read or written."""
        fields, backend, arena = cut_block(self._block, shape), self._parts.backend, self._parts.arena
        self._block.zero_()
        fields.kv_slots.fill_(-1)
        fields.sampler_slots.fill_(-1)
        workspace = LoraWorkspace(shape.rows, self._block.device, meta=fields.lora, sums=self._sums)
        prepared = backend.record_lora(arena.flat, arena.table, workspace)
        with_adapters, plain = (
            self._recorder.record(partial(self._step, fields, self._batch_input(fields), LoraStep(backend, lora)))
            for lora in (prepared, None)
        )
        return Rung(shape, workspace, plain, with_adapters)

    def _step(self, fields: StepFields, batch: BatchInput, lora: LoraStep) -> None:
        """Computes a step's logits into `_logits`, while it is recorded. No launch depends on contents of device
        memory."""
        parts, rows = self._parts, len(fields.token_ids)
        ids = known_ids(fields.token_ids, fields.sampler_slots, parts.sampler.last_tokens)
        logits = parts.decoder.forward(replace(batch, token_ids=ids), parts.arena, parts.backend, lora)
        # Copied out of the pool, where otherwise every graph would need room for results of its own.
        self._logits[:rows].copy_(logits)

    def _batch_input(self, fields: StepFields) -> BatchInput:
        """Returns the input of a captured step: views of the block, and numbers on the host: every row is a decode, and
        every context is taken to be the longest possible."""
        rows = len(fields.token_ids)
        attention = AttentionBatch(
            query_starts=self._query_starts[: rows + 1],
            context_lens=fields.contexts,
            block_tables=fields.block_tables,
            kv_slots=fields.kv_slots,
            num_decodes=rows,
            max_query=1,
            max_context=self._max_context,
            host_query_starts=tuple(range(rows + 1)),
            host_context_lens=(self._max_context,) * rows,
        )
        return BatchInput(fields.token_ids, fields.positions, attention, NO_ADAPTERS, None, ("",) * rows)
