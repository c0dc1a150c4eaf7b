"""Reference implementations of the kernels as plain loops in fp32, for tests only."""

from __future__ import annotations

import torch
from torch import Tensor

from lora_kernels.backend import AttentionBatch, Scores
from lora_kernels.layout import ALIGN, FP8_SCALES, RANK_TILE, SIDE_A, SIDE_B, LoraTable, ProjectionGroup


def attention(query: Tensor, kv: Tensor, batch: AttentionBatch, scores: Scores, window: int | None = None) -> Tensor:
    """Computes causal attention as `Backend.attention` must, with one fp32 softmax per query row and head. Returns fp32
    [num_rows, heads, head_dim], the shape of `query`."""
    heads, block_size, kv_heads = query.shape[1], kv.shape[2], kv.shape[3]
    out = torch.zeros(query.shape, dtype=torch.float32)
    for sequence, context in enumerate(batch.host_context_lens):
        start, stop = batch.host_query_starts[sequence : sequence + 2]
        for row in range(start, stop):
            last = context - (stop - row)
            first = 0 if window is None else max(0, last - window + 1)
            seen = [
                kv[int(batch.block_tables[sequence, position // block_size]), :, position % block_size].float()
                for position in range(first, last + 1)
            ]
            key, value = torch.stack(seen).unbind(1)
            for head in range(heads):
                kv_head = head // (heads // kv_heads)
                weights = _weights(key[:, kv_head] @ query[row, head].float(), head, scores)
                out[row, head] = weights @ value[:, kv_head]
    return out


def _weights(products: Tensor, head: int, scores: Scores) -> Tensor:
    """Returns the weights of the tokens that a row's query head sees, given its products with their keys: [tokens]."""
    found = products * scores.scale
    if scores.cap is not None:
        found = scores.cap * torch.tanh(found / scores.cap)
    if scores.sinks is None:
        return torch.softmax(found, dim=0)
    return torch.softmax(torch.cat((found, scores.sinks[head : head + 1])), dim=0)[:-1]


def lora_delta(
    x: Tensor, row_adapter_slots: list[int], arena: Tensor, table: LoraTable, layer: int, group: ProjectionGroup
) -> Tensor:
    """Returns the LoRA delta of one layer, which `Backend.add_lora` must add to the base output for `x` [num_rows,
    in_features]: fp32 [num_rows, sum(out_features)]. Rows with slot -1 use the base model, and their delta is 0."""
    delta = torch.zeros(len(row_adapter_slots), sum(group.out_features), dtype=torch.float32)
    for row, adapter_slot in enumerate(row_adapter_slots):
        column = 0
        for target, features in zip(group.targets, group.out_features, strict=True):
            if adapter_slot >= 0:
                a = _block(arena, table, adapter_slot, layer, target, SIDE_A, group.in_features)
                b = _block(arena, table, adapter_slot, layer, target, SIDE_B, features)
                delta[row, column : column + features] = (a @ x[row].float()) @ b
            column += features
    return delta


def _block(
    arena: Tensor, table: LoraTable, adapter_slot: int, layer: int, target: int, side: int, width: int
) -> Tensor:
    """Reads the A or B block (chosen by `side`) of an adapter at one layer and target. Returns fp32 [rank, width]."""
    rank = int(table.ranks[adapter_slot, layer, target])
    rows = torch.zeros(rank, width, dtype=torch.float32)
    for first in range(0, rank, RANK_TILE):
        count = min(RANK_TILE, rank - first)
        start = int(table.offsets[adapter_slot, layer, target, side, first // RANK_TILE]) * ALIGN
        tile = _fp8_tile(arena, start, count, width, side) if table.fp8 else arena[start : start + count * width]
        rows[first : first + count] = tile.view(count, width).float()
    return rows


def _fp8_tile(arena: Tensor, start: int, count: int, width: int, side: int) -> Tensor:
    """Reads an FP8 tile of `count` rows that begins at element `start` of the arena. Returns fp32 numbers: flat for A;
    [count, width] for B, with each row multiplied by its stored factor, the product of the rank's scales in A and B."""
    memory = arena.view(torch.uint8)[2 * start :]
    if side == SIDE_A:
        return memory[: count * width].view(torch.float8_e4m3fn).float()
    header = 4 * FP8_SCALES
    factors = memory[:header].view(torch.float32)[:count, None]
    return memory[header : header + count * width].view(torch.float8_e4m3fn).float().view(count, width) * factors
