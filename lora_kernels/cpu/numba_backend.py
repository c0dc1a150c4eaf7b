"""The numba backend for CPUs, compiled on the user's machine without an installed compiler."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lora_kernels.backend import AttentionBatch, KvCoding, Scores, require_plain
from lora_kernels.cpu import numba_attention, numba_lora, numba_pointwise
from lora_kernels.cpu.formats import FORMATS
from lora_kernels.cpu.numba_attention_plan import AttentionForm, NumbaAttentionPlan, plan_attention
from lora_kernels.cpu.numba_experts import NumbaExperts
from lora_kernels.cpu.numba_pointwise import NumbaPointwise
from lora_kernels.cpu.numba_sampling import draw_kernel
from lora_kernels.cpu.numba_tape import Tape, player
from lora_kernels.cpu.openmp import Kernel, team
from lora_kernels.layout import LoraTable, ProjectionGroup
from lora_kernels.pointwise import QkNorms, split_heads
from lora_kernels.segments import SegmentPlan


class NumbaBackend:
    """`Backend` in numba for CPU tensors. Caches its plans of the last batch and its LoRA data of the last segment
    plan, which all layers share. Kernels are compiled on first use unless `compile` was called."""

    def __init__(self) -> None:
        self._team = team()
        self.pointwise = NumbaPointwise(self._team)
        self.experts = NumbaExperts(self._team)
        self.name = "numba" if self._team.is_parallel else "numba, one thread"
        self._kernels: dict[tuple[Any, torch.dtype], Kernel] = {}
        self._batch: AttentionBatch | None = None
        self._attention_plans: dict[AttentionForm, NumbaAttentionPlan] = {}
        self._lora_key: tuple[Any, ...] = ()
        self._lora: numba_lora.NumbaLora | None = None

    def compile(
        self, dtype: torch.dtype, on_kernel: Callable[[int, int], None], *, sums: bool = False, experts: bool = False
    ) -> None:
        """Compile every kernel for `dtype`, or load it from a cache, including deltas in fp32 with `sums` and the
        kernels of experts with `experts`. Calls `on_kernel` with the numbers of kernels compiled and in total."""
        compilers: list[Callable[[], object]] = [partial(self._kernel, numba_attention, dtype)]
        out_dtypes = {dtype, torch.float32} if sums else {dtype}
        compilers += [partial(self._kernel, numba_lora, dtype, out_dtype) for out_dtype in out_dtypes]
        compilers += [
            player,
            draw_kernel,
            *(partial(self.pointwise.kernel, name, dtype) for name in numba_pointwise.MAKERS),
        ]
        if experts:
            compilers += [partial(self.experts.compile, out_dtype) for out_dtype in out_dtypes]
        for done, compiler in enumerate(compilers):
            on_kernel(done, len(compilers))
            compiler()
        on_kernel(len(compilers), len(compilers))

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
        head_dim]. May modify `qkv`. See `Backend.rotate_and_write`."""
        require_plain(kv_coding)
        query, key, value = split_heads(qkv, kv)
        heads = query.shape[1]
        query_key = qkv.view(len(qkv), -1, query.shape[2])[:, : heads + key.shape[1]]
        self.pointwise.rotate(query_key, cos, sin, norms, heads)
        self.write_kv(kv, key, value, batch)
        return query

    def write_kv(self, kv: Tensor, key: Tensor, value: Tensor, batch: AttentionBatch) -> None:
        """Store this step's K and V ([num_rows, kv_heads, head_dim]) at `batch.kv_slots` of one layer's KV."""
        self.pointwise.write_kv(kv, key, value, batch.kv_slots)

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
        require_plain(kv_coding)
        query = query if query.stride(2) == 1 else query.contiguous()
        size = query.element_size()
        form = AttentionForm(query.shape[1], kv.shape, kv.stride(), size, scores.scale, scores.cap, window)
        block = self._attention_plan(form, batch).block
        out = self._team.empty(query.shape, query.dtype)
        block.query, block.out, block.kv = query.data_ptr(), out.data_ptr(), kv.data_ptr()
        block.query_row, block.query_head = query.stride(0) * size, query.stride(1) * size
        block.sinks = 0 if scores.sinks is None else scores.sinks.data_ptr()
        self._team.run(self._kernel(numba_attention, query.dtype), block, block.num_items, form)
        return out

    def prepare_lora(self, arena: Tensor, table: LoraTable, plan: SegmentPlan) -> numba_lora.NumbaLora | None:
        """Return the LoRA data that all layers of a step share, or None without segments. While arena, plan, adapters
        and torch's number of threads stay the same, the last result is returned again."""
        parts = (plan.rows, plan.adapter_slots, plan.starts, table.versions[plan.adapter_slots])
        key = (table, arena.data_ptr(), torch.get_num_threads(), *(part.tobytes() for part in parts))
        if key != self._lora_key:
            self._lora = numba_lora.prepare(arena, table, plan)
            self._lora_key = key
        return self._lora

    def add_lora(
        self, out: Tensor, x: Tensor, prepared: numba_lora.NumbaLora, layer: int, group: ProjectionGroup
    ) -> None:
        """Add B A x of each row's own adapter to `out` [num_rows, sum(out_features)] in place: `Backend.add_lora`."""
        prepared.add(out, x, layer, group, self._team, self._kernel(numba_lora, x.dtype, out.dtype))

    def renew(self, tape: Tape, batch: AttentionBatch, prepared: numba_lora.NumbaLora | None) -> None:
        """Copy a step's plans to a tape, in place of the recorded step's: attention's for `batch` and, unless it is
        None, LoRA's in `prepared`. Call it before playing the tape."""
        for form in tape.forms:
            if isinstance(form, AttentionForm):
                tape.renew(form, self._attention_plan(form, batch).block)
            elif prepared is not None:
                tape.renew(form, prepared.plan(form).block)

    def _kernel(self, module: Any, *dtypes: torch.dtype) -> Kernel:
        key = (module, *dtypes)
        if key not in self._kernels:
            self._kernels[key] = module.make_kernel(*(FORMATS[dtype] for dtype in dtypes))
        return self._kernels[key]

    def _attention_plan(self, form: AttentionForm, batch: AttentionBatch) -> NumbaAttentionPlan:
        if batch is not self._batch:  # identity is enough: a batch never changes
            self._batch, self._attention_plans = batch, {}
        if form not in self._attention_plans:
            self._attention_plans[form] = plan_attention(form, batch)
        return self._attention_plans[form]
