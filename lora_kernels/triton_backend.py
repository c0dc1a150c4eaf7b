"""The backend in Triton, for CUDA tensors; under Triton's interpreter also for CPU tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lora_kernels import triton_attention, triton_lora, triton_pointwise
from lora_kernels.backend import AttentionBatch
from lora_kernels.layout import LoraTable, ProjectionGroup
from lora_kernels.pointwise import HeadNorms
from lora_kernels.segments import SegmentPlan


class TritonBackend:
    """`Backend` in Triton. Keeps what it derived from the last batch and the last plan, to use in every layer."""

    name = "triton"

    def __init__(self) -> None:
        self.pointwise = triton_pointwise.TritonPointwise()
        self._batch: AttentionBatch | None = None
        self._tiles: dict[int, tuple[triton_attention.QueryTiles, ...]] = {}
        self._lora_key: tuple[Any, ...] = ()
        self._lora: triton_lora.PreparedLora | None = None

    def rotate_and_write(
        self, qkv: Tensor, kv: Tensor, batch: AttentionBatch, cos: Tensor, sin: Tensor, norms: HeadNorms | None
    ) -> Tensor:
        """See `Backend.rotate_and_write`."""
        return triton_pointwise.rotate_and_write(qkv, kv, batch.kv_slots, cos, sin, norms)

    def write_kv(self, kv: Tensor, key: Tensor, value: Tensor, batch: AttentionBatch) -> None:
        """See `Backend.write_kv`."""
        triton_attention.write_kv(kv, key, value, batch)

    def attention(
        self, query: Tensor, kv: Tensor, batch: AttentionBatch, scale: float, window: int | None = None
    ) -> Tensor:
        """See `Backend.attention`."""
        if batch is not self._batch:
            self._batch = batch
            self._tiles = {}
        group = query.shape[1] // kv.shape[3]
        if group not in self._tiles:
            self._tiles[group] = triton_attention.plan_tiles(batch, group)
        out = torch.empty_like(query)
        for tiles in self._tiles[group]:
            triton_attention.attend(out, query, kv, batch, tiles, scale, window)
        return out

    def prepare_lora(self, arena: Tensor, table: LoraTable, plan: SegmentPlan) -> triton_lora.PreparedLora | None:
        """See `Backend.prepare_lora`."""
        parts = (plan.rows, plan.slots, plan.starts, table.versions[plan.slots])
        key = (table, arena.data_ptr(), *(part.tobytes() for part in parts))
        if key != self._lora_key:
            self._lora = triton_lora.prepare(arena, table, plan)
            self._lora_key = key
        return self._lora

    def add_lora(
        self, out: Tensor, x: Tensor, prepared: triton_lora.PreparedLora, layer: int, group: ProjectionGroup
    ) -> None:
        """See `Backend.add_lora`."""
        triton_lora.add(out, x, prepared, layer, group)
