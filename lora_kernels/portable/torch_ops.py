"""The backend in vectorised torch, for CPU tensors."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lora_kernels.backend import AttentionBatch, KvCoding, Scores, require_plain
from lora_kernels.layout import LoraTable, ProjectionGroup
from lora_kernels.pointwise import QkNorms, TorchPointwise, rotate_heads
from lora_kernels.portable import torch_attention, torch_lora, torch_stacked
from lora_kernels.routing import TorchExperts
from lora_kernels.segments import SegmentPlan

PreparedLora = torch_lora.TiledLora | torch_stacked.PreparedStack


class TorchBackend:
    """`Backend` for CPU tensors. Caches what it derives from the last batch and the last plan, for all layers."""

    name = "torch"

    def __init__(self, max_stacked_rank: int = torch_stacked.MAX_INNER) -> None:
        """`max_stacked_rank` is the largest sum of the adapters' ranks at which adapters are stacked. Above it they are
        tiled; 0 never stacks."""
        self.pointwise = TorchPointwise()
        self.experts = TorchExperts(self.prepare_lora)
        self._max_stacked_rank = max_stacked_rank
        self._batch: AttentionBatch | None = None
        self._slots: tuple[Tensor, Tensor] | None = None
        self._attention_plans: dict[tuple[int, int | None], torch_attention.TorchAttentionPlan] = {}
        self._lora_key: tuple[Any, ...] = ()
        self._lora: PreparedLora | None = None
        self._stack: torch_stacked.Stack | None = None

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
        """Applies norms (if any) and the rotary embedding, writes K and V to `kv`, and returns the query
        [num_rows, heads, head_dim]. May modify `qkv`. See `Backend.rotate_and_write`."""
        require_plain(kv_coding)
        query, key, value = rotate_heads(self.pointwise, qkv, kv, cos, sin, norms)
        self.write_kv(kv, key, value, batch)
        return query

    def write_kv(self, kv: Tensor, key: Tensor, value: Tensor, batch: AttentionBatch) -> None:
        """Stores this step's K and V ([num_rows, kv_heads, head_dim]) at `batch.kv_slots` of one layer's KV."""
        self._remember(batch)
        if self._slots is None:
            block_size = kv.shape[2]
            self._slots = (batch.kv_slots // block_size, batch.kv_slots % block_size)
        kv[:, 0].index_put_(self._slots, key)
        kv[:, 1].index_put_(self._slots, value)

    def attention(
        self,
        query: Tensor,
        kv: Tensor,
        batch: AttentionBatch,
        scores: Scores,
        window: int | None = None,
        kv_coding: KvCoding | None = None,
    ) -> Tensor:
        """Returns causal attention of `query` [num_rows, heads, head_dim] over paged `kv`: see `Backend.attention`."""
        require_plain(kv_coding)
        self._remember(batch)
        key = (query.shape[1] // kv.shape[3], window)
        if key not in self._attention_plans:
            self._attention_plans[key] = torch_attention.plan_attention(kv, batch, *key)
        return torch_attention.attend(query, kv, self._attention_plans[key], scores)

    def prepare_lora(self, arena: Tensor, table: LoraTable, plan: SegmentPlan) -> PreparedLora | None:
        """Returns the LoRA data that all layers of one step share: a stack (torch_stacked.py) if most rows have an
        adapter and the ranks add up to at most `max_stacked_rank`, otherwise tiles (torch_lora.py), or None if there is
        nothing to add. While arena, plan and adapters stay the same, the last result is returned again."""
        parts = (plan.rows, plan.adapter_slots, plan.starts, table.versions[plan.adapter_slots])
        key = (table, arena.data_ptr(), *(part.tobytes() for part in parts))
        if key != self._lora_key:
            stack = self._stack_for(arena, table, plan)
            self._lora = (
                torch_lora.prepare(arena, table, plan) if stack is None else torch_stacked.PreparedStack(stack, plan)
            )
            self._lora_key = key
        return self._lora

    def add_lora(self, out: Tensor, x: Tensor, prepared: PreparedLora, layer: int, group: ProjectionGroup) -> None:
        """Adds B A x of each row's own adapter to `out` [num_rows, sum(out_features)] in place: `Backend.add_lora`."""
        prepared.add(out, x, layer, group)

    def _stack_for(self, arena: Tensor, table: LoraTable, plan: SegmentPlan) -> torch_stacked.Stack | None:
        """Returns the cached stack if it serves the plan's adapters, otherwise a new one, which is cached. Returns None
        where stacking does not pay (`worth_it`) or the sum of the ranks is 0 or too large."""
        if not torch_stacked.worth_it(plan):
            return None
        if self._stack is None or not self._stack.serves(arena, table, plan.adapter_slots):
            self._stack = torch_stacked.make_stack(arena, table, plan.adapter_slots, self._max_stacked_rank)
        return self._stack

    def _remember(self, batch: AttentionBatch) -> None:
        """Clears the cached slots and attention plans if they were made for another batch object, and remembers
        `batch`. A batch never changes."""
        if batch is not self._batch:
            self._batch = batch
            self._slots = None
            self._attention_plans = {}
