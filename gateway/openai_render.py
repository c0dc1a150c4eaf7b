"""The gateway's chunks as OpenAI's response bodies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from engine.core.types import TokenLogprobs
from gateway.core.lanes import TIER_OF_LANE
from gateway.generation import Admitted, GenerationChunk, Usage
from gateway.tokenizer import Tokenizer

Json = dict[str, Any]

LOWEST_LOGPROB = -9999.0
"""What OpenAI writes for a probability of zero, which JSON has no word for."""


class Style(Protocol):
    """How one endpoint words its choices. Made for one request."""

    id_prefix: str
    object: str
    chunk_object: str

    def opening(self, index: int) -> Json | None:
        """Choice of a stream chunk to send before any text; None: nothing is."""

    def delta(self, chunk: GenerationChunk) -> Json:
        """Choice of a stream chunk."""

    def whole(self, chunk: GenerationChunk) -> Json:
        """Choice of a complete response."""


class ChatStyle:
    """/v1/chat/completions"""

    id_prefix = "chatcmpl-"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, tokenizer: Tokenizer, *, logprobs: bool = False, token_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._logprobs = logprobs
        self._token_ids = token_ids

    def opening(self, index: int) -> Json | None:
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def delta(self, chunk: GenerationChunk) -> Json:
        return self._choice(chunk, "delta", {"content": chunk.text} if chunk.text else {})

    def whole(self, chunk: GenerationChunk) -> Json:
        return self._choice(chunk, "message", {"role": "assistant", "content": chunk.text, "refusal": None})

    def _choice(self, chunk: GenerationChunk, name: str, content: Json) -> Json:
        logprobs = self._content_logprobs(chunk) if self._logprobs and chunk.logprobs else None
        choice = {"index": chunk.index, name: content, "logprobs": logprobs, "finish_reason": chunk.finish_reason}
        return choice | ({"token_ids": chunk.token_ids} if self._token_ids else {})

    def _content_logprobs(self, chunk: GenerationChunk) -> Json:
        pairs = zip(chunk.token_ids, chunk.logprobs, strict=True)
        return {"content": [self._token_logprob(token_id, values) for token_id, values in pairs], "refusal": None}

    def _token_logprob(self, token_id: int, values: TokenLogprobs) -> Json:
        top = [self._entry(other, logprob) for other, logprob in values.top]
        return {**self._entry(token_id, values.logprob), "top_logprobs": top}

    def _entry(self, token_id: int, logprob: float) -> Json:
        text = self._tokenizer.token_bytes(token_id)
        return {"token": text.decode("utf-8", "replace"), "logprob": _finite(logprob), "bytes": list(text)}


class CompletionStyle:
    """/v1/completions"""

    id_prefix = "cmpl-"
    object = "text_completion"
    chunk_object = "text_completion"

    def __init__(
        self, tokenizer: Tokenizer, *, logprobs: bool = False, token_ids: bool = False, echo: Sequence[str] = ()
    ) -> None:
        """`echo`: for each answer the prompt to begin its text with; empty: none."""
        self._tokenizer = tokenizer
        self._logprobs = logprobs
        self._token_ids = token_ids
        self._echo = echo
        self._offsets: dict[int, int] = {}
        """Where the next token of each answer begins in its text, in characters."""

    def opening(self, index: int) -> Json | None:
        if not self._echo:
            return None
        return {"index": index, "text": self._echo[index], "logprobs": None, "finish_reason": None}

    def delta(self, chunk: GenerationChunk) -> Json:
        logprobs = self._legacy_logprobs(chunk) if self._logprobs and chunk.logprobs else None
        choice = {"index": chunk.index, "text": chunk.text, "logprobs": logprobs, "finish_reason": chunk.finish_reason}
        return choice | ({"token_ids": chunk.token_ids} if self._token_ids else {})

    def whole(self, chunk: GenerationChunk) -> Json:
        echo = self._echo[chunk.index] if self._echo else ""
        return self.delta(chunk) | {"text": echo + chunk.text}

    def _legacy_logprobs(self, chunk: GenerationChunk) -> Json:
        tokens = [self._tokenizer.token_text(token_id) for token_id in chunk.token_ids]
        return {
            "tokens": tokens,
            "token_logprobs": [_finite(values.logprob) for values in chunk.logprobs],
            "top_logprobs": [self._top(values) for values in chunk.logprobs],
            "text_offset": [self._advance(chunk.index, token) for token in tokens],
        }

    def _top(self, values: TokenLogprobs) -> Json:
        return {self._tokenizer.token_text(token_id): _finite(logprob) for token_id, logprob in values.top}

    def _advance(self, index: int, token: str) -> int:
        offset = self._offsets.get(index, 0)
        self._offsets[index] = offset + len(token)
        return offset


class Envelope:
    """What all bodies of one response have in common."""

    def __init__(self, style: Style, admitted: Admitted, *, include_usage: bool = False) -> None:
        """`include_usage`: a stream ends with a usage chunk, and every other chunk has a usage of null."""
        self._style = style
        self._include_usage = include_usage
        self._head: Json = {
            "id": style.id_prefix + admitted.id,
            "object": style.object,
            "created": admitted.created,
            "model": admitted.model,
            "system_fingerprint": admitted.fingerprint,
            "service_tier": TIER_OF_LANE[admitted.lane],
        }

    def opening(self, index: int) -> Json | None:
        choice = self._style.opening(index)
        return None if choice is None else self._chunk([choice])

    def delta(self, chunk: GenerationChunk) -> Json | None:
        """None for a chunk with nothing to tell a client."""
        choice = self._style.delta(chunk)
        tells = chunk.text or chunk.finish_reason or choice["logprobs"] or choice.get("token_ids")
        return self._chunk([choice]) if tells else None

    def usage(self, usage: Usage) -> Json | None:
        return self._chunk([]) | {"usage": usage_body(usage)} if self._include_usage else None

    def whole(self, chunks: Sequence[GenerationChunk]) -> Json:
        """The complete response, from all chunks of all answers."""
        answers: dict[int, list[GenerationChunk]] = {}
        for chunk in chunks:
            answers.setdefault(chunk.index, []).append(chunk)
        choices = [self._style.whole(join(answers[index])) for index in sorted(answers)]
        usage = chunks[-1].usage
        return self._head | {"choices": choices, "usage": usage_body(usage) if usage else None}

    def _chunk(self, choices: list[Json]) -> Json:
        body = self._head | {"object": self._style.chunk_object, "choices": choices}
        return body | {"usage": None} if self._include_usage else body


def join(chunks: Sequence[GenerationChunk]) -> GenerationChunk:
    """All chunks of one answer as one."""
    return GenerationChunk(
        index=chunks[0].index,
        text="".join(chunk.text for chunk in chunks),
        token_ids=tuple(token_id for chunk in chunks for token_id in chunk.token_ids),
        logprobs=tuple(values for chunk in chunks for values in chunk.logprobs),
        finish_reason=chunks[-1].finish_reason,
    )


def usage_body(usage: Usage) -> Json:
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
    }


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)
