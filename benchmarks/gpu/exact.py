"""Exact results in fp32 by torch, the error that rounding explains, and random weights and masks: what the kernels'
tests on a device and the benchmarks of their speed share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.shapes import AdapterBank, AttentionLoad
from engine.model.sample.masks import TokenMasks, pack_bits
from lora_kernels.backend import Scores
from lora_kernels.fp8 import Fp8Weight, quantize_fp8
from lora_kernels.layout import ALIGN, RANK_TILE, SIDE_A, SIDE_B, ProjectionGroup
from lora_kernels.quantized import Coding, QuantizedWeight

BY_ROWS = Coding(8, 128, 128, by_rows=True)


def exact_delta(bank: AdapterBank, group: ProjectionGroup, lengths: Sequence[int], x: Tensor) -> Tensor:
    """Return the first layer's LoRA delta [num_rows, sum of out_features], in fp32 by torch, adapter by adapter."""
    parts = []
    for adapter_slot, rows in enumerate(x.float().split(list(lengths))):
        deltas = [
            rows
            @ _block(bank, adapter_slot, target, SIDE_A, group.in_features).T
            @ _block(bank, adapter_slot, target, SIDE_B, width)
            for target, width in zip(group.targets, group.out_features, strict=True)
        ]
        parts.append(torch.cat(deltas, dim=1))
    return torch.cat(parts)


def _block(bank: AdapterBank, adapter_slot: int, target: int, side: int, width: int) -> Tensor:
    """Return A or B (`side`) of an adapter's projection in the bank's first layer as [rank, width] in fp32."""
    rank, tiles = bank.ranks[adapter_slot], []
    for tile in range(-(-rank // RANK_TILE)):
        rows = min(RANK_TILE, rank - tile * RANK_TILE)
        start = int(bank.table.host_offsets[adapter_slot, 0, target, side, tile]) * ALIGN
        tiles.append(bank.arena[start : start + rows * width].view(rows, width).float())
    return torch.cat(tiles)


def exact_attention(load: AttentionLoad, window: int | None) -> Tensor:
    """Return the attention over the load's first layer, [num_rows, heads, head_dim], computed in fp32 by torch,
    sequence by sequence. A query sees the last `window` tokens up to its own; None means all."""
    outs, kv = [], load.kv[0]
    group = load.query.shape[1] // kv.shape[3]
    for sequence, (rows, context) in enumerate(load.chunks):
        start = load.batch.host_query_starts[sequence]
        query = load.query[start : start + rows].float()
        pages = load.batch.block_tables[sequence, : -(-context // kv.shape[2])].long()
        key, value = kv[pages].float().transpose(0, 1).flatten(1, 2)[:, :context].repeat_interleave(group, dim=2)
        last = torch.arange(context - rows, context, device=query.device)[:, None]
        seen = torch.arange(context, device=query.device)[None, :]
        visible = (seen <= last) & (seen > last - (window or context))
        weights = exact_weights(torch.einsum("qhd,khd->hqk", query, key), visible, load.scores)
        outs.append(torch.einsum("hqk,khd->qhd", weights, value))
    return torch.cat(outs)


def exact_weights(products: Tensor, visible: Tensor, scores: Scores) -> Tensor:
    """Return the weights of tokens, given products of queries and keys [heads, rows, tokens]."""
    found = products * scores.scale
    if scores.cap is not None:
        found = scores.cap * torch.tanh(found / scores.cap)
    found = found.masked_fill(~visible, -torch.inf)
    if scores.sinks is None:
        return found.softmax(-1)
    sinks = scores.sinks[:, None, None].expand(-1, found.shape[1], 1)
    return torch.cat((found, sinks), dim=-1).softmax(-1)[..., :-1]


def bounded(load: AttentionLoad, *, sinks: bool = True) -> AttentionLoad:
    """Return the load with scores that are bounded and, unless told otherwise, sinks."""
    heads = torch.linspace(-2, 2, load.query.shape[1], device=load.query.device)
    return replace(load, scores=replace(load.scores, cap=1.0, sinks=heads if sinks else None))


def relative_error(result: Tensor, exact: Tensor, dtype: torch.dtype) -> float:
    """Return ||result - exact|| / ||exact||. Raises AssertionError if a number is not finite, if the error is more than
    rounding to `dtype` once in the middle and once at the end explains, or if one number is off by more than twice the
    rounding of the largest number."""
    assert result.isfinite().all(), f"{int((~result.isfinite()).sum())} numbers are not finite"
    unit = torch.finfo(dtype).eps * (64 if dtype == torch.float32 else 1)
    off = result.float() - exact
    error, worst = float(off.norm() / exact.norm()), float(off.abs().max() / exact.abs().max())
    assert error <= unit, f"a relative error of {error:.3g}, where rounding is worth {unit:.3g}"
    assert worst <= 2 * unit, f"one number is {worst:.3g} of the largest off, where rounding is worth {unit:.3g}"
    return error


def random_fp8(shape: tuple[int, int], device: torch.device) -> Fp8Weight:
    return quantize_fp8(torch.randn(shape, device=device, generator=torch.Generator(device).manual_seed(0)) * 0.02)


def random_weight(coding: Coding, shape: tuple[int, int], device: torch.device) -> QuantizedWeight:
    """Return a weight of random codes, and of zeros or minima where the coding has them."""
    generator = torch.Generator(device).manual_seed(0)
    groups = shape[0], shape[1] // coding.group
    codes = torch.randint(0, 1 << coding.bits, shape, dtype=torch.uint8, device=device, generator=generator)
    scales = (torch.rand(groups, device=device, generator=generator) * 0.01 + 0.001).half()
    if coding.by_rows:
        scales = scales[:, :1].expand(groups).contiguous()
    if coding.zero is not None:
        return QuantizedWeight(coding, codes, scales)
    zeros = torch.randint(0, 1 << coding.bits, groups, device=device, generator=generator).half()
    return QuantizedWeight(coding, codes, scales, -zeros if coding.in_scales else -zeros * scales)


def inputs(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(rows, width, device=device, generator=torch.Generator(device).manual_seed(1)).to(dtype)


def random_masks(rows: Sequence[int], vocab: int, seed: int = 0) -> TokenMasks:
    """Return masks that allow a random half of the tokens in each of `rows`, and all tokens in other rows."""
    halves = np.random.default_rng(seed).permuted(np.tile(np.arange(vocab), (len(rows), 1)), axis=1)[:, : vocab // 2]
    return TokenMasks(tuple(rows), np.stack([pack_bits(half, vocab) for half in halves]))
