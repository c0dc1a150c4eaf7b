"""Compiles a grammar's text to a matcher of the model's tokens, with llguidance.

The library can crash on a hostile grammar or never finish, so this process compiles only grammars that a child process
has just compiled and tried with the same tokens under limits (`engine.grammar_check`).
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import NamedTuple

from llguidance import LLMatcher, LLTokenizer

from engine.core.grammars import Grammar
from engine.grammar_check.job import Reason, Verdict, Vocabulary, WorkerLimits
from engine.grammar_check.pool import UNHURRIED_S, WORKERS, GrammarPool
from engine.grammar_check.source import LIMITS, library_source, told

QUEUED = 4096
"""Maximum number of grammars that wait for a check. The scheduler already bounds how many are prepared at once."""


class Unproven(ValueError):
    """Raised if a worker process that tried a grammar crashed, used up its time or memory, or could not check the
    grammar. This may be temporary."""


class Compiled(NamedTuple):
    """A grammar for one model, as matchers that have consumed no token. Requests follow cheap copies of them.

    Attributes:
        matcher: for the tokens of answers.
        num_bytes: what the compiled grammar holds in memory.
        guesses: for proposed tokens, compiled separately; None without speculation. Copies of a matcher share its
            automaton, whose size is limited, so that guesses checked with `matcher` could end requests.
    """

    matcher: LLMatcher
    num_bytes: int
    guesses: LLMatcher | None = None


class Compiler:
    """Compiles grammars for one model. Thread-safe.

    Args:
        folder: the model's folder. Its tokenizer.json is read when the first grammar arrives.
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
        """Make the worker processes, which try grammars before the engine compiles them, start UNHURRIED_S seconds from
        now, if no grammar starts them earlier. Does nothing for a model that cannot follow grammars, because it has no
        tokenizer.json or no EOS token."""
        if self._is_able():
            self._open_pool()

    def close(self) -> None:
        """End the worker processes that try grammars. A later `compile` starts new ones."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()

    def compile(self, grammar: Grammar) -> Compiled:
        """Blocks until the grammar is compiled, and returns it.

        Raises:
            ValueError: the text is no grammar of its kind, uses unsupported features, or exceeds a limit of llguidance,
                or the model cannot follow grammars; the message says which.
            Unproven: a worker process crashed or used up its time or memory on the grammar, or could not check it.
        """
        if not self._is_able():
            raise ValueError("this model has no tokenizer.json or no EOS token, which following one needs")
        num_bytes = self._prove(grammar).num_bytes
        if not self._speculates:
            return Compiled(self._matcher(grammar), num_bytes)
        return Compiled(self._matcher(grammar), 2 * num_bytes, self._matcher(grammar))

    def _matcher(self, grammar: Grammar) -> LLMatcher:
        """Compiles a grammar that a worker process has tried, and returns a new matcher of it. Raises ValueError if a
        limit of llguidance is exceeded."""
        matcher = LLMatcher(self._load_tokenizer(), library_source(grammar), log_level=0, limits=LIMITS)
        if not matcher.is_error():
            matcher.compute_bitmask()  # the most expensive mask, which builds what the others use: not during a step
        if matcher.is_error():
            raise ValueError(reason(matcher))
        return matcher

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
                eos = list(self._eos_token_ids)
                self._tokenizer = LLTokenizer(self._file.read_text(), n_vocab=self._vocab_size, eos_token=eos)
            return self._tokenizer


def reason(matcher: LLMatcher) -> str:
    """Returns why a matcher failed, in the words of llguidance, shortened if they are long."""
    return told(matcher.get_error())
