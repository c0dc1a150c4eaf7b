"""Paged attention in vectorised torch: pages are gathered and passed to scaled-dot-product attention.

Decoding sequences are computed together, a few megabytes of KV at a time, so that the gathered KV is still in cache
when it is read. Each sequence's partly filled last page is gathered first, where one masked fill clears the tails of
all sequences. Slots that were never written must not reach a product, since even a weight of zero does not cancel a
NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lora_kernels.backend import AttentionBatch, Scores

GATHER_BYTES = 4 << 20
"""Bytes of K and V of one layer gathered at once for decoding, a fraction of the last-level cache."""


@dataclass(frozen=True, slots=True)
class DecodeChunk:
    """Decoding sequences whose attention is computed together.

    Attributes:
        rows: int64 [num_seqs]. Query row of each sequence.
        pages: int64 [num_seqs * blocks]. For each sequence, its last page, the pages before it in order, and page 0 as
            padding.
        unwritten: bool [num_seqs, block_size, 1, 1], True at the unwritten tail of the last page. None means that no
            sequence has such a tail.
        bias: [num_seqs, 1, 1, blocks * block_size]. 0 at visible tokens, -inf elsewhere.
    """

    rows: Tensor
    pages: Tensor
    unwritten: Tensor | None
    bias: Tensor


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """A sequence with several query rows. `group` is the number of query heads per KV head.

    Attributes:
        start, stop: range of its query rows.
        pages: int64 [blocks]. Pages of all blocks that its rows can see.
        num_tokens: number of tokens stored in those pages.
        bias: [rows * group, num_tokens]. 0 at visible tokens, -inf elsewhere, repeated for each head of a group.
    """

    start: int
    stop: int
    pages: Tensor
    num_tokens: int
    bias: Tensor


@dataclass(frozen=True, slots=True)
class TorchAttentionPlan:
    """Index tensors and masks of one step, which all layers with the same window share."""

    decodes: tuple[DecodeChunk, ...]
    prefills: tuple[PrefillChunk, ...]


def plan_attention(kv: Tensor, batch: AttentionBatch, group: int, window: int | None) -> TorchAttentionPlan:
    """Plans the attention of a step, for all layers with KV of the shape and dtype of `kv` and this `window` (see
    `Backend.attention`). `group` is the number of query heads per KV head."""
    block_size, page_bytes = kv.shape[2], kv[0].numel() * kv.element_size()
    tables = batch.block_tables.numpy()
    lens = np.array(batch.host_context_lens, dtype=np.int64)
    first = np.zeros_like(lens) if window is None else np.maximum(lens - window, 0)
    decodes = tuple(
        _plan_decodes(rows, tables, lens, first, block_size, kv.dtype)
        for rows in _split_decodes(lens - first, batch.num_decodes, block_size, page_bytes)
    )
    prefills = tuple(
        _plan_prefill(sequence, tables, batch, block_size, group, window, kv.dtype)
        for sequence in range(batch.num_decodes, len(lens))
    )
    return TorchAttentionPlan(decodes, prefills)


def attend(query: Tensor, kv: Tensor, plan: TorchAttentionPlan, scores: Scores) -> Tensor:
    """Returns the causal attention of `query` [num_rows, heads, head_dim] over one layer's paged `kv`, in the same
    shape. `plan` must be from `plan_attention` for this step."""
    out = torch.empty_like(query)
    for decode in plan.decodes:
        out[decode.rows] = _attend_decodes(query[decode.rows], kv, decode, scores)
    for prefill in plan.prefills:
        rows = slice(prefill.start, prefill.stop)
        out[rows] = _attend_prefill(query[rows], kv, prefill, scores)
    return out


def _attend_grouped(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scores: Scores) -> Tensor:
    """Returns the attention of query heads over the keys and values of the KV heads that they share.

    Args:
        query: [num_seqs, kv_heads, rows * group, head_dim]. The query heads of one KV head, row after row.
        key, value: [num_seqs, kv_heads, tokens, head_dim].
        bias: 0 at visible tokens, -inf elsewhere, of a shape that fits [num_seqs, kv_heads, rows * group, tokens].

    Returns:
        The same shape and dtype as `query`. Scores that torch's own attention does not know are computed in fp32.
    """
    if scores.cap is None and scores.sinks is None:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scores.scale)
    found = query.float() @ key.float().mT * scores.scale
    if scores.cap is not None:
        found = scores.cap * torch.tanh(found / scores.cap)
    found = found + bias
    if scores.sinks is not None:
        of_kv_head = scores.sinks.view(query.shape[1], -1)
        sinks = of_kv_head.repeat(1, query.shape[2] // of_kv_head.shape[1])[:, :, None]
        found = torch.cat((found, sinks.expand(len(query), -1, -1, -1)), dim=-1)
    weights = found.softmax(-1)[..., : key.shape[2]]
    return (weights @ value.float()).to(query.dtype)


def _split_decodes(visible: np.ndarray, num_decodes: int, block_size: int, page_bytes: int) -> list[np.ndarray]:
    """Sorts decoding sequences by `visible`, their numbers of visible tokens, ascending, and splits them into runs
    whose pages, padded to the longest of the run, fit in `GATHER_BYTES`, or of one sequence that does not. Returns the
    sequence indices of each run."""
    order = np.argsort(visible[:num_decodes], kind="stable")
    runs: list[np.ndarray] = []
    start = 0
    for index in range(num_decodes):
        blocks = int(visible[order[index]]) // block_size + 2
        if index > start and (index + 1 - start) * blocks * page_bytes > GATHER_BYTES:
            runs.append(order[start:index])
            start = index
    return [*runs, order[start:]] if num_decodes else []


def _plan_decodes(
    rows: np.ndarray, tables: np.ndarray, lens: np.ndarray, first: np.ndarray, block_size: int, dtype: torch.dtype
) -> DecodeChunk:
    lens, first = lens[rows][:, None], first[rows][:, None]
    last_block, first_block = (lens - 1) // block_size, first // block_size
    column = np.arange(int((last_block - first_block).max()) + 1)
    block = np.where(column == 0, last_block, first_block + column - 1)
    present = (column == 0) | (block < last_block)
    pages = np.where(present, tables[rows[:, None], np.where(present, block, 0)], 0)
    position = block[:, :, None] * block_size + np.arange(block_size)
    visible = present[:, :, None] & (position >= first[:, :, None]) & (position < lens[:, :, None])
    tail = position[:, 0] >= lens
    bias = np.where(visible.reshape(len(rows), 1, 1, -1), 0.0, -np.inf)
    return DecodeChunk(
        rows=torch.from_numpy(rows),
        pages=torch.from_numpy(pages.reshape(-1).astype(np.int64)),
        unwritten=torch.from_numpy(tail[:, :, None, None]) if tail.any() else None,
        bias=torch.from_numpy(bias).to(dtype),
    )


def _plan_prefill(
    sequence: int,
    tables: np.ndarray,
    batch: AttentionBatch,
    block_size: int,
    group: int,
    window: int | None,
    dtype: torch.dtype,
) -> PrefillChunk:
    start, stop = batch.host_query_starts[sequence : sequence + 2]
    context = batch.host_context_lens[sequence]
    position = np.arange(context - (stop - start), context)[:, None]
    oldest = np.zeros_like(position) if window is None else np.maximum(position - window + 1, 0)
    first_block = int(oldest[0, 0]) // block_size
    token = np.arange(first_block * block_size, context)
    visible = (token <= position) & (token >= oldest)
    pages = tables[sequence, first_block : -(-context // block_size)].astype(np.int64)
    bias = torch.from_numpy(np.where(visible, 0.0, -np.inf)).to(dtype).repeat_interleave(group, dim=0)
    return PrefillChunk(start, stop, torch.from_numpy(pages), len(token), bias)


def _attend_decodes(query: Tensor, kv: Tensor, chunk: DecodeChunk, scores: Scores) -> Tensor:
    """Returns the attention of `query` [num_seqs, heads, head_dim], the rows of `chunk`, in the same shape. The query
    heads of one KV head (GQA) become the query rows of one product."""
    num_seqs, heads, head_dim = query.shape
    key, value = (_gather_decodes(kv[:, side], chunk) for side in (0, 1))
    packed = query.view(num_seqs, key.shape[1], -1, head_dim)
    out = _attend_grouped(packed, key, value, chunk.bias, scores)
    return out.reshape(num_seqs, heads, head_dim)


def _gather_decodes(pages: Tensor, chunk: DecodeChunk) -> Tensor:
    """Gathers K or V of a chunk's sequences from its pages [num_pages, block_size, kv_heads, head_dim], with 0 in slots
    that were never written. Returns a copy, [num_seqs, kv_heads, tokens, head_dim]."""
    gathered = pages.index_select(0, chunk.pages).unflatten(0, (len(chunk.rows), -1))
    if chunk.unwritten is not None:
        gathered[:, 0].masked_fill_(chunk.unwritten, 0)
    return gathered.flatten(1, 2).transpose(1, 2)


def _attend_prefill(query: Tensor, kv: Tensor, chunk: PrefillChunk, scores: Scores) -> Tensor:
    """Returns the attention of `query` [rows, heads, head_dim], the rows of `chunk`, in the same shape."""
    key, value = (kv[:, side].index_select(0, chunk.pages).flatten(0, 1)[: chunk.num_tokens] for side in (0, 1))
    return attend_rows(query, key, value, chunk.bias, scores)


def attend_rows(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scores: Scores) -> Tensor:
    """Returns the attention of `query` [rows, heads, head_dim] over `key` and `value` [tokens, kv_heads, head_dim], in
    the same shape. `bias` is as `PrefillChunk.bias`. The query heads of one KV head (GQA) become additional query rows
    of one product."""
    rows, heads, head_dim = query.shape
    grouped = query.reshape(rows, key.shape[1], -1, head_dim).transpose(0, 1).flatten(1, 2)[None]
    out = _attend_grouped(grouped, key.transpose(0, 1)[None], value.transpose(0, 1)[None], bias, scores)
    return out[0].unflatten(1, (rows, -1)).transpose(0, 1).reshape(rows, heads, head_dim)
