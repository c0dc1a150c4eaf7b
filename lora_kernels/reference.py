"""The kernels in plain torch, fp32, one sequence or segment at a time: what every backend computes. No engine serves
with it. Sources: PagedAttention (Kwon et al. 2023), GQA (Ainslie et al. 2023), LoRA (Hu et al. 2021), Punica (Chen et
al. 2023), S-LoRA (Sheng et al. 2023)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lora_kernels.backend import AttentionBatch, KvCoding, Scores, require_plain
from lora_kernels.layout import ALIGN, FP8_SCALES, RANK_TILE, SIDE_A, SIDE_B, LoraTable, ProjectionGroup
from lora_kernels.pointwise import QkNorms, TorchPointwise, rotate_heads
from lora_kernels.routing import TorchExperts
from lora_kernels.segments import SegmentPlan, plan_segments


def attention(query: Tensor, kv: Tensor, batch: AttentionBatch, scores: Scores, window: int | None = None) -> Tensor:
    """Compute causal attention as `Backend.attention` must, one sequence after the other. Return fp32 [num_rows, heads,
    head_dim], the shape of `query`."""
    out = torch.zeros(query.shape, dtype=torch.float32)
    for sequence, context in enumerate(batch.host_context_lens):
        start, stop = batch.host_query_starts[sequence : sequence + 2]
        first_row = context - (stop - start)
        oldest = 0 if window is None else max(0, first_row - window + 1)
        tokens = torch.arange(oldest, context)
        key, value = gather_tokens(kv, batch.block_tables[sequence], tokens)
        seen = find_seen(torch.arange(first_row, context), tokens, window)
        out[start:stop] = attend(query[start:stop], key, value, seen, scores)
    return out


def gather_tokens(kv: Tensor, block_table: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return K and V of a sequence's tokens at the positions `tokens`, each [num_tokens, kv_heads, head_dim]. Nothing
    else is read: a slot that was never written may hold a NaN, which no weight of zero would cancel."""
    block_size = kv.shape[2]
    pages = block_table[tokens // block_size].long()
    key, value = kv[pages, :, tokens % block_size].unbind(1)
    return key, value


def find_seen(rows: Tensor, tokens: Tensor, window: int | None) -> Tensor:
    """Return which tokens each row sees, bool [num_rows, num_tokens], given the positions of both: no later ones and,
    with a window, only the last ones, its own among them."""
    age = rows[:, None] - tokens
    return (age >= 0) & (age < (math.inf if window is None else window))


def attend(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, scores: Scores) -> Tensor:
    """Return the attention of a sequence's rows [num_rows, heads, head_dim] over its tokens [num_tokens, kv_heads,
    head_dim], fp32. `seen`, bool [num_rows, num_tokens], has a token for every row."""
    rows, heads, _ = query.shape
    key, value = (side.float().repeat_interleave(heads // side.shape[1], dim=1) for side in (key, value))
    found = torch.einsum("rhd,thd->hrt", query.float(), key) * scores.scale
    if scores.cap is not None:
        found = scores.cap * torch.tanh(found / scores.cap)
    found = found.masked_fill(~seen, -math.inf)
    if scores.sinks is not None:
        sinks = scores.sinks.float()[:, None, None].expand(-1, rows, 1)
        found = torch.cat((found, sinks), dim=-1)
    weights = found.softmax(-1)[..., : len(key)]
    return torch.einsum("hrt,thd->rhd", weights, value)


def lora_delta(
    x: Tensor, row_adapter_slots: list[int], arena: Tensor, table: LoraTable, layer: int, group: ProjectionGroup
) -> Tensor:
    """Return the LoRA delta of one layer, which `Backend.add_lora` must add to the base output for `x` [num_rows,
    in_features]: fp32 [num_rows, sum(out_features)]. Rows with slot -1 use the base model, and their delta is 0."""
    plan = plan_segments(np.array(row_adapter_slots, dtype=np.int32))
    return LoraStep(arena, table, plan).delta(x, layer, group)


@dataclass(frozen=True, slots=True)
class LoraStep:
    """The LoRA data of one step: the rows of each adapter, and where its weights lie."""

    arena: Tensor
    table: LoraTable
    plan: SegmentPlan

    def delta(self, x: Tensor, layer: int, group: ProjectionGroup) -> Tensor:
        """Return B A x of each row's own adapter, fp32 [num_rows, sum(out_features)]: see `lora_delta`."""
        delta = torch.zeros(len(x), sum(group.out_features), dtype=torch.float32)
        for index, adapter_slot in enumerate(self.plan.adapter_slots.tolist()):
            start, stop = self.plan.starts[index : index + 2]
            rows, column = torch.from_numpy(self.plan.rows[start:stop]).long(), 0
            for target, features in zip(group.targets, group.out_features, strict=True):
                place = self.arena, self.table, adapter_slot, layer, target
                a, b = gather_block(*place, SIDE_A, group.in_features), gather_block(*place, SIDE_B, features)
                shrunk = x[rows].float() @ a.T
                delta[rows, column : column + features] = shrunk @ b
                column += features
        return delta


def gather_block(
    arena: Tensor, table: LoraTable, adapter_slot: int, layer: int, target: int, side: int, width: int
) -> Tensor:
    """Return the A or B block (chosen by `side`) of an adapter at one layer and target, fp32 [rank, width]: a row for
    each rank, in tiles of `RANK_TILE` rows that may lie in different pages."""
    rank, read = int(table.ranks[adapter_slot, layer, target]), _read_fp8_tile if table.fp8 else _read_tile
    starts = (table.offsets[adapter_slot, layer, target, side].long() * ALIGN).tolist()
    tiles = [
        read(arena, starts[first // RANK_TILE], min(RANK_TILE, rank - first), width, side)
        for first in range(0, rank, RANK_TILE)
    ]
    return torch.cat(tiles) if tiles else torch.zeros(0, width)


def _read_tile(arena: Tensor, start: int, count: int, width: int, side: int) -> Tensor:
    """Return the tile of `count` rows that begins at element `start` of the arena, fp32 [count, width]."""
    return arena[start : start + count * width].view(count, width).float()


def _read_fp8_tile(arena: Tensor, start: int, count: int, width: int, side: int) -> Tensor:
    """Return an FP8 tile, like `_read_tile`. Rows of B are preceded by factors, the products of the ranks' scales in A
    and B, by which they are multiplied."""
    memory = arena.view(torch.uint8)[2 * start :]
    if side == SIDE_A:
        return memory[: count * width].view(torch.float8_e4m3fn).float().view(count, width)
    header = 4 * FP8_SCALES
    factors = memory[:header].view(torch.float32)[:count, None]
    return memory[header : header + count * width].view(torch.float8_e4m3fn).float().view(count, width) * factors


class ReferenceBackend:
    """`Backend` for CPU tensors, in the words of this module. It holds no state."""

    name = "reference"

    def __init__(self) -> None:
        self.pointwise = TorchPointwise()
        self.experts = TorchExperts(self.prepare_lora)

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
        head_dim]: `Backend.rotate_and_write`. It may modify `qkv`."""
        require_plain(kv_coding)
        query, key, value = rotate_heads(self.pointwise, qkv, kv, cos, sin, norms)
        self.write_kv(kv, key, value, batch)
        return query

    def write_kv(self, kv: Tensor, key: Tensor, value: Tensor, batch: AttentionBatch) -> None:
        """Store this step's K and V ([num_rows, kv_heads, head_dim]) at `batch.kv_slots` of one layer's KV."""
        page, offset = batch.kv_slots // kv.shape[2], batch.kv_slots % kv.shape[2]
        kv[page, 0, offset] = key
        kv[page, 1, offset] = value

    def attention(
        self,
        query: Tensor,
        kv: Tensor,
        batch: AttentionBatch,
        scores: Scores,
        window: int | None = None,
        kv_coding: KvCoding | None = None,
    ) -> Tensor:
        """Return causal attention of `query` [num_rows, heads, head_dim] over paged `kv`: `Backend.attention`."""
        require_plain(kv_coding)
        return attention(query, kv, batch, scores, window).to(query.dtype)

    def prepare_lora(self, arena: Tensor, table: LoraTable, plan: SegmentPlan) -> LoraStep | None:
        """Return the LoRA data of one step, or None if no row has an adapter with a rank above 0."""
        return LoraStep(arena, table, plan) if table.host_ranks[plan.adapter_slots].any() else None

    def add_lora(self, out: Tensor, x: Tensor, prepared: LoraStep, layer: int, group: ProjectionGroup) -> None:
        """Add B A x of each row's own adapter to `out` [num_rows, sum(out_features)] in place: `Backend.add_lora`."""
        out.copy_(out.float() + prepared.delta(x, layer, group))
