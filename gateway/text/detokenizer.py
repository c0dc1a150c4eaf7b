"""Converts the token ids of an answer to text while the engine chooses them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import groupby
from types import MappingProxyType
from typing import Any

from tokenizers.decoders import DecodeStream

PRIME_TOKENS = 8
"""Number of last prompt tokens that a detokenizer reads, to know whether the answer continues a word or begins one."""

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Detokenizer:
    """Converts the token ids of one answer to text incrementally. It never emits part of a character, and it skips
    special tokens, apart from those that it keeps."""

    def __init__(
        self,
        backend: Any,
        prompt_ids: Sequence[int] = (),
        *,
        at_once: bool = False,
        kept: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        """Args:
        backend: a tokenizer of the `tokenizers` library.
        prompt_ids: the tokens that the text continues.
        at_once: whether tokens pushed together may be decoded together, which holds for byte-level tokens if the
            prompt has left no character unfinished.
        kept: texts of special tokens that are kept, by their ids.
        """
        self._backend = backend
        self._at_once = at_once
        self._all_kept = self._kept = kept
        self._pending: list[int] = []
        self._stream = self._open(prompt_ids[-PRIME_TOKENS:])

    def push(self, token_ids: Sequence[int]) -> str:
        if not self._kept or self._kept.keys().isdisjoint(token_ids):
            return self._step(list(token_ids)) if self._at_once else self._push(token_ids)
        runs = groupby(token_ids, key=self._kept.__contains__)
        return "".join(self._marks(ids) if kept else self._push(list(ids)) for kept, ids in runs)

    def keep(self, marks: Collection[str]) -> None:
        """From now on, include in the text only the special tokens whose texts are in `marks`, and skip the others."""
        self._kept = {token_id: mark for token_id, mark in self._all_kept.items() if mark in marks}

    def _marks(self, token_ids: Iterable[int]) -> str:
        """Return the text that was held back, followed by the texts of these kept special tokens. Decoding starts anew
        after them."""
        text = self.flush()
        self._stream = self._open(())
        return text + "".join(self._kept[token_id] for token_id in token_ids)

    def _push(self, token_ids: Sequence[int]) -> str:
        if self._at_once:
            return self._step(list(token_ids))
        return "".join(self._step([token_id]) for token_id in token_ids)

    def flush(self) -> str:
        """Return the text that is still held back, after the last token: an unfinished character becomes U+FFFD."""
        pending, self._pending = self._pending, []
        return self._decode(pending)

    def _step(self, token_ids: list[int]) -> str:
        self._pending += token_ids
        try:
            text = self._stream.step(self._backend, token_ids)
        except Exception as error:  # the library raises nothing more specific
            if "Invalid prefix" not in str(error):
                raise
            # If a byte makes a run of bytes invalid, byte-fallback decoders turn the whole run into U+FFFD, including
            # text that was emitted already. The emitted text stays as it is; a new stream continues after it.
            self._stream = self._open(token_ids)
            return self.flush()
        if text:
            self._pending.clear()
        return text or ""

    def _open(self, prime: Sequence[int]) -> DecodeStream:
        """Return a new decoding stream that continues after the tokens `prime`, and completes a character that they
        left unfinished. The text of these tokens is not emitted."""
        complete = len(prime)
        while complete and self._decode(prime[:complete]).endswith(REPLACEMENT):
            complete -= 1
        # A stream primed with an unfinished character would emit all of its prime along with the first token.
        stream = DecodeStream(ids=list(prime[:complete]), skip_special_tokens=True)
        for token_id in prime[complete:]:
            stream.step(self._backend, token_id)
        return stream

    def _decode(self, token_ids: Sequence[int]) -> str:
        return str(self._backend.decode(list(token_ids), skip_special_tokens=True))
