"""The backend in vectorised torch: the CPU's, and correct on any device."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lora_kernels import torch_attention, torch_lora
from lora_kernels.backend import AttentionBatch
from lora_kernels.layout import LoraTable, ProjectionGroup
from lora_kernels.segments import SegmentPlan


class TorchBackend:
    """`Backend` for CPU tensors. Keeps what it derived from the last batch and the last plan, to use in every layer."""

    name = "torch"

    def __init__(self) -> None:
        self._batch: AttentionBatch | None = None
        self._slots: tuple[Tensor, Tensor] | None = None
        self._attention_plans: dict[tuple[int, int | None], torch_attention.AttentionPlan] = {}
        self._lora_key: tuple[Any, ...] = ()
        self._lora: torch_lora.PreparedLora | None = None

    def write_kv(self, kv: Tensor, key: Tensor, value: Tensor, batch: AttentionBatch) -> None:
        """See `Backend.write_kv`."""
        self._remember(batch)
        if self._slots is None:
            block_size = kv.shape[2]
            self._slots = (batch.kv_slots // block_size, batch.kv_slots % block_size)
        kv[:, 0].index_put_(self._slots, key)
        kv[:, 1].index_put_(self._slots, value)

    def attention(
        self, query: Tensor, kv: Tensor, batch: AttentionBatch, scale: float, window: int | None = None
    ) -> Tensor:
        """See `Backend.attention`."""
        self._remember(batch)
        key = (query.shape[1] // kv.shape[3], window)
        if key not in self._attention_plans:
            self._attention_plans[key] = torch_attention.plan_attention(kv, batch, *key)
        return torch_attention.attend(query, kv, self._attention_plans[key], scale)

    def prepare_lora(self, arena: Tensor, table: LoraTable, plan: SegmentPlan) -> torch_lora.PreparedLora | None:
        """See `Backend.prepare_lora`."""
        parts = (plan.rows, plan.slots, plan.starts, table.versions[plan.slots])
        key = (table, arena.data_ptr(), *(part.tobytes() for part in parts))
        if key != self._lora_key:
            self._lora = torch_lora.prepare(arena, table, plan)
            self._lora_key = key
        return self._lora

    def add_lora(
        self, out: Tensor, x: Tensor, prepared: torch_lora.PreparedLora, layer: int, group: ProjectionGroup
    ) -> None:
        """See `Backend.add_lora`."""
        torch_lora.add(out, x, prepared, layer, group)

    def _remember(self, batch: AttentionBatch) -> None:
        """Forgets what belongs to another batch. Identity is enough: a batch never changes."""
        if batch is not self._batch:
            self._batch = batch
            self._slots = None
            self._attention_plans = {}
