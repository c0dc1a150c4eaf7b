"""Turns a chunk of one row's logits into scores as its request asks: mask, bans, bias, penalties, temperature."""

from __future__ import annotations

import triton
import triton.language as tl

from lora_kernels.sampling_words import DRAWN, FILTERED, GREEDY, SlotWords

_FIELDS = SlotWords._fields
NUM_WORDS = tl.constexpr(len(_FIELDS))
KIND = tl.constexpr(_FIELDS.index("kind"))
SEED = tl.constexpr(_FIELDS.index("seed"))
POSITION = tl.constexpr(_FIELDS.index("position"))
NUM_GENERATED = tl.constexpr(_FIELDS.index("num_generated"))
MIN_TOKENS = tl.constexpr(_FIELDS.index("min_tokens"))
TEMPERATURE = tl.constexpr(_FIELDS.index("temperature"))
TOP_K = tl.constexpr(_FIELDS.index("top_k"))
TOP_P = tl.constexpr(_FIELDS.index("top_p"))
MIN_P = tl.constexpr(_FIELDS.index("min_p"))
REPETITION = tl.constexpr(_FIELDS.index("repetition"))
FREQUENCY = tl.constexpr(_FIELDS.index("frequency"))
PRESENCE = tl.constexpr(_FIELDS.index("presence"))
NUM_STOPS = tl.constexpr(_FIELDS.index("num_stops"))
NUM_EDITS = tl.constexpr(_FIELDS.index("num_edits"))
EDITS = tl.constexpr(_FIELDS.index("edits"))
SEEN = tl.constexpr(_FIELDS.index("seen"))
IS_GREEDY = tl.constexpr(GREEDY)
IS_DRAWN = tl.constexpr(DRAWN)
IS_FILTERED = tl.constexpr(FILTERED)
MASK_BITS = tl.constexpr(32)
"""Tokens for which an int32 of a bit mask has a bit: bit t % 32 of number t // 32 is that of token t."""
HUGE = tl.constexpr(1e30)
"""Upper bound of logits, which replaces infinity and stays finite when divided by the lowest temperature."""


@triton.jit
def load_fp32(word_ptr):
    return tl.load(word_ptr).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def load_chunk(logits_ptr, first, vocab, CHUNK: tl.constexpr):
    """Return the logits of the CHUNK tokens from `first` on, fp32 [CHUNK], -inf beyond the vocabulary."""
    token = first + tl.arange(0, CHUNK)
    return tl.load(logits_ptr + token, mask=token < vocab, other=float("-inf")).to(tl.float32)


@triton.jit
def shape_chunk(scores, word_ptr, masks_ptr, line, first, vocab, CHUNK: tl.constexpr):
    """Return the scores of the CHUNK tokens from `first` on, fp32: `scores` after the bans, biases, penalties and (not
    for GREEDY) temperature at `word_ptr`, -inf for NaN, beyond the vocabulary, and where mask `line` forbids."""
    token = first + tl.arange(0, CHUNK)
    mask = token < vocab
    scores = tl.where(scores == scores, tl.minimum(scores, HUGE), float("-inf"))
    if line >= 0:
        bits = tl.load(masks_ptr + line * tl.cdiv(vocab, MASK_BITS) + token // MASK_BITS, mask=mask, other=0)
        scores = tl.where((bits >> (token % MASK_BITS)) & 1 == 1, scores, float("-inf"))
    num_edits = tl.load(word_ptr + NUM_EDITS)
    edits_ptr = tl.load(word_ptr + EDITS).to(tl.pointer_type(tl.int64))
    is_banned = tl.load(word_ptr + NUM_GENERATED) < tl.load(word_ptr + MIN_TOKENS)
    for i in range(tl.where(is_banned, 0, tl.load(word_ptr + NUM_STOPS)), num_edits):
        edit = tl.load(edits_ptr + i)
        edited = (edit >> 32).to(tl.int32)
        if (edited >= first) & (edited < first + CHUNK):
            scores += tl.where(token == edited, edit.to(tl.int32).to(tl.float32, bitcast=True), 0.0)
    seen_address = tl.load(word_ptr + SEEN)
    if seen_address != 0:
        seen_ptr = tl.multiple_of(seen_address.to(tl.pointer_type(tl.int32)), 16)
        seen = tl.load(seen_ptr + token, mask=mask, other=0)
        repetition = load_fp32(word_ptr + REPETITION)
        repeated = tl.where(scores > 0, tl.div_rn(scores, repetition), scores * repetition)
        scores = tl.where(seen > 0, repeated, scores)
        scores -= load_fp32(word_ptr + FREQUENCY) * (seen >> 1).to(tl.float32)
        scores -= load_fp32(word_ptr + PRESENCE) * (seen > 1).to(tl.float32)
    if tl.load(word_ptr + KIND) != IS_GREEDY:
        scores = tl.div_rn(scores, load_fp32(word_ptr + TEMPERATURE))
    return scores
