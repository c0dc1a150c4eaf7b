"""From a grammar's text to a matcher of the model's tokens, with llguidance; in bounded work and memory."""

from __future__ import annotations

import threading
from pathlib import Path

from llguidance import LLMatcher, LLTokenizer

from engine.core.grammars import Grammar
from engine.grammar_source import LIMITS, library_source, told


class Compiler:
    """Thread-safe.

    Args:
        folder: of the model. Its tokenizer.json is read when the first grammar comes.
        vocab_size: columns of the logits.
        eos_token_ids: what ends an answer where its grammar lets it.
    """

    def __init__(self, folder: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._file = folder / "tokenizer.json"
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None

    def compile(self, grammar: Grammar) -> LLMatcher:
        """A matcher that has seen no token: copies of it, cheap to make, follow sequences.

        Raises:
            ValueError: it is no such grammar, uses what is not supported, or is too much; the message says which.
        """
        source = library_source(grammar)
        matcher = LLMatcher(self._load_tokenizer(), source, log_level=0, limits=LIMITS)
        if not matcher.is_error():
            matcher.compute_bitmask()  # the dearest one, which builds what the others use: here, not in a step
        if matcher.is_error():
            raise ValueError(reason(matcher))
        return matcher

    def _load_tokenizer(self) -> LLTokenizer:
        with self._lock:
            if self._tokenizer is None:
                if not (self._file.is_file() and self._eos_token_ids):
                    raise ValueError("this model has no tokenizer.json or no EOS token, which following one needs")
                eos = list(self._eos_token_ids)
                self._tokenizer = LLTokenizer(self._file.read_text(), n_vocab=self._vocab_size, eos_token=eos)
            return self._tokenizer


def reason(matcher: LLMatcher) -> str:
    """Why a matcher gave up, in the library's words."""
    return told(matcher.get_error())
