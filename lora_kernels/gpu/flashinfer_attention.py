"""Paged attention by FlashInfer (https://docs.flashinfer.ai), for the steps in which it is faster than our kernels.

A decode-only step is one call of its decode wrapper, and a step with prompts one of its prefill wrapper, to which a
decode is a chunk of one row. Both read our pages as they are. `plan` cuts the work on the host and copies lists to the
device; `run` launches kernels, and can be captured. A captured step has wrappers of its own (`use_cuda_graph`): their
lists lie at fixed addresses, and what they launch depends on the captured numbers of rows and sequences alone, so that
renewing the plans before a replay is enough. The steps of all sizes share these lists and FlashInfer's workspaces,
because only the plans of the step that runs next are needed.

Unlike with our kernels, a row's bits depend on the other rows: FlashInfer cuts contexts by the work of the whole batch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, cast

import torch
from torch import Tensor

from lora_kernels.attention_choice import STEP_CLASSES, step_class
from lora_kernels.backend import AttentionBatch, Scores
from lora_kernels.gpu.flashinfer_plans import (
    CapturedWrappers,
    Layer,
    ListBuffers,
    Make,
    PlannedWrapper,
    StepWrappers,
    list_pages,
)
from lora_kernels.gpu.triton_attention import PagedAttention, find_processor
from lora_kernels.gpu.triton_context import AttentionCall
from lora_kernels.gpu.triton_decode import DecodeTuning
from lora_kernels.gpu.triton_prefill_plan import PrefillTuning

LAYOUT = "NHD"
TILE = 128
"""Maximum rows of a tile in FlashInfer's kernels (FA2). Such a row is a query row at one of the heads of a group."""
INT_BYTES = 2 << 20
"""Bytes of the lists in a plan of a captured step: 28 for each of up to `rows / 128 + seqs` tiles of each head. A plan
that needs more fails when the step is captured."""


class FlashInferAttention(PagedAttention):
    """`PagedAttention` in which FlashInfer computes the steps of some classes; ours computes the others.

    Args:
        decode, prefill: tunings of our kernels.
        steps: classes of steps (`STEP_CLASSES`) that FlashInfer computes.

    Raises:
        ImportError: FlashInfer is not installed, or cannot be imported.
    """

    name = "flashinfer"

    def __init__(
        self,
        decode: DecodeTuning | None = None,
        prefill: PrefillTuning | None = None,
        steps: frozenset[str] = frozenset(STEP_CLASSES),
    ) -> None:
        super().__init__(decode, prefill)
        self._flashinfer: Any = import_module("flashinfer")
        self._steps = steps
        self._launched = {has_prompts: StepWrappers(self._maker(has_prompts)) for has_prompts in (False, True)}
        self._begun: AttentionBatch | None = None
        self._floats: Tensor | None = None
        self._ints: dict[Layer, Tensor] = {}
        self._buffers: ListBuffers
        self._block_size = 0

    def extra_bytes(
        self, device: torch.device, max_seqs: int, heads: int, kv_heads: int, head_dim: int, chunk_rows: int
    ) -> int:
        return float_bytes(device, max_seqs, heads, kv_heads, head_dim, chunk_rows) + 3 * INT_BYTES

    def reserve(self, max_seqs: int, heads: int, kv: Tensor, chunk_rows: int = 0, max_context: int = 0) -> None:
        super().reserve(max_seqs, heads, kv, chunk_rows, max_context)
        self._block_size, kv_heads, head_dim = kv.shape[2:]
        num_bytes = float_bytes(kv.device, max_seqs, heads, kv_heads, head_dim, chunk_rows)
        self._floats = torch.zeros(num_bytes, dtype=torch.uint8, device=kv.device)
        max_blocks = -(-max_context // self._block_size)
        # The first plan of a step has up to a page for each row.
        counts = max_seqs + 1, max_seqs + 1, max_seqs, max_seqs * max_blocks + max(chunk_rows, max_seqs)
        self._buffers = ListBuffers(*(torch.zeros(count, dtype=torch.int32, device=kv.device) for count in counts))

    def capture_plans(self, rows: int, seqs: int, has_prompts: bool) -> CapturedWrappers | None:
        if step_class(rows, has_prompts) not in self._steps:
            return None
        return CapturedWrappers(self._maker(has_prompts, seqs), self._buffers, rows, seqs, self._block_size)

    def __call__(
        self,
        query: Tensor,
        kv: Tensor,
        batch: AttentionBatch,
        scores: Scores,
        window: int | None = None,
        kv_scales: Tensor | None = None,
    ) -> Tensor:
        has_prompts = batch.max_query > 1
        if step_class(batch.num_decodes, has_prompts) not in self._steps:
            return super().__call__(query, kv, batch, scores, window, kv_scales)
        if kv_scales is not None:
            raise ValueError("FlashInfer has no scales for each head of K and V")
        if scores.sinks is not None:
            raise ValueError("these wrappers of FlashInfer know no sinks")
        call = AttentionCall(torch.empty_like(query), query, kv, scores, window)
        if batch.plans is not None:
            cast(CapturedWrappers, batch.plans).attend(call)
            return call.out
        wrappers = self._launched[has_prompts]
        if batch is not self._begun:
            wrappers.begin(list_pages(batch, kv.shape[2]))
            self._begun = batch
        wrappers.attend(call)
        return call.out

    def _maker(self, has_prompts: bool, captured_seqs: int = 0) -> Make:
        """Returns the function that makes FlashInfer's wrapper for a kind of layer: for captured steps of
        `captured_seqs` sequences or, if that is 0, for steps that are launched."""

        def make(layer: Layer, device: torch.device) -> PlannedWrapper:
            if self._floats is None:
                num_bytes = float_bytes(device, 0, layer.heads, layer.kv_heads, layer.head_dim, 0)
                self._floats = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
            options = self._capture_options(has_prompts, captured_seqs) if captured_seqs else {}
            if has_prompts:
                wrapper = self._flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._floats, LAYOUT, **options)
            else:
                # Its decode kernels without tensor cores serve few sizes of groups.
                options |= {"use_tensor_cores": True, "backend": "fa2"}
                wrapper = self._flashinfer.BatchDecodeWithPagedKVCacheWrapper(self._floats, LAYOUT, **options)
            if captured_seqs:
                wrapper.reset_workspace_buffer(self._floats, self._int_workspace(layer, device))
            return PlannedWrapper(wrapper, layer, has_prompts, device)

        return make

    def _capture_options(self, has_prompts: bool, seqs: int) -> dict[str, Any]:
        buffers, ending = self._buffers, "buf" if has_prompts else "buffer"
        own = {"qo_indptr_buf": buffers.query_starts[: seqs + 1]} if has_prompts else {}
        return own | {
            "use_cuda_graph": True,
            f"paged_kv_indptr_{ending}": buffers.starts[: seqs + 1],
            f"paged_kv_indices_{ending}": buffers.pages,
            f"paged_kv_last_page_len_{ending}": buffers.last[:seqs],
        }

    def _int_workspace(self, layer: Layer, device: torch.device) -> Tensor:
        """Returns the workspace that holds the plan of a kind of layer in captured steps. Each kind has its own,
        because a replay needs the plans of all its layers at once."""
        if layer not in self._ints:
            self._ints[layer] = torch.zeros(INT_BYTES, dtype=torch.uint8, device=device)
        return self._ints[layer]


def float_bytes(device: torch.device, max_seqs: int, heads: int, kv_heads: int, head_dim: int, chunk_rows: int) -> int:
    """Returns an upper bound, in bytes, of the workspace for the partial results of splits that FlashInfer's kernels
    (FA2) merge. It suffices for the largest captured step, in which every sequence may leave a tile almost empty, and
    for launched steps, whose contexts are split only until there are two programs for each multiprocessor."""
    captured = max(chunk_rows, max_seqs) * heads + (max_seqs + 2) * TILE * kv_heads
    return 4 * (head_dim + 1) * (max(captured, 2 * find_processor(device).count * TILE) + TILE * heads) + (1 << 20)


def compile_kernels(
    windows: frozenset[int | None], cap: float | None, device: torch.device, dtype: torch.dtype, head_dim: int
) -> None:
    """Computes one token by each kernel that a model needs, whose layers have these windows and this cap of scores, so
    that FlashInfer compiles them now, or loads them from its cache. Raises whatever FlashInfer raises."""
    attention = FlashInferAttention()
    kv = torch.zeros(1, 2, 1, 1, head_dim, dtype=dtype, device=device)
    for window in {None if window is None else 1 for window in windows}:
        for rows in (1, 2):
            query = torch.zeros(rows, 1, head_dim, dtype=dtype, device=device)
            attention(query, kv, _row_batch(rows, device), Scores(1.0, cap), window)


def _row_batch(rows: int, device: torch.device) -> AttentionBatch:
    """Returns a batch of one sequence with `rows` tokens, each in page 0."""
    numbers = torch.arange(rows + 1, dtype=torch.int32, device=device)
    return AttentionBatch(
        query_starts=numbers[:: max(rows, 1)],
        context_lens=numbers[-1:],
        block_tables=torch.zeros(1, rows, dtype=torch.int32, device=device),
        kv_slots=torch.full((rows,), -1, dtype=torch.int64, device=device),
        num_decodes=int(rows == 1),
        max_query=rows,
        max_context=rows,
        host_query_starts=(0, rows),
        host_context_lens=(rows,),
    )
