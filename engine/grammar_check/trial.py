"""Tries a grammar with a model's tokens, in the same way as the engine will use it."""

from __future__ import annotations

import ctypes
import random
import time
from pathlib import Path

import numpy as np
from llguidance import LLMatcher
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from engine.core.messages.grammar import Grammar
from engine.grammar_check.job import Verdict, Vocabulary, refusal
from engine.grammar_check.source import LIMITS, library_source
from engine.grammar_check.tokens import read_tokens

WALK_STEPS = 24
"""Length in tokens of the random answer that is tried. Each token usually takes 20 to 100 microseconds."""
_MALLOC_FIELDS = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "end")


class Trial:
    """Checks a grammar by a trial: compiles it for a model's tokens, computes its first mask and follows random tokens,
    as an engine does."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._mask = allocate_token_bitmask(1, vocabulary.size)
        self._tokenizer = read_tokens(Path(vocabulary.file), vocabulary.size, vocabulary.eos_token_ids)

    def __call__(self, grammar: Grammar) -> Verdict:
        """Return INVALID if the library rejects the grammar, otherwise a sound verdict with the bytes that the grammar
        holds. Raises ValueError if its text is malformed or too long."""
        before = _bytes_in_use()
        matcher = LLMatcher(self._tokenizer, library_source(grammar), log_level=0, limits=LIMITS)
        if not matcher.is_error():
            matcher.compute_bitmask()
        if matcher.is_error():
            return refusal(matcher.get_error())
        mask_seconds = self._walk(matcher.deep_copy(), random.Random(0))
        return Verdict(num_bytes=max(0, _bytes_in_use() - before), mask_seconds=mask_seconds)

    def _walk(self, matcher: LLMatcher, rng: random.Random) -> float:
        """Have the matcher of the grammar under trial follow up to `WALK_STEPS` random allowed tokens, and return the
        mean CPU time in seconds of a mask with its token. The engine reports a matcher that fails midway."""
        seconds, count = 0.0, 0
        for _ in range(WALK_STEPS):
            began = time.thread_time()
            fill_next_token_bitmask(matcher, self._mask)
            seconds, count = seconds + time.thread_time() - began, count + 1
            token = self._some_token(rng)
            if token is None or matcher.is_error() or matcher.is_stopped():
                break
            began = time.thread_time()
            is_consumed = matcher.consume_token(token)
            seconds += time.thread_time() - began
            if not is_consumed:
                break
        return seconds / count

    def _some_token(self, rng: random.Random) -> int | None:
        """Return a random token id that the mask allows, not uniformly distributed. None means that it allows none."""
        places = np.flatnonzero(self._mask[0])
        if not len(places):
            return None
        place = int(rng.choice(places))
        word = int(self._mask[0, place])
        return place * 32 + rng.choice([bit for bit in range(32) if word >> bit & 1])


class _MallocInfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [(name, ctypes.c_size_t) for name in _MALLOC_FIELDS]


def _bytes_in_use() -> int:
    """Return the bytes that this process has allocated and not freed; 0 if the C library lacks `mallinfo2`."""
    try:
        mallinfo2 = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError):
        return 0
    mallinfo2.restype = _MallocInfo
    info = mallinfo2()
    return int(info.uordblks + info.hblkhd)
