"""Samples tokens from logits on a GPU, with two launches per step and no copy to the host. The first shapes the scores
of chunks of rows; the second chooses each row's token and updates its words (sampling_words.py)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from lora_kernels.gpu.launch import with_constants
from lora_kernels.gpu.triton_ranking import (
    BINS,
    BINS_A_LOGIT,
    COUNT_BITS,
    LOWEST,
    ONE,
    field,
    fill_histogram,
    find,
    gather,
    key_score,
    order_key,
    point_in,
    search,
    share,
    tally,
    weigh,
)
from lora_kernels.gpu.triton_scores import (
    IS_DRAWN,
    IS_FILTERED,
    IS_GREEDY,
    KIND,
    MIN_P,
    NUM_GENERATED,
    NUM_WORDS,
    POSITION,
    SEED,
    SEEN,
    TOP_K,
    TOP_P,
    load_chunk,
    shape_chunk,
)

# Rows with filters search their tokens in order, without sorting them (triton_ranking.py). The kernel stores tokens in
# host memory itself: a copy after it took 0.15 ms more on an H200.

MAX_VOCAB = 1 << COUNT_BITS.value
"""Maximum length of a row with its padding: the tokens of a histogram are counted in `COUNT_BITS` bits."""
OFF_TOP_P = tl.constexpr(1 << 62)
CHUNK_ONE = tl.constexpr(float(1 << 40))
"""Exponentials of a chunk are integers in units of 2^-40 of the chunk's highest, so that 2^12 of them can be added
without overflow."""


@dataclass(frozen=True, slots=True)
class SamplingTiles:
    """Tile sizes of the sampling kernels, in tokens. Results depend on `chunk` only through rounding, and not on
    `tile`."""

    chunk: int = 4096
    """Tokens that one program shapes."""
    tile: int = 2048
    """Tokens that a pass over a row holds in registers; divides `chunk`."""


@dataclass(frozen=True, slots=True)
class Work:
    """Device memory through which the first launch of `sample` passes results to the second."""

    peaks: Tensor
    """fp32 [num_rows, num_chunks]. Highest score of each chunk."""
    best: Tensor
    """int32 [num_rows, num_chunks]. The first token that has the highest score of its chunk."""
    masses: Tensor
    """int64 [num_rows, num_chunks]. Sum of exponentials of each chunk, see `CHUNK_ONE`."""
    scores: Tensor
    """fp32 [num_rows, 2, num_chunks * chunk]. Scores of each row with filters, and those that the filters may keep. Has
    0 rows where no row has filters."""
    bins: Tensor
    """int64 [num_rows, BINS]. Histogram of each row with filters. Has 0 rows where no row has filters."""


@dataclass(frozen=True, slots=True)
class SampledRows:
    """What each row of logits is sampled with, on the device."""

    slots: Tensor
    """int32 [num_rows]. Index of the row's request into `words`. Negative in padding rows."""
    lines: Tensor
    """int32 [num_rows]. Line of `masks` with the tokens that the row allows. Negative if it allows all."""
    masks: Tensor
    """int32 [num_lines, ceil(vocab_size / 32)]. Bit t % 32 of number t // 32 allows token t."""


def sample(
    logits: Tensor,
    rows: SampledRows,
    words: Tensor,
    last: Tensor,
    host: Tensor,
    any_filters: bool,
    tiles: SamplingTiles,
) -> Tensor:
    """Choose the next token of every row, store it in `last` (int64 [num_slots]) and `host`, update the row's words,
    and return the tokens, int64 [num_rows], on the device.

    Args:
        logits: [num_rows, vocab_size], of any floating dtype; not modified.
        rows: the token of a padding row is 0.
        words: int64 [num_slots, 16]. See `SlotWords`.
        host: int64 [num_rows] in host memory, pinned for a GPU; readable once an event recorded after this call has
            passed. An unsound row (a logit is NaN or +inf, or no token has a probability) has -1 minus any token.
        any_filters: must be True if any row is FILTERED, because such rows need more memory.
    """
    num_rows, vocab = logits.shape
    chunks = triton.cdiv(vocab, tiles.chunk)
    work = _make_work(num_rows, chunks, any_filters, tiles, logits.device)
    ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    common = {"CHUNK": tiles.chunk, "num_warps": 8}
    given = (rows.slots, rows.lines, rows.masks, words)
    scored = (work.peaks, work.best, work.masses, work.scores)
    sizes = (vocab, chunks, logits.stride(0))
    score = with_constants(score_kernel, **common)
    score((num_rows, chunks), logits, *given, *scored, *sizes)
    shape = {"CHUNKS": triton.next_power_of_2(chunks), "TILE": tiles.tile}
    choose = with_constants(choose_kernel, **shape, HAS_FILTERS=any_filters, **common)
    choose((num_rows,), ids, last, host, logits, *given, *scored, work.bins, *sizes)
    return ids


def work_bytes(rows: int, vocab: int) -> int:
    """Return the bytes of device memory that `sample` uses while it runs, without its result, if all rows have filters
    and the tiles are the default ones."""
    tiles = SamplingTiles()
    work = _make_work(rows, triton.cdiv(vocab, tiles.chunk), True, tiles, torch.device("meta"))
    return sum(part.nbytes for part in (work.peaks, work.best, work.masses, work.scores, work.bins))


def _make_work(rows: int, chunks: int, any_filters: bool, tiles: SamplingTiles, device: torch.device) -> Work:
    filtered = rows if any_filters else 0
    return Work(
        peaks=torch.empty(rows, chunks, dtype=torch.float32, device=device),
        best=torch.empty(rows, chunks, dtype=torch.int32, device=device),
        masses=torch.empty(rows, chunks, dtype=torch.int64, device=device),
        scores=torch.empty(filtered, 2, chunks * tiles.chunk, dtype=torch.float32, device=device),
        bins=torch.empty(filtered, BINS.value, dtype=torch.int64, device=device),
    )


@triton.jit
def score_kernel(
    logits_ptr,
    row_slots_ptr,
    row_lines_ptr,
    masks_ptr,
    words_ptr,
    peaks_ptr,
    best_ptr,
    masses_ptr,
    scores_ptr,
    vocab,
    num_chunks,
    logits_stride,
    CHUNK: tl.constexpr,
):
    """Shape the scores of one (row, chunk), and store the chunk's entries in `Work`: the best token (-1 minus it if a
    logit is NaN or +inf), for rows that draw the sum of exponentials, and with filters the scores."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    slot = tl.load(row_slots_ptr + row).to(tl.int64)
    if slot >= 0:
        word_ptr = words_ptr + slot * NUM_WORDS
        first = chunk * CHUNK
        line = tl.load(row_lines_ptr + row)
        logits = load_chunk(logits_ptr + row * logits_stride, first, vocab, CHUNK)
        unsound = tl.sum(((logits != logits) | (logits == float("inf"))).to(tl.int32), 0) > 0
        scores = shape_chunk(logits, word_ptr, masks_ptr, line, first, vocab, CHUNK)
        peak, best = tl.max(scores, 0, return_indices=True)
        place = row * num_chunks + chunk
        tl.store(peaks_ptr + place, peak)
        tl.store(best_ptr + place, tl.where(unsound, -1 - first - best, first + best))
        kind = tl.load(word_ptr + KIND)
        if kind != IS_GREEDY:
            masses = weigh(scores, tl.where(peak == float("-inf"), 0.0, peak), CHUNK_ONE)
            tl.store(masses_ptr + place, tl.sum(masses, 0))
        if kind == IS_FILTERED:
            tl.store(scores_ptr + row * 2 * num_chunks * CHUNK + first + tl.arange(0, CHUNK), scores)


@triton.jit(do_not_specialize=["num_chunks"])
def choose_kernel(
    ids_ptr,
    last_ptr,
    host_ptr,
    logits_ptr,
    row_slots_ptr,
    row_lines_ptr,
    masks_ptr,
    words_ptr,
    peaks_ptr,
    best_ptr,
    masses_ptr,
    scores_ptr,
    bins_ptr,
    vocab,
    num_chunks,
    logits_stride,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_FILTERS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Choose the token of one row, store it at `ids_ptr`, `last_ptr` and, in host memory, `host_ptr` (there -1 minus
    the token if the row is unsound), and update the row's words."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(row_slots_ptr + row).to(tl.int64)
    token = tl.full((), 0, tl.int64)
    told = token
    if slot >= 0:
        word_ptr = words_ptr + slot * NUM_WORDS
        kind = tl.load(word_ptr + KIND)
        chunk = tl.arange(0, CHUNKS)
        is_chunk = chunk < num_chunks
        peaks = tl.load(peaks_ptr + row * num_chunks + chunk, mask=is_chunk, other=float("-inf"))
        peak, first_best = tl.max(peaks, 0, return_indices=True)
        bests = tl.load(best_ptr + row * num_chunks + chunk, mask=is_chunk, other=0)
        if (kind == IS_GREEDY) | (peak == float("-inf")):
            best = tl.load(best_ptr + row * num_chunks + first_best).to(tl.int64)
            token = tl.where(best < 0, -1 - best, best)
        else:
            masses = tl.load(masses_ptr + row * num_chunks + chunk, mask=is_chunk, other=0)
            fades = tl.exp(peaks - peak)
            masses = (masses.to(tl.float64) * fades.to(tl.float64)).to(tl.int64)
            if kind == IS_DRAWN:
                line = tl.load(row_lines_ptr + row)
                token = draw(
                    logits_ptr + row * logits_stride, word_ptr, masks_ptr, line, masses, fades, peaks, vocab, CHUNKS,
                    CHUNK,
                )  # fmt: skip
            elif HAS_FILTERS:
                scale = tl.div_rn(CHUNK_ONE, tl.sum(masses, 0).to(tl.float32)) * ONE
                padded = num_chunks * CHUNK
                token = draw_filtered(
                    scores_ptr + row * 2 * padded, bins_ptr + row * BINS, word_ptr, peak, scale, padded, TILE
                )
        token = tl.minimum(token, vocab - 1)
        unsound = (tl.min(bests, 0) < 0) | (peak == float("-inf"))
        told = tl.where(unsound, -1 - token, token)
        tl.store(last_ptr + slot, token)
        tl.store(word_ptr + POSITION, tl.load(word_ptr + POSITION) + 1)
        tl.store(word_ptr + NUM_GENERATED, tl.load(word_ptr + NUM_GENERATED) + 1)
        seen_address = tl.load(word_ptr + SEEN)
        if seen_address != 0:
            seen_ptr = seen_address.to(tl.pointer_type(tl.int32)) + token
            tl.store(seen_ptr, tl.load(seen_ptr) + 2)
    tl.store(ids_ptr + row, token)
    tl.store(host_ptr + row, told)


@triton.jit
def draw(logits_ptr, word_ptr, masks_ptr, line, masses, fades, peaks, vocab, CHUNKS: tl.constexpr, CHUNK: tl.constexpr):
    """Return (int64) the smallest token id whose cumulative probability, in id order, exceeds the row's uniform random
    number. `masses`, `fades` and `peaks`, [CHUNKS], are chunks' probabilities, factors from their own sums to these,
    and highest scores."""
    through = tl.cumsum(masses, 0)
    point = point_in(tl.max(through, 0), tl.load(word_ptr + SEED), tl.load(word_ptr + POSITION))
    chosen = tl.sum((through <= point).to(tl.int32), 0)
    here = tl.arange(0, CHUNKS) == chosen
    before = tl.max(tl.where(here, through - masses, 0), 0)
    fade = tl.max(tl.where(here, fades, 0.0), 0)
    peak = tl.max(tl.where(here, peaks, float("-inf")), 0)
    logits = load_chunk(logits_ptr, chosen * CHUNK, vocab, CHUNK)
    scores = shape_chunk(logits, word_ptr, masks_ptr, line, chosen * CHUNK, vocab, CHUNK)
    weights = weigh(scores, peak, CHUNK_ONE)
    within = ((point - before).to(tl.float64) / fade.to(tl.float64)).to(tl.int64)
    within = tl.minimum(within, tl.sum(weights, 0) - 1)
    return chosen.to(tl.int64) * CHUNK + tl.sum((tl.cumsum(weights, 0) <= within).to(tl.int32), 0)


@triton.jit
def draw_filtered(row_ptr, bins_ptr, word_ptr, peak, scale, padded, TILE: tl.constexpr):
    """Return (int64) the first token, in order of scores, at which the cumulative share of the probability that filters
    keep exceeds the row's uniform random number. Overwrites `bins_ptr` and the room after the `padded` scores at
    `row_ptr`."""
    top_k = tl.load(word_ptr + TOP_K)
    top_p = tl.load(word_ptr + TOP_P)
    min_p = tl.load(word_ptr + MIN_P)
    limited = (top_k > 0) | (min_p > 0)
    one = tl.full((), ONE, tl.int64)

    # Find the bins that hold the tokens kept by the filters, and gather the tokens in those bins.
    through = fill_histogram(bins_ptr, row_ptr, padded, peak, scale, TILE)
    last_bin = tl.full((), BINS, tl.int32)
    if top_k > 0:
        last_bin = tl.sum((field(through, False) < top_k).to(tl.int32), 0)
    elif not limited:
        last_bin = tl.sum((field(through, True) < share(top_p, one)).to(tl.int32), 0)
    if min_p > 0:
        distance = -tl.log(min_p.to(tl.float32) / (1 << 62)) * BINS_A_LOGIT
        last_bin = tl.minimum(last_bin, tl.minimum(distance, BINS).to(tl.int32) + 2)
    ptr = row_ptr + padded
    least = share(min_p, weigh(peak, peak, scale))
    n, mass = gather(ptr, row_ptr, padded, last_bin, least, peak, scale, TILE)
    low = order_key(peak - (last_bin + 2).to(tl.float32) / BINS_A_LOGIT).to(tl.int64)
    low = tl.where(last_bin < BINS, low, LOWEST)
    high = order_key(peak).to(tl.int64) + 1

    kept = mass
    if (top_k > 0) & (top_k <= n):
        kth = search(ptr, n, low, high, top_k - 1, peak, scale, False, TILE)
        above, mass_above = tally(ptr, n, kth + 1, peak, scale, TILE)
        kept = mass_above + (top_k - above) * weigh(key_score(kth.to(tl.int32)), peak, scale)
    if top_p < OFF_TOP_P:
        nucleus = tl.maximum(share(top_p, tl.where(limited, kept, one)), 1)
        if nucleus <= mass:
            last = search(ptr, n, low, high, nucleus - 1, peak, scale, True, TILE)
            above, mass_above = tally(ptr, n, last + 1, peak, scale, TILE)
            weight = weigh(key_score(last.to(tl.int32)), peak, scale)
            kept = tl.minimum(kept, mass_above + (nucleus - mass_above + weight - 1) // weight * weight)
    point = point_in(kept, tl.load(word_ptr + SEED), tl.load(word_ptr + POSITION))
    chosen = search(ptr, n, low, high, point, peak, scale, True, TILE)
    above, mass_above = tally(ptr, n, chosen + 1, peak, scale, TILE)
    tie = (point - mass_above) // weigh(key_score(chosen.to(tl.int32)), peak, scale)
    return find(row_ptr, padded, chosen.to(tl.int32), tie, TILE)
