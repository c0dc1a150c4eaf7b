"""Compiles a grammar's text to a matcher of the model's tokens, with llguidance, which a hostile grammar can crash: a
child process tries each first, under limits (`engine.grammar_check`)."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask

from engine.core.messages.grammar import Grammar
from engine.grammar_check.job import Reason, Verdict, Vocabulary, WorkerLimits
from engine.grammar_check.pool import UNHURRIED_S, WORKERS, GrammarPool
from engine.grammar_check.source import LIMITS, library_source, told
from engine.grammar_check.tokens import read_tokens
from engine.model.grammar.mask_cost import MaskCost
from engine.model.sample.masks import num_words

QUEUED = 4096
"""Maximum number of grammars that wait for a check. The scheduler already bounds how many are prepared at once."""


class Unproven(ValueError):
    """Raised if a worker process that tried a grammar crashed, used up its time or memory, or could not check the
    grammar. This may be temporary."""


class Compiled(NamedTuple):
    """A grammar for one model, as matchers that have consumed no token. Requests follow cheap copies of them."""

    matcher: LLMatcher
    """For the tokens of answers."""
    num_bytes: int
    """What the compiled grammar holds in memory."""
    first: npt.NDArray[np.int32]
    """The mask of the first token, int32 [words]."""
    cost: MaskCost
    """What the grammar's masks take."""
    guesses: LLMatcher | None = None
    """For proposed tokens, compiled separately; None without speculation. Copies of a matcher share its automaton,
    whose size is limited, so that guesses checked with `matcher` could end requests."""


class Compiler:
    """Compiles grammars for the model in `folder`. Thread-safe.

    Args:
        vocab_size: number of columns of the logits.
        eos_token_ids: tokens that end an answer where its grammar allows the end.
        speculates: whether grammars get matchers for guesses, too.
    """

    def __init__(
        self, folder: Path, vocab_size: int, eos_token_ids: tuple[int, ...], *, speculates: bool = False
    ) -> None:
        self._speculates = speculates
        self._file = folder / "tokenizer.json"
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._pool: GrammarPool | None = None

    def start(self) -> None:
        """Make the worker processes, which try grammars first, start UNHURRIED_S seconds from now at the latest, and
        read the tokenizer. Does nothing for a model that cannot follow grammars."""
        # The library holds Python's lock while it reads a tokenizer: 0.3 s for 49,152 tokens, so long on a busy machine
        # that a step loop counted as hung.
        if self._is_able():
            self._open_pool()
            self._load_tokenizer()

    def close(self) -> None:
        """End the worker processes that try grammars. A later `compile` starts new ones."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()

    def compile(self, grammar: Grammar) -> Compiled:
        """Block until the grammar is compiled, and return it. Raises ValueError, which says why, if it is no grammar or
        exceeds a limit, and Unproven if a worker crashed, used up its limits or could not check it."""
        if not self._is_able():
            raise ValueError("this model has no tokenizer.json or no EOS token, which following one needs")
        verdict = self._prove(grammar)
        matcher, first = self._matcher(grammar)
        guesses = self._matcher(grammar)[0] if self._speculates else None
        num_bytes = verdict.num_bytes * (1 + self._speculates)
        return Compiled(matcher, num_bytes, first, MaskCost(verdict.mask_seconds), guesses)

    def idle_matcher(self) -> LLMatcher:
        """Return a matcher that is in an error state, because it has no grammar."""
        return LLMatcher(self._load_tokenizer(), "", log_level=0)

    def _matcher(self, grammar: Grammar) -> tuple[LLMatcher, npt.NDArray[np.int32]]:
        """Compile a grammar that a worker process has tried, and return a new matcher of it with the mask of the first
        token. Raises ValueError if a limit of llguidance is exceeded."""
        matcher = LLMatcher(self._load_tokenizer(), library_source(grammar), log_level=0, limits=LIMITS)
        first = np.zeros((1, num_words(self._vocab_size)), dtype=np.int32)
        if not matcher.is_error():
            fill_next_token_bitmask(matcher, first)  # the most expensive mask, which builds what the others use
        if matcher.is_error():
            raise ValueError(reason(matcher))
        return matcher, first[0]

    def _prove(self, grammar: Grammar) -> Verdict:
        """Block until a worker process has tried the grammar, and return its verdict. Raises ValueError if the grammar
        is invalid, and Unproven if the worker did not survive it or could not check it."""
        verdict = self._open_pool().submit("", grammar).result()
        if verdict.reason is Reason.INVALID:
            raise ValueError(verdict.message)
        if verdict.reason is not None:
            raise Unproven(verdict.message)
        return verdict

    def _is_able(self) -> bool:
        return self._file.is_file() and bool(self._eos_token_ids)

    def _open_pool(self) -> GrammarPool:
        with self._lock:
            if self._pool is None:
                vocabulary = Vocabulary(str(self._file), self._vocab_size, list(self._eos_token_ids))
                self._pool = GrammarPool(
                    WorkerLimits(vocabulary=vocabulary), at_once=WORKERS, queued=QUEUED, start_after=UNHURRIED_S
                )
            return self._pool

    def _load_tokenizer(self) -> LLTokenizer:
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = read_tokens(self._file, self._vocab_size, self._eos_token_ids)
            return self._tokenizer


def reason(matcher: LLMatcher) -> str:
    """Return why a matcher failed, in the words of llguidance, shortened if they are long."""
    return told(matcher.get_error())
