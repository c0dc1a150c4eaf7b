"""Captures steps as CUDA graphs, which launch everything between a step's upload and its logits at once, on two ladders
of step sizes (steps/rungs.py), each with adapters and without. docs/kernels-graphs.md has the numbers."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from typing import Protocol

import numpy as np
import torch

from engine.model.batch.block import HostSteps, StepFields, StepShape, cut_block, write_adapters, write_rows
from engine.model.batch.rows import BatchInput, HostBatch, known_ids
from engine.model.decode.decoder import Decoder, StepOutput
from engine.model.layers.lora import LoraOfExperts, LoraStep
from engine.model.memory.arena import Arena
from engine.model.sample.slot_sampler import SlotSampler
from engine.model.steps.rungs import has_long, num_graphs, step_shapes
from lora_kernels.backend import AttentionBatch
from lora_kernels.gpu.triton_backend import TritonBackend
from lora_kernels.gpu.triton_lora_plan import LoraWorkspace, make_sums
from lora_kernels.layout import MAX_RANK
from lora_kernels.routing import RowAdapters
from lora_kernels.segments import plan_segments

# Everything that a graph reads has a fixed address: weights, pages, the adapter table, and one block for the input
# (batch/block.py). So a graph serves any adapters without DoRA, contexts, and chunks. Sampling is launched after it,
# because the masks of grammars are known only while the logits are computed.

NO_ADAPTERS = plan_segments(np.empty(0, dtype=np.int32))

Replay = Callable[[], None]
"""Function that launches recorded work again."""


class LaunchRecorder(Protocol):
    """Protocol of a recorder of kernel launches, which can then be replayed: see `CudaRecorder`."""

    def record(self, launch: Callable[[], None]) -> Replay:
        """Call `launch`, record its kernel launches, and return a function that launches them again. `launch` may be
        called more than once, and its launches may change only memory that the next replay overwrites."""


class CudaRecorder:
    """Records CUDA graphs that share one memory pool: they must be replayed one by one and keep no results in the
    pool."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, launch: Callable[[], None]) -> Replay:
        """Call `launch` once to compile kernels and set up libraries, and again to capture its launches in a CUDA
        graph, on a stream of its own. Return a function that launches the graph."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            launch()
        graph = torch.cuda.CUDAGraph()
        # thread_local, so that what other threads ask of the driver meanwhile does not end the capture.
        with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
            launch()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return graph.replay


@dataclass(frozen=True, slots=True)
class StepParts:
    """The objects that compute a step on a GPU: model, pages, kernels and sampler."""

    decoder: Decoder
    arena: Arena
    backend: TritonBackend
    sampler: SlotSampler


@dataclass(frozen=True, slots=True)
class Rung:
    """A step size for which graphs are captured: the layout of its input block, its LoRA workspace, and its graphs
    without adapters, with adapters, and with long segments, or None."""

    shape: StepShape
    workspace: LoraWorkspace
    plain: Replay
    with_adapters: Replay
    with_long: Replay | None


class StepGraphs:
    """The CUDA graphs of steps up to `max_seqs` sequences, `max_model_len` tokens and some of `token_budget` rows.
    Creating the object captures them, largest first, and calls `on_graph` with their number so far and in all."""

    def __init__(
        self,
        parts: StepParts,
        recorder: LaunchRecorder,
        max_seqs: int,
        max_model_len: int,
        token_budget: int,
        on_graph: Callable[[int, int], None] = lambda *_: None,
    ) -> None:
        spec, arena, device = parts.decoder.spec, parts.arena, parts.arena.pages.device
        self._parts, self._recorder, self._max_context = parts, recorder, max_model_len
        max_blocks = -(-max_model_len // arena.shape.block_size)
        tuning, has_experts = parts.backend.lora_tuning, spec.experts is not None
        shapes = step_shapes(max_seqs, token_budget, max_blocks, tuning, has_experts)
        self._block = torch.zeros(max(shape.size for shape in shapes), dtype=torch.int32, device=device)
        self._host_blocks = cycle((HostSteps(shapes, device), HostSteps(shapes, device)))
        self._logits = torch.zeros(max_seqs, spec.vocab_size, dtype=arena.pages.dtype, device=device)
        self._residual = torch.zeros(shapes[0].rows, spec.hidden_size, dtype=arena.pages.dtype, device=device)
        self._query_starts = torch.arange(max_seqs + 1, dtype=torch.int32, device=device)
        self._sums = make_sums(shapes[0].rows, device)
        chunk_rows = max((shape.rows for shape in shapes if shape.chunk_seqs), default=0)
        parts.backend.paged_attention.reserve(max_seqs, spec.heads, arena.kv(0), chunk_rows, max_model_len)
        captured = self._capture(shapes, on_graph)
        self._decodes = tuple(rung for rung in captured if not rung.shape.chunk_seqs)
        self._chunks = tuple(rung for rung in captured if rung.shape.chunk_seqs)

    @property
    def rungs(self) -> tuple[int, ...]:
        """Return the numbers of rows for which decode-only steps are captured, ascending. A smaller step is padded to
        the next one."""
        return tuple(rung.shape.rows for rung in self._decodes)

    @property
    def chunk_rungs(self) -> tuple[int, ...]:
        """Return the numbers of rows for which steps with prompts are captured, ascending. A smaller step is padded to
        the next one."""
        return tuple(rung.shape.rows for rung in self._chunks)

    def find(self, batch: HostBatch) -> Rung | None:
        """Return the lowest rung (captured step size) that a step fits, or None, as for adapters that scale outputs
        (DoRA) or have trained tokens, whose launches depend on their rows."""
        rungs = self._decodes if batch.is_decoding else self._chunks
        index = bisect_left(rungs, batch.num_rows, key=lambda rung: rung.shape.rows)
        if index == len(rungs) or len(batch.contexts) > rungs[index].shape.seqs:
            return None
        table = self._parts.arena.table
        is_scaled = table.has_scales[batch.segments.adapter_slots].any()
        return None if is_scaled or table.replaces_tokens(batch.segments) else rungs[index]

    @torch.inference_mode()
    def launch(self, batch: HostBatch, rung: Rung) -> StepOutput:
        """Upload a step, pad it to the rung that `find` returned for it, and replay its graph. The host does not wait,
        and may begin the next step at once."""
        arena = self._parts.arena
        has_adapters = bool(arena.table.max_ranks[batch.segments.adapter_slots].any())
        self._upload(rung, batch, has_adapters)
        arena.copies.wait(self._parts.decoder.spec.layers - 1)
        self._graph(rung, batch, has_adapters)()
        return StepOutput(self._logits[: len(batch.sample_ids)], self._residual[: batch.num_rows])

    def _graph(self, rung: Rung, batch: HostBatch, has_adapters: bool) -> Replay:
        if not has_adapters:
            return rung.plain
        is_long = batch.segments.lengths.max() >= rung.workspace.long_from
        return rung.with_long if rung.with_long and is_long else rung.with_adapters

    def _upload(self, rung: Rung, batch: HostBatch, has_adapters: bool) -> None:
        """Upload the padded input of a step in one copy. Two blocks on the host alternate: one is filled while the
        other is copied."""
        block, numbers = next(self._host_blocks), rung.shape.lora_start
        fields = block.begin(rung.shape)
        write_rows(fields, batch)
        if has_adapters:
            write_adapters(fields, batch)
            backend, table = self._parts.backend, self._parts.arena.table
            numbers += backend.fill_lora(fields.lora, rung.workspace, table, batch.segments)
        block.send(self._block, numbers)

    @torch.inference_mode()
    def _capture(self, shapes: tuple[StepShape, ...], on_graph: Callable[[int, int], None]) -> list[Rung]:
        """Capture the CUDA graphs of all `shapes`, in their order: the largest first, so that smaller ones find all
        their memory in the pool. Return the rungs in ascending order."""
        rungs: list[Rung] = []
        tuning = self._parts.backend.lora_tuning
        total = num_graphs(shapes, tuning)
        for index, shape in enumerate(shapes):
            on_graph(num_graphs(shapes[:index], tuning), total)
            rungs.append(self._capture_rung(shape))
        on_graph(total, total)
        return rungs[::-1]

    def _capture_rung(self, shape: StepShape) -> Rung:
        """Capture the CUDA graphs of one step size: without adapters, with them and, where possible, with long LoRA
        segments. The input block holds only padding meanwhile, so that no page is read or written."""
        fields, backend, arena = cut_block(self._block, shape), self._parts.backend, self._parts.arena
        self._block.zero_()
        fields.kv_slots.fill_(-1)
        fields.sampler_slots.fill_(-1)
        fields.adapter_slots.fill_(-1)
        fields.row_order.copy_(torch.arange(len(fields.row_order)))
        workspace = LoraWorkspace(
            shape.rows,
            self._block.device,
            meta=fields.lora,
            sums=self._sums,
            max_segments=shape.chunk_seqs or None,
            tuning=backend.lora_tuning,
        )

        def record(lora: LoraStep) -> Replay:
            batch = self._batch_input(fields)
            return self._recorder.record(partial(self._step, fields, batch, lora))

        def with_adapters(*, long: bool) -> LoraStep:
            prepared = backend.record_lora(arena.flat, arena.table, workspace, has_long=long)
            return LoraStep(backend, prepared, of_experts=self._lora_of_experts(fields, long=long))

        can_be_long = has_long(shape, backend.lora_tuning)
        long = record(with_adapters(long=True)) if can_be_long else None
        short = record(with_adapters(long=False))
        return Rung(shape, workspace, record(LoraStep(backend, None)), short, long)

    def _lora_of_experts(self, fields: StepFields, *, long: bool) -> LoraOfExperts | None:
        """Return the LoRA work on experts of a captured step, whose rows may have any adapters. Segments are shorter
        than `long_from` rows (see `LoraTuning`) unless `long`. None means that the model has no experts."""
        arena, rows = self._parts.arena, len(fields.adapter_slots)
        if not rows:
            return None
        max_rows = rows if long else min(rows, self._parts.backend.lora_tuning.long_from - 1)
        return LoraOfExperts(
            arena.flat, arena.table, RowAdapters(fields.adapter_slots, fields.row_order, MAX_RANK, max_rows)
        )

    def _step(self, fields: StepFields, batch: BatchInput, lora: LoraStep) -> None:
        """Compute a step's logits into `_logits` and its residual stream in `_residual`, while it is recorded. No
        launch depends on contents of device memory."""
        parts = self._parts
        ids = known_ids(fields.token_ids, fields.sampler_slots, parts.sampler.last_tokens)
        # A batch of its own for each call, because attention is planned once for each batch.
        batch = replace(batch, token_ids=ids, attention=replace(batch.attention))
        step = parts.decoder.step(batch, parts.arena, parts.backend, lora)
        x = parts.decoder.embedded(batch, step, self._residual[: len(ids)])
        logits = parts.decoder.head.finish(parts.decoder.outputs(x, step, batch.sample_rows))
        # Copied out of the pool, where otherwise every graph would need room for results of its own.
        self._logits[: len(logits)].copy_(logits)

    def _batch_input(self, fields: StepFields) -> BatchInput:
        """Return the input with which a step is captured: views of the block of device memory that every replay fills
        anew."""
        # Numbers on the host are fixed at capture: every context counts as the longest possible, and in a step with
        # prompts any sequence may have any number of rows.
        rows, seqs, has_chunks = len(fields.token_ids), len(fields.contexts), len(fields.query_starts) > 0
        attention = AttentionBatch(
            query_starts=fields.query_starts if has_chunks else self._query_starts[: rows + 1],
            context_lens=fields.contexts,
            block_tables=fields.block_tables,
            kv_slots=fields.kv_slots,
            num_decodes=seqs,
            max_query=rows if has_chunks else 1,
            max_context=self._max_context,
            host_query_starts=(0,) * (seqs + 1) if has_chunks else tuple(range(rows + 1)),
            host_context_lens=(self._max_context,) * seqs,
        )
        sample_rows = fields.sample_rows if has_chunks else None
        return BatchInput(fields.token_ids, fields.positions, attention, NO_ADAPTERS, sample_rows, ("",) * seqs)
