"""The products of experts on a GPU: each entry with the weight of its own expert, in one launch. Programs find their
tiles in the experts' counts, which the host need not know; those beyond the last end at once."""

from __future__ import annotations

import triton
import triton.language as tl

SIDE_BY_SIDE = tl.constexpr(8)
"""Tiles that are computed for all blocks of outputs before the next ones are. Programs that run at the same time then
read the same few tiles of entries and, where an expert has several tiles, the same weights, which the L2 keeps."""


@triton.jit
def find_tile(starts_ptr, tile, EXPERTS: tl.constexpr, EXPERT_BLOCK: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return the expert of a tile, its first entry, and the end of the expert's entries. Tiles have BLOCK_M entries of
    one expert, the last one of each expert what remains. The end is 0 beyond the last tile."""
    e = tl.arange(0, EXPERT_BLOCK)
    first = tl.load(starts_ptr + e, mask=e < EXPERTS, other=0)
    last = tl.load(starts_ptr + e + 1, mask=e < EXPERTS, other=0)
    tiles = (last - first + BLOCK_M - 1) // BLOCK_M
    ends = tl.cumsum(tiles, axis=0)
    here = (tile < ends) & (tile >= ends - tiles)  # at one expert at most
    expert = tl.sum(tl.where(here, e, 0), axis=0)
    entry = tl.sum(tl.where(here, first + (tile - ends + tiles) * BLOCK_M, 0), axis=0)
    return expert, entry, tl.sum(tl.where(here, last, 0), axis=0)


@triton.jit
def tile_and_block(FEATURES: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the numbers of this program's tile and of its block of outputs."""
    BLOCKS: tl.constexpr = (FEATURES + BLOCK_N - 1) // BLOCK_N
    program = tl.program_id(0)
    within = program % (SIDE_BY_SIDE * BLOCKS)
    tile = program // (SIDE_BY_SIDE * BLOCKS) * SIDE_BY_SIDE + within % SIDE_BY_SIDE
    return tile, within // SIDE_BY_SIDE


@triton.jit
def grouped_kernel(
    x_ptr,
    expert_weights_ptr,
    starts_ptr,
    out_ptr,
    expert_biases_ptr,
    x_stride,
    EXPERTS: tl.constexpr,
    EXPERT_BLOCK: tl.constexpr,
    FEATURES: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_BIASES: tl.constexpr,
):
    """Compute out[entries, features] of one tile and one block of features, from weights [experts, FEATURES, WIDTH] and
    biases [experts, FEATURES], with fp32 sums in an order that does not depend on the tile's height."""
    tile, block = tile_and_block(FEATURES, BLOCK_N)
    expert, first, end = find_tile(starts_ptr, tile, EXPERTS, EXPERT_BLOCK, BLOCK_M)
    if first < end:
        m = first + tl.arange(0, BLOCK_M)
        n = block * BLOCK_N + tl.arange(0, BLOCK_N)
        k = tl.arange(0, BLOCK_K)
        weights = expert_weights_ptr + expert.to(tl.int64) * (FEATURES * WIDTH)
        # Clamped, so that whole tiles of weights are loaded without a mask.
        weights += (tl.minimum(n, FEATURES - 1) * WIDTH)[:, None] + k[None, :]
        x_rows = x_ptr + m.to(tl.int64)[None, :] * x_stride + k[:, None]
        total = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
        for first_k in range(0, WIDTH, BLOCK_K):
            if WIDTH % BLOCK_K == 0:
                w = tl.load(weights + first_k)
                x = tl.load(x_rows + first_k, mask=(m < end)[None, :], other=0.0)
            else:
                inside = k < WIDTH - first_k
                w = tl.load(weights + first_k, mask=inside[None, :], other=0.0)
                x = tl.load(x_rows + first_k, mask=(m < end)[None, :] & inside[:, None], other=0.0)
            total = tl.dot(w, x, total, input_precision="ieee")
        if HAS_BIASES:
            biases = expert_biases_ptr + expert.to(tl.int64) * FEATURES
            total += tl.load(biases + tl.minimum(n, FEATURES - 1)).to(tl.float32)[:, None]
        at = out_ptr + m.to(tl.int64)[:, None] * FEATURES + n[None, :]
        mask = (m < end)[:, None] & (n < FEATURES)[None, :]
        tl.store(at, tl.trans(total).to(out_ptr.dtype.element_ty), mask=mask)
