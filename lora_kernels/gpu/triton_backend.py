"""The Triton backend, for CUDA tensors, and under Triton's interpreter for CPU tensors."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lora_kernels.backend import AttentionBatch, KvCoding, Scores
from lora_kernels.gpu import triton_kv, triton_lora, triton_lora_plan, triton_pointwise
from lora_kernels.gpu.triton_attention import PagedAttention
from lora_kernels.gpu.triton_experts import TritonExperts
from lora_kernels.gpu.triton_lora_tuning import SHIPPED, LoraTuning
from lora_kernels.layout import LoraTable, ProjectionGroup
from lora_kernels.pointwise import QkNorms
from lora_kernels.segments import Int32Array, SegmentPlan


class TritonBackend:
    """`Backend` in Triton. Caches plans of the last batch and LoRA data of the last segment plan, for all layers."""

    name = "triton"

    def __init__(self, lora_tuning: LoraTuning = SHIPPED, attention: PagedAttention | None = None) -> None:
        self.pointwise = triton_pointwise.TritonPointwise()
        self.experts = TritonExperts(lora_tuning)
        self.paged_attention = attention or PagedAttention()
        self.lora_tuning = lora_tuning
        self._lora_key: tuple[Any, ...] = ()
        self._lora: triton_lora_plan.TritonLora | None = None

    def rotate_and_write(
        self,
        qkv: Tensor,
        kv: Tensor,
        batch: AttentionBatch,
        cos: Tensor,
        sin: Tensor,
        norms: QkNorms | None,
        kv_coding: KvCoding | None = None,
    ) -> Tensor:
        """Apply norms (if any) and the rotary embedding, write K and V to `kv`, and return the query [num_rows, heads,
        head_dim], a view of `qkv`, which is modified. See `Backend.rotate_and_write`."""
        return triton_pointwise.rotate_and_write(qkv, kv, batch.kv_slots, cos, sin, norms, kv_coding)

    def write_kv(self, kv: Tensor, key: Tensor, value: Tensor, batch: AttentionBatch) -> None:
        """Store this step's K and V ([num_rows, kv_heads, head_dim]) at `batch.kv_slots` of one layer's KV."""
        triton_kv.write_kv(kv, key, value, batch.kv_slots)

    def attention(
        self,
        query: Tensor,
        kv: Tensor,
        batch: AttentionBatch,
        scores: Scores,
        window: int | None = None,
        kv_coding: KvCoding | None = None,
    ) -> Tensor:
        """Return causal attention of `query` [num_rows, heads, head_dim] over paged `kv`: see `Backend.attention`."""
        scales = None if kv_coding is None else kv_coding.scales
        return self.paged_attention(query, kv, batch, scores, window, scales)

    def prepare_lora(self, arena: Tensor, table: LoraTable, plan: SegmentPlan) -> triton_lora_plan.TritonLora | None:
        """Return the LoRA data that all layers of a step share, or None if there is nothing to add. While plan and
        adapters stay the same, the last result is returned again."""
        parts = (plan.rows, plan.adapter_slots, plan.starts, table.versions[plan.adapter_slots])
        key = (table, arena.data_ptr(), *(part.tobytes() for part in parts))
        if key != self._lora_key:
            self._lora = triton_lora_plan.prepare(arena, table, plan, self.lora_tuning)
            self._lora_key = key
        return self._lora

    def record_lora(
        self, arena: Tensor, table: LoraTable, workspace: triton_lora_plan.LoraWorkspace, has_long: bool = False
    ) -> triton_lora_plan.TritonLora:
        """Return LoRA data for launches to record, which serve any step whose lists are in `workspace`, and which has
        long segments only if `has_long`."""
        return triton_lora_plan.record(arena, table, workspace, workspace.max_rows, self.lora_tuning, has_long)

    def fill_lora(
        self, host: Int32Array, workspace: triton_lora_plan.LoraWorkspace, table: LoraTable, plan: SegmentPlan
    ) -> int:
        """Write a step's tile lists into `host`, laid out like `workspace.meta`, and return how many leading numbers of
        it to copy there. Raises ValueError if the step does not fit the workspace."""
        return workspace.fill(host, table, plan, self.lora_tuning)

    def add_lora(
        self, out: Tensor, x: Tensor, prepared: triton_lora_plan.TritonLora, layer: int, group: ProjectionGroup
    ) -> None:
        """Add B A x of each row's own adapter to `out` [num_rows, sum(out_features)] in place: `Backend.add_lora`."""
        triton_lora.add(out, x, prepared, layer, group)
