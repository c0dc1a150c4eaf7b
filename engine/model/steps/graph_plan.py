"""Plans which steps are captured as CUDA graphs when an engine starts, and estimates the device memory they need. The
estimate is reserved before the page pool takes the rest, and compared with what capturing took in the end."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial

import structlog
import torch

from engine.config import EngineConfig
from engine.model.decode.decoder import Decoder
from engine.model.memory.allocation import Progress
from engine.model.memory.arena import Arena, PageShape
from engine.model.sample.scorer import slice_bytes
from engine.model.sample.slot_sampler import SlotSampler
from engine.model.spec.config import ModelSpec
from engine.model.steps.graphs import CudaRecorder, StepGraphs, StepParts
from engine.model.steps.rungs import LARGEST_CHUNKS, num_graphs, step_shapes
from lora_kernels.backend import Backend
from lora_kernels.gpu.triton_attention import decode_tuning, find_processor, prefill_tuning
from lora_kernels.gpu.triton_backend import TritonBackend
from lora_kernels.gpu.triton_decode import DecodeTuning, workspace_bytes
from lora_kernels.gpu.triton_lora_plan import MAX_PARTS
from lora_kernels.gpu.triton_lora_tuning import SHIPPED, LoraTuning
from lora_kernels.gpu.triton_prefill_plan import PrefillTuning, largest_room
from lora_kernels.gpu.triton_sampling import work_bytes
from lora_kernels.layout import MAX_RANK, RANK_TILE

log = structlog.get_logger("graphs")

MIB = 1 << 20
GRAPH_BYTES = 8 * MIB
"""Bytes that the driver keeps for a graph of some hundred launches: an assumption until it is measured on a GPU."""
SLACK_BYTES = 160 * MIB
"""Bytes for cuBLAS's workspace on the capture stream (32 MiB on Hopper), for a piece of a quantised weight (64 MiB) and
for rounding by torch's allocator."""


@dataclass(frozen=True, slots=True)
class Captured:
    """The captured CUDA graphs of steps; the `seconds` and the bytes of device memory (`num_bytes`) that capturing
    took; and the bytes that had been `reserved` for it."""

    graphs: StepGraphs
    seconds: float
    num_bytes: int
    reserved: int


@dataclass(frozen=True, slots=True)
class GraphPlan:
    """A plan for the CUDA graphs of steps up to the given sizes, captured after all memory that they use is allocated.
    `reserved` estimates the bytes of device memory that they take."""

    backend: TritonBackend
    max_seqs: int
    token_budget: int
    max_model_len: int
    reserved: int

    def capture(self, decoder: Decoder, arena: Arena, sampler: SlotSampler, progress: Progress) -> Captured:
        """Capture the planned CUDA graphs and return them. Calls `progress` with the numbers of graphs captured so far
        and of all graphs. Logs the time and memory that capturing took, as a warning if the memory exceeds
        `reserved`."""
        device, started = arena.pages.device, time.perf_counter()
        before = _free_bytes(device)
        parts = StepParts(decoder, arena, self.backend, sampler)
        tell_graph = partial(progress, "capturing graphs")
        sizes = (self.max_seqs, self.max_model_len, self.token_budget)
        graphs = StepGraphs(parts, CudaRecorder(device), *sizes, tell_graph)
        taken, seconds = before - _free_bytes(device), round(time.perf_counter() - started, 2)
        tell = log.warning if taken > self.reserved else log.info
        rungs = {"rungs": len(graphs.rungs), "chunk_rungs": len(graphs.chunk_rungs)}
        tell("captured graphs", **rungs, seconds=seconds, bytes=taken, reserved=self.reserved)
        return Captured(graphs, seconds, taken, self.reserved)


def make_plan(
    config: EngineConfig, spec: ModelSpec, shape: PageShape, dtype: torch.dtype, backend: Backend, max_model_len: int
) -> GraphPlan:
    """Plan the CUDA graphs of every step that the configuration allows (with prompts, up to 1,024 rows), and estimate
    their memory. Raises TypeError if the backend is not Triton's."""
    if not isinstance(backend, TritonBackend):
        raise TypeError(f"steps are captured with the Triton backend, not with {backend.name}")
    kv = torch.empty(0, spec.head_dim, dtype=torch.float8_e4m3fn if shape.fp8_kv else dtype, device="cuda")
    tunings = GraphTunings(
        backend.paged_attention.decode_tuning(kv), backend.paged_attention.prefill_tuning(kv), backend.lora_tuning
    )
    sizes = (config.max_seqs, config.token_budget, max_model_len)
    return GraphPlan(backend, *sizes, graph_bytes(spec, dtype, tunings, *sizes, shape.block_size))


@dataclass(frozen=True, slots=True)
class GraphTunings:
    """The tunings that decide how much memory captured kernels use."""

    decode: DecodeTuning
    prefill: PrefillTuning
    lora: LoraTuning


def graph_bytes(
    spec: ModelSpec,
    dtype: torch.dtype,
    tunings: GraphTunings,
    max_seqs: int,
    token_budget: int,
    max_model_len: int,
    block_size: int,
) -> int:
    """Estimate the bytes of device memory that all graphs need, their buffers, and sampling after them, in addition to
    weights and pages: see `GraphPlan` for the sizes."""
    has_experts = spec.experts is not None
    shapes = step_shapes(max_seqs, token_budget, -(-max_model_len // block_size), tunings.lora, has_experts)
    chunk_rows = max((shape.rows for shape in shapes if shape.chunk_seqs), default=0)
    group, rows = spec.heads // spec.kv_heads, shapes[0].rows
    room = largest_room(chunk_rows, max_seqs, max_model_len, group, spec.kv_heads, tunings.prefill)
    at_fixed_addresses = (
        workspace_bytes(max_seqs, spec.heads, spec.head_dim, tunings.decode)
        + 4 * room.parts * spec.heads * (spec.head_dim + 2)
        + 4 * MAX_PARTS * rows * MAX_RANK
        + 4 * max(shape.size for shape in shapes)
        + (max_seqs * spec.vocab_size + rows * spec.hidden_size) * dtype.itemsize
    )
    plans = 4 * (6 * room.items + 3 * room.rows + 2) * len(set(spec.windows))
    graphs = num_graphs(shapes, tunings.lora) * GRAPH_BYTES
    plans += _expert_lora_bytes(spec, tunings.lora, rows)
    beside = plans + work_bytes(max_seqs, spec.vocab_size) + slice_bytes(spec.vocab_size, dtype)
    return at_fixed_addresses + beside + _pool_bytes(spec, dtype, rows, max_seqs) + graphs + SLACK_BYTES


def may_capture(config: EngineConfig) -> bool:
    """Return whether the configuration allows steps to be captured as CUDA graphs. It does not with several pipeline
    stages, which launch their steps kernel by kernel."""
    return config.graphs and config.pipeline_parallel == 1


def expected_bytes(
    config: EngineConfig,
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
    max_seqs: int,
    token_budget: int,
) -> int:
    """Estimate, before a backend exists, the bytes of device memory that steps of up to 1,024 rows need in addition to
    weights and pages: `graph_bytes` with the device's default tunings or, without graphs, the results of a step."""
    if not may_capture(config):
        rows = min(token_budget, LARGEST_CHUNKS)
        work = work_bytes(max_seqs, spec.vocab_size) + slice_bytes(spec.vocab_size, dtype)
        work += _expert_lora_bytes(spec, SHIPPED, rows)
        return _pool_bytes(spec, dtype, rows, max_seqs) + work + SLACK_BYTES
    kv_dtype, processor = torch.float8_e4m3fn if config.kv_dtype == "fp8" else dtype, find_processor(device)
    tunings = GraphTunings(
        decode_tuning(spec.head_dim, kv_dtype, processor), prefill_tuning(spec.head_dim, kv_dtype, processor), SHIPPED
    )
    return graph_bytes(spec, dtype, tunings, max_seqs, token_budget, max_model_len, config.block_size)


def row_bytes(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Upper bound, in bytes, of the intermediate results of one row of a step, assuming that none is freed before its
    layer ends."""
    layer = 5 * spec.hidden_size + 2 * spec.query_width + 2 * spec.kv_width + 3 * spec.intermediate_size
    if spec.experts:
        layer += spec.experts.top_k * (2 * spec.hidden_size + 3 * spec.experts.width)
    return layer * dtype.itemsize + 6 * 4 * spec.head_dim * len(set(spec.ropes))  # with angles, in float32


def _expert_lora_bytes(spec: ModelSpec, tuning: LoraTuning, rows: int) -> int:
    """Return the bytes of the tile lists and partial sums that LoRA on the experts of one layer needs in a step of
    `rows`. 0 for a model without experts."""
    if spec.experts is None:
        return 0
    parts = 2 * tuning.num_splits(max(spec.hidden_size, spec.experts.width))
    return rows * spec.experts.top_k * (4 * parts * MAX_RANK + 2 * 16 * (1 + MAX_RANK // RANK_TILE))


def _pool_bytes(spec: ModelSpec, dtype: torch.dtype, rows: int, samples: int) -> int:
    """Upper bound, in bytes, of the memory pool that captured CUDA graphs share: the largest step's intermediate
    results. Graphs of smaller steps reuse the pool."""
    return rows * row_bytes(spec, dtype) + samples * (spec.hidden_size + spec.vocab_size) * dtype.itemsize


def _free_bytes(device: torch.device) -> int:
    """Wait for the device, make torch release cached memory, and return the free bytes of the device."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]
