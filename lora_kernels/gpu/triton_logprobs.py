"""Logprobs of the chosen and the likeliest tokens on a GPU: two launches for all requested rows, one pass each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lora_kernels.gpu.launch import with_constants

CHUNK = 4096
"""Tokens that one program reads."""


def logprobs(logits: Tensor, rows: Tensor, ids: Tensor, width: int) -> Tensor:
    """Return logprobs of `logits` [num_rows, vocab_size] for the wanted `rows`, int32 [num_wanted]: int32 [num_wanted,
    1 + 2 * width]. `ids`, int64 [num_rows], are the tokens chosen. Among equals, the lower id ranks first."""
    # A line has the bits of the chosen token's fp32 logprob, the ids of the likeliest tokens, and the bits of theirs.
    wanted, vocab = len(rows), logits.shape[1]
    chunks = triton.cdiv(vocab, CHUNK)
    sums = torch.empty(wanted, chunks, 2, dtype=torch.float32, device=logits.device)
    tops = torch.empty(wanted, chunks, max(width, 1), dtype=torch.float32, device=logits.device)
    top_ids = torch.empty(tops.shape, dtype=torch.int32, device=logits.device)
    out = torch.empty(wanted, 1 + 2 * width, dtype=torch.int32, device=logits.device)
    stride = logits.stride(0)
    rank = with_constants(rank_kernel, CHUNK=CHUNK, num_warps=8)
    rank((wanted, chunks), logits, rows, sums, tops, top_ids, vocab, chunks, width, stride)
    shape = {"CHUNKS": triton.next_power_of_2(chunks), "WIDTH": triton.next_power_of_2(max(width, 1))}
    finish = with_constants(logprob_kernel, **shape, num_warps=4)
    finish((wanted,), out, logits, rows, ids, sums, tops, top_ids, chunks, width, stride)
    return out


@triton.jit(do_not_specialize=["num_chunks", "width"])
def rank_kernel(
    logits_ptr,
    rows_ptr,
    sums_ptr,
    tops_ptr,
    top_ids_ptr,
    vocab,
    num_chunks,
    width,
    logits_stride,
    CHUNK: tl.constexpr,
):
    """Store the highest logit of one (row, chunk) and the sum of exp(logit - highest) at `sums_ptr`, and the `width`
    highest logits and their ids (-1 where the chunk has fewer) at `tops_ptr` and `top_ids_ptr`."""
    row = tl.load(rows_ptr + tl.program_id(0)).to(tl.int64)
    chunk = tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    logits = tl.load(logits_ptr + row * logits_stride + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    logits = tl.where(logits == logits, logits, float("-inf"))
    place = tl.program_id(0) * num_chunks + chunk
    peak = tl.max(logits, 0)
    tl.store(sums_ptr + place * 2, peak)
    tl.store(sums_ptr + place * 2 + 1, tl.sum(tl.exp(logits - tl.where(peak == float("-inf"), 0.0, peak)), 0))
    left = token < vocab
    for i in range(width):
        # Keys order like the logits. Tokens already taken and positions beyond the vocabulary get the lowest key.
        bits = (logits + 0.0).to(tl.int32, bitcast=True)
        key = tl.where(left, bits ^ ((bits >> 31) & 0x7FFFFFFF), -0x7FFFFFFF - 1)
        _, best = tl.max(key, 0, return_indices=True)
        here = tl.arange(0, CHUNK) == best
        tl.store(tops_ptr + place * width + i, tl.max(tl.where(here, logits, float("-inf")), 0))
        tl.store(top_ids_ptr + place * width + i, tl.where(tl.max(key, 0) > -0x7FFFFFFF - 1, chunk * CHUNK + best, -1))
        left &= ~here


@triton.jit(do_not_specialize=["num_chunks", "width"])
def logprob_kernel(
    out_ptr,
    logits_ptr,
    rows_ptr,
    ids_ptr,
    sums_ptr,
    tops_ptr,
    top_ids_ptr,
    num_chunks,
    width,
    logits_stride,
    CHUNKS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Compute one row of the result of `logprobs` from what `rank_kernel` stored for the row's chunks."""
    wanted = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + wanted).to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    mask = chunk < num_chunks
    sum_ptr = sums_ptr + (wanted * num_chunks + chunk) * 2
    peaks = tl.load(sum_ptr, mask=mask, other=float("-inf"))
    peak = tl.max(peaks, 0)
    total = tl.sum(tl.load(sum_ptr + 1, mask=mask, other=0.0) * tl.exp(peaks - peak), 0)
    norm = tl.log(total)
    chosen = tl.load(logits_ptr + row * logits_stride + tl.load(ids_ptr + row)).to(tl.float32)
    place = out_ptr + wanted * (1 + 2 * width)
    tl.store(place, (chosen - peak - norm).to(tl.int32, bitcast=True))

    i = tl.arange(0, CHUNKS * WIDTH)
    from_chunk = i // WIDTH
    rank = i % WIDTH
    mask = (from_chunk < num_chunks) & (rank < width)
    source = (wanted * num_chunks + from_chunk) * width + rank
    tops = tl.load(tops_ptr + source, mask=mask, other=float("-inf"))
    top_ids = tl.load(top_ids_ptr + source, mask=mask, other=-1)
    bits = (tops + 0.0).to(tl.int32, bitcast=True)
    key = tl.where(top_ids >= 0, bits ^ ((bits >> 31) & 0x7FFFFFFF), -0x7FFFFFFF - 1)
    for k in range(width):
        _, best = tl.max(key, 0, return_indices=True)
        here = i == best
        tl.store(place + 1 + k, tl.max(tl.where(here, top_ids, -1), 0))
        top = tl.max(tl.where(here, tops, float("-inf")), 0)
        tl.store(place + 1 + width + k, (top - peak - norm).to(tl.int32, bitcast=True))
        key = tl.where(here, -0x7FFFFFFF - 1, key)
