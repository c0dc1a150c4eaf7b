"""Wraps a backend on a device so that it takes tensors on the CPU, for the kernels' own tests.

The tests compare small cases with an fp32 reference on the CPU; only the kernels under test run on the device.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from lora_kernels.backend import AttentionBatch, Backend, KvCoding, Scores, require_plain
from lora_kernels.layout import LoraTable, ProjectionGroup
from lora_kernels.pointwise import BoundedSwiglu, Pointwise, QkNorms
from lora_kernels.routing import ExpertKernels, Routing, RowAdapters
from lora_kernels.segments import SegmentPlan

CPU = torch.device("cpu")


class OnDevice:
    """A `Backend` for CPU tensors: copies arguments to the device, and results and changed tensors back."""

    def __init__(self, backend: Backend, device: torch.device) -> None:
        self._backend = backend
        self._device = device
        self._tables: WeakKeyDictionary[LoraTable, LoraTable] = WeakKeyDictionary()
        self._batch: tuple[AttentionBatch, AttentionBatch] | None = None
        self.name = backend.name

    @property
    def pointwise(self) -> Pointwise:
        return PointwiseOnDevice(self._backend.pointwise, self._device)

    @property
    def experts(self) -> ExpertKernels:
        return ExpertsOnDevice(self._backend.experts, self)

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
        """Apply norms (if any) and rotary embedding to `qkv` on the device, write its keys and values to `kv`, and
        return the query. Only `kv`, the paged KV of a layer, is changed."""
        require_plain(kv_coding)
        there, more = self.there(kv), None if norms is None else to_device(norms, self._device)
        angles = self.there(cos), self.there(sin)
        query = self._backend.rotate_and_write(self.there(qkv), there, self._same_batch(batch), *angles, more)
        kv.copy_(there)
        return query.to(qkv.device)

    def write_kv(self, kv: Tensor, key: Tensor, value: Tensor, batch: AttentionBatch) -> None:
        """Store the step's keys and values at `batch.kv_slots` of a layer's paged KV `kv`, by way of the device."""
        there = self.there(kv)
        self._backend.write_kv(there, self.there(key), self.there(value), self._same_batch(batch))
        kv.copy_(there)

    def attention(
        self,
        query: Tensor,
        kv: Tensor,
        batch: AttentionBatch,
        scores: Scores,
        window: int | None = None,
        kv_coding: KvCoding | None = None,
    ) -> Tensor:
        """Return causal attention of `query` [num_rows, heads, head_dim] over paged KV, computed on the device. A query
        sees the last `window` tokens up to its own; None means all."""
        require_plain(kv_coding)
        args = self.there(query), self.there(kv), self._same_batch(batch)
        return self._backend.attention(*args, scores, window).to(query.device)

    def prepare_lora(self, arena: Tensor, table: LoraTable, plan: SegmentPlan) -> Any:
        """Return the device data that `add_lora` needs for a step in all layers, made from copies of the arguments."""
        return self._backend.prepare_lora(self.there(arena), self.table(table), plan)

    def add_lora(self, out: Tensor, x: Tensor, prepared: Any, layer: int, group: ProjectionGroup) -> None:
        """Add a layer's LoRA deltas of a projection group for the rows `x` to `out` in place, by way of the device."""
        there = self.there(out)
        self._backend.add_lora(there, self.there(x), prepared, layer, group)
        out.copy_(there)

    def table(self, table: LoraTable) -> LoraTable:
        """Return a table's copy on the device, updated to its present values. A table always gets the same copy."""
        twin = self._tables.get(table)
        if twin is None:
            twin = self._tables[table] = copy.copy(table)
            twin._by_expert = None  # a view of the copied table would be of the memory of `table`
            for name, value in vars(table).items():
                if isinstance(value, Tensor):
                    setattr(twin, name, value.to(self._device, copy=True))
        for name, value in vars(table).items():
            if isinstance(value, Tensor):
                getattr(twin, name).copy_(value)
        return twin

    def prepare_scales(
        self, prepare: Callable[[Tensor, LoraTable, SegmentPlan], Any]
    ) -> Callable[[Tensor, LoraTable, SegmentPlan], Any]:
        """Return a function like `prepare`, which prepares DoRA's scales on the device, that takes CPU tensors and
        returns scales for CPU tensors (None if there are none)."""

        def prepare_there(arena: Tensor, table: LoraTable, plan: SegmentPlan) -> Any:
            scales = prepare(self.there(arena), self.table(table), plan)
            return None if scales is None else ScalesOnDevice(scales, self._device)

        return prepare_there

    def there(self, tensor: Tensor) -> Tensor:
        return copy_with_memory(tensor, self._device)

    def _same_batch(self, batch: AttentionBatch) -> AttentionBatch:
        """Return the copy of a batch on the device: the previous one if the batch is the previous one, because backends
        cache data derived from their last batch."""
        if self._batch is None or self._batch[0] is not batch:
            self._batch = batch, to_device(batch, self._device)
        return self._batch[1]


class PointwiseOnDevice:
    """A `Pointwise` for CPU tensors: copies arguments to the device, and results and changed tensors back."""

    def __init__(self, pointwise: Pointwise, device: torch.device) -> None:
        self._pointwise = pointwise
        self._device = device

    def add_norm(
        self, x: Tensor, delta: Tensor | None, weight: Tensor | None, eps: float, factor: float = 1.0
    ) -> Tensor:
        """Add `delta` times `factor`, if given, to `x` in place; return the RMSNorm of the sum times `weight`, computed
        on the device, or `x` if `weight` is None."""
        there = self._there(x)
        more, norm = (None if tensor is None else self._there(tensor) for tensor in (delta, weight))
        result = self._pointwise.add_norm(there, more, norm, eps, factor)
        x.copy_(there)
        return x if weight is None else result.to(x.device)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Apply the rotary embedding to `x` [num_rows, heads, head_dim] in place, computed on the device."""
        there = self._there(x)
        self._pointwise.rotate(there, self._there(cos), self._there(sin))
        x.copy_(there)

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """Return silu(gate) * up of `gate_up` ([num_rows, 2 * width], side by side), computed on the device."""
        return self._pointwise.swiglu(self._there(gate_up)).to(gate_up.device)

    def bounded_swiglu(self, gate_up: Tensor, bounds: BoundedSwiglu) -> Tensor:
        """Return the activation that `bounds` describes, computed on the device."""
        return self._pointwise.bounded_swiglu(self._there(gate_up), bounds).to(gate_up.device)

    def geglu(self, gate_up: Tensor) -> Tensor:
        """Return gelu(gate) * up of `gate_up`, like `swiglu`, computed on the device."""
        return self._pointwise.geglu(self._there(gate_up)).to(gate_up.device)

    def _there(self, tensor: Tensor) -> Tensor:
        return copy_with_memory(tensor, self._device)


class ExpertsOnDevice:
    """An `ExpertKernels` for CPU tensors: copies arguments to the device of a backend, and results back."""

    def __init__(self, experts: ExpertKernels, device: OnDevice) -> None:
        self._experts = experts
        self._device = device

    def route(self, logits: Tensor, top_k: int, *, normalised: bool, order: Tensor | None = None) -> Routing:
        """Return the entries of a layer's experts, computed on the device."""
        order = None if order is None else self._device.there(order)
        return to_device(
            self._experts.route(self._device.there(logits), top_k, normalised=normalised, order=order), CPU
        )

    def gather(self, x: Tensor, routing: Routing) -> Tensor:
        """Return the row of `x` of each entry."""
        return x.index_select(0, routing.rows)

    def combine(self, entries: Tensor, routing: Routing) -> Tensor:
        """Return the weighted sums of entries, computed on the device."""
        there = self._device.there(entries)
        return self._experts.combine(there, to_device(routing, there.device)).to(entries.device)

    def prepare_lora(
        self,
        arena: Tensor,
        table: LoraTable,
        adapters: RowAdapters,
        routing: Routing,
        layer: int,
        first_target: int,
        max_features: int,
    ) -> Any:
        """Return the device data that `add_lora` needs for entries, made from copies of the arguments."""
        arena, twin = self._device.there(arena), self._device.table(table)
        slots, order = self._device.there(adapters.slots), self._device.there(adapters.order)
        there = adapters._replace(slots=slots, order=order), to_device(routing, arena.device)
        return self._experts.prepare_lora(arena, twin, *there, layer, first_target, max_features)


class ScalesOnDevice:
    """A `BaseScales` for CPU tensors: copies the output to the device, applies the scales there, and copies it back."""

    def __init__(self, scales: Any, device: torch.device) -> None:
        self._scales = scales
        self._device = device

    def apply(self, out: Tensor, layer: int, group: ProjectionGroup) -> None:
        there = copy_with_memory(out, self._device)
        self._scales.apply(there, layer, group)
        out.copy_(there)


def copy_with_memory(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a copy of a CPU tensor on a device with the whole storage that it views, so that its strides and the
    memory around it, which kernels must not touch, are as in production."""
    memory = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    there = torch.empty_like(memory, device=device).copy_(memory)
    return there.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def to_device(value: Any, device: torch.device) -> Any:
    """Return a copy of a dataclass whose tensor fields are on `device`; other fields are shared."""
    assert is_dataclass(value)
    tensors = {item.name: getattr(value, item.name) for item in fields(value)}
    there = {name: tensor.to(device) for name, tensor in tensors.items() if isinstance(tensor, Tensor)}
    return replace(value, **there)  # type: ignore[type-var]
