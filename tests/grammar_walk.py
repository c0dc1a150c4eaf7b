"""What a model without any sense answers under a grammar."""

import random

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from engine.grammar_check.source import LIMITS, library_source

TO_AN_END = ('"', "}", "]")
EOS = 0


def walk(grammar, backend, seed, most=600):
    """A random answer. Ends where it may, half the time, and does not dawdle. `backend`: a tokenizer of bytes."""
    rng, size = random.Random(seed), backend.get_vocab_size()
    matcher = matcher_of(grammar, backend)
    closing = [backend.token_to_id(mark) for mark in TO_AN_END]
    tokens, mask = [], allocate_token_bitmask(1, size)
    for _ in range(most):
        fill_next_token_bitmask(matcher, mask)
        assert not matcher.is_error(), matcher.get_error()
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:size]).tolist()
        ending = [token for token in ([EOS], closing) if set(token) & set(allowed)]
        some = [token for token in ending[0] if token in allowed] if ending and rng.random() < 0.5 else allowed
        token = rng.choice(some)
        if token == EOS:
            return backend.decode(tokens, skip_special_tokens=False)
        tokens.append(token)
        assert matcher.consume_token(token)
    raise AssertionError(f"no end to {backend.decode(tokens)!r}")


def follows(grammar, backend, answer):
    """Return whether a text is an answer."""
    matcher, ids = matcher_of(grammar, backend), backend.encode(answer, add_special_tokens=False).ids
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def matcher_of(grammar, backend):
    tokenizer = LLTokenizer(backend.to_str(), n_vocab=backend.get_vocab_size(), eos_token=[EOS])
    return LLMatcher(tokenizer, library_source(grammar), log_level=0, limits=LIMITS)
