"""Tries a grammar with a model's tokens, as the engine is about to use it."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from engine.core.grammars import Grammar
from engine.grammar_check.job import Vocabulary
from engine.grammar_source import LIMITS, library_source, told

WALKS, WALK_STEPS = 2, 24
"""Random answers that are tried, and how many tokens of each."""


class Trial:
    """Compiles a grammar, computes its first mask and takes random tokens. Returns the library's objection, if any."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._mask = allocate_token_bitmask(1, vocabulary.size)
        text = Path(vocabulary.file).read_text()
        self._tokenizer = LLTokenizer(text, n_vocab=vocabulary.size, eos_token=list(vocabulary.eos_token_ids))

    def __call__(self, grammar: Grammar) -> str:
        """Raises ValueError: the grammar cannot be followed."""
        matcher = LLMatcher(self._tokenizer, library_source(grammar), log_level=0, limits=LIMITS)
        if not matcher.is_error():
            matcher.compute_bitmask()
        if matcher.is_error():
            return told(matcher.get_error())
        rng = random.Random(0)
        for _ in range(WALKS):
            self._walk(matcher.deep_copy(), rng)
        return ""

    def _walk(self, matcher: LLMatcher, rng: random.Random) -> None:
        """Take random tokens. A matcher that gives up here is the engine's to report: only some answers lead there."""
        for _ in range(WALK_STEPS):
            fill_next_token_bitmask(matcher, self._mask)
            allowed = np.flatnonzero(np.unpackbits(self._mask.view(np.uint8), bitorder="little"))
            if matcher.is_error() or matcher.is_stopped() or not len(allowed):
                return
            if not matcher.consume_token(int(allowed[rng.randrange(len(allowed))])):
                return
