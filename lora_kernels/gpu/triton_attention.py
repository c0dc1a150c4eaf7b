"""Paged attention of any batch on a GPU: dispatches single rows to decode and chunks to prefill, and keeps the plans
that the layers of a step share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lora_kernels.backend import AttentionBatch, Scores
from lora_kernels.gpu.triton_context import FP8, AttentionCall, block_width
from lora_kernels.gpu.triton_decode import DecodeTuning, DecodeWorkspace, decode, make_workspace
from lora_kernels.gpu.triton_partials import Partials, make_partials
from lora_kernels.gpu.triton_prefill import prefill
from lora_kernels.gpu.triton_prefill_plan import PrefillPlan, PrefillTuning, largest_room, plan_prefill

BLOCK_ELEMENTS = 8192
"""Numbers in a block of K or V that a decode program reads at once: 16 KiB in 16 bits."""
LARGEST_BLOCK = 128
EXTRA_BYTES = 8 << 10
"""Shared memory, in bytes, that a decode program needs besides its blocks: query, weights, layout changes, and the
driver's share."""


@dataclass(frozen=True, slots=True)
class Processor:
    """The device properties that determine default tunings."""

    count: int
    """Number of multiprocessors."""
    shared_bytes: int
    """Shared memory of each multiprocessor."""
    capability: int
    """Compute capability, 90 for 9.0."""


INTERPRETED = Processor(count=2, shared_bytes=164 << 10, capability=80)
"""The processor assumed under Triton's interpreter. It has so few multiprocessors that every program has several items
of work."""


def find_processor(device: torch.device) -> Processor:
    if device.type != "cuda":
        return INTERPRETED
    found = torch.cuda.get_device_properties(device)
    capability = 10 * found.major + found.minor
    return Processor(found.multi_processor_count, found.shared_memory_per_multiprocessor, capability)


def decode_tuning(head_dim: int, dtype: torch.dtype, processor: Processor) -> DecodeTuning:
    """Return the default decode tuning for KV of `dtype` on a GPU."""
    # Three blocks of K and V in shared memory, or two if more programs fit then: on an H200 with heads of 128 in bf16,
    # three programs of two blocks took 0.85 of the time of two programs of three.
    block_d = block_width(head_dim)
    block_n = min(LARGEST_BLOCK, BLOCK_ELEMENTS // block_d)
    block_bytes = 2 * block_n * block_d * dtype.itemsize
    fitting = {stages: processor.shared_bytes // ((stages - 1) * block_bytes + EXTRA_BYTES) for stages in (4, 3)}
    by_registers = 2 if block_d > 128 or dtype == FP8 else 3
    side_by_side = {stages: min(count, by_registers) for stages, count in fitting.items()}
    stages = 4 if side_by_side[4] >= max(2, side_by_side[3]) else 3
    return DecodeTuning(block_n=block_n, num_stages=stages, programs=processor.count * max(1, side_by_side[stages]))


def prefill_tuning(head_dim: int, dtype: torch.dtype, processor: Processor) -> PrefillTuning:
    """Return the default prefill tuning for KV of `dtype`: tiles as tall as registers allow, because taller tiles read
    less."""
    # Chunks that give each multiprocessor a tile are not split: on an H200, splitting four chunks of 512 tokens at
    # 4,096 for two tiles each took 577 us a layer in place of 331.
    block_d, hopper = block_width(head_dim), processor.capability >= 90
    fill, programs = processor.count, 2 * processor.count
    if dtype.itemsize > 2:  # takes twice the shared memory, and tensor cores are not used
        return PrefillTuning(block_m=64, block_n=32 if block_d <= 128 else 16, fill=fill, programs=programs)
    tall = block_d <= 128 or (hopper and dtype != FP8)
    wide = block_d <= 64 or (block_d <= 128 and hopper)
    block_m, block_n = 128 if tall else 64, 64 if wide else 32
    return PrefillTuning(block_m=block_m, block_n=block_n, fill=fill, programs=programs)


class PagedAttention:
    """`Backend.attention` for the layers of one model on one device. Call `reserve` before the first capture. The batch
    of a step with prompts must be another object in each call."""

    # A captured step replays the same launches for any contexts and lengths of chunks: its batch's tensors keep their
    # addresses, and its `max_context` is the largest of any replay.
    def __init__(self, decode: DecodeTuning | None = None, prefill: PrefillTuning | None = None) -> None:
        """Take the tunings, which decide the bits of results and hold for the object's life. None means the default for
        the device."""
        self._decode = decode
        self._prefill = prefill
        self._workspace: DecodeWorkspace | None = None
        self._is_reserved = False
        self._parts: Partials | None = None
        self._batch: AttentionBatch | None = None
        self._plans: dict[int | None, PrefillPlan] = {}

    def reserve(self, max_seqs: int, heads: int, kv: Tensor, chunk_rows: int = 0, max_context: int = 0) -> None:
        """Allocate the workspaces of captured steps for good: of up to `max_seqs` decodes, more raise ValueError later,
        and of prompts of `chunk_rows` rows with contexts up to `max_context`. `heads` are a layer's query heads."""
        kv_heads, head_dim = kv.shape[3:]
        tuning = self.prefill_tuning(kv)
        room = largest_room(chunk_rows, max_seqs, max_context, heads // kv_heads, kv_heads, tuning)
        self._parts = make_partials(room.parts, heads, head_dim, kv.device)
        self._workspace = make_workspace(max_seqs, heads, kv.shape[-1], self.decode_tuning(kv), kv.device)
        self._is_reserved = True

    def decode_tuning(self, kv: Tensor) -> DecodeTuning:
        """Return the tuning for decoding from `kv`: the constructor's or, by default, that for the first `kv` seen."""
        if self._decode is None:
            self._decode = decode_tuning(kv.shape[-1], kv.dtype, find_processor(kv.device))
        return self._decode

    def prefill_tuning(self, kv: Tensor) -> PrefillTuning:
        """Return the tuning for prefill over `kv`: the constructor's or, by default, that for the first `kv` seen."""
        if self._prefill is None:
            self._prefill = prefill_tuning(kv.shape[-1], kv.dtype, find_processor(kv.device))
        return self._prefill

    def __call__(
        self,
        query: Tensor,
        kv: Tensor,
        batch: AttentionBatch,
        scores: Scores,
        window: int | None = None,
        kv_scales: Tensor | None = None,
    ) -> Tensor:
        """Return causal attention of `query` [num_rows, heads, head_dim] over paged `kv`: see `Backend.attention`, and
        `AttentionCall` for `kv_scales`. Raises ValueError if the batch has more decodes than `reserve` allowed."""
        if batch is not self._batch:
            self._batch, self._plans = batch, {}
        call = AttentionCall(torch.empty_like(query), query, kv, scores, window, kv_scales)
        if batch.num_decodes:
            self._decode_rows(call, batch)
        if batch.max_query > 1:
            self._prefill_rows(call, batch)
        return call.out

    def _decode_rows(self, call: AttentionCall, batch: AttentionBatch) -> None:
        tuning = self.decode_tuning(call.kv)
        longest = min(batch.max_context, call.window or batch.max_context)
        workspace = self._room(batch.num_decodes, call, tuning)
        contexts = batch.context_lens[: batch.num_decodes]
        may_split = longest > tuning.split_tokens
        decode(call, batch.query_starts, contexts, batch.block_tables, workspace, tuning, may_split=may_split)

    def _room(self, count: int, call: AttentionCall, tuning: DecodeTuning) -> DecodeWorkspace:
        held = 0 if self._workspace is None else len(self._workspace.rows)
        if self._is_reserved and count > held:
            raise ValueError(f"the batch has {count} decodes, and room was reserved for {held}")
        if self._workspace is None or count > held:
            _, heads, head_dim = call.query.shape
            self._workspace = make_workspace(2 * count, heads, head_dim, tuning, call.kv.device)
        return self._workspace

    def _prefill_rows(self, call: AttentionCall, batch: AttentionBatch) -> None:
        tuning = self.prefill_tuning(call.kv)
        if call.window not in self._plans:
            self._plans[call.window] = plan_prefill(batch, call, tuning, self._parts)
        prefill(call, batch, self._plans[call.window], tuning)
