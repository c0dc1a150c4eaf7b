"""The gateway's chunks as OpenAI's response bodies."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, Protocol

import msgspec

from engine.core.types import Lane
from gateway.core.lanes import told_tier
from gateway.generation import Admitted, GenerationChunk, Usage
from gateway.joined import join_answers
from gateway.openai.logprobs import ChatLogprobs, CompletionLogprobs
from gateway.openai.tools import Told, ToolCalls, as_text
from gateway.tokenizer import Tokenizer

Json = dict[str, Any]

encode_json = msgspec.json.Encoder().encode


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

    def __init__(self, tokenizer: Tokenizer, *, token_ids: bool = False, tools: ToolCalls | None = None) -> None:
        """`tools`: what reads calls of tools; None: none were offered, all is text."""
        self._logprobs = ChatLogprobs(tokenizer, silent=token_ids)
        self._token_ids = token_ids
        self._tools = tools

    def opening(self, index: int) -> Json | None:
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def delta(self, chunk: GenerationChunk) -> Json:
        told = self._told(chunk)
        content = {"content": told.text} if told.text else {}
        return self._choice(chunk, "delta", content | ({"tool_calls": told.calls} if told.calls else {}), told)

    def whole(self, chunk: GenerationChunk) -> Json:
        told = self._told(chunk)
        message: Json = {"role": "assistant", "content": told.text, "refusal": None}
        if told.calls:
            calls = [{name: value for name, value in call.items() if name != "index"} for call in told.calls]
            message |= {"content": told.text or None, "tool_calls": calls}
        return self._choice(chunk, "message", message, told)

    def _told(self, chunk: GenerationChunk) -> Told:
        return self._tools.read(chunk) if self._tools else as_text(chunk)

    def _choice(self, chunk: GenerationChunk, name: str, content: Json, told: Told) -> Json:
        logprobs = self._logprobs.of(chunk)
        choice = {"index": chunk.answer, name: content, "logprobs": logprobs, "finish_reason": told.finish_reason}
        return choice | ({"token_ids": chunk.token_ids} if self._token_ids else {})


class CompletionStyle:
    """/v1/completions"""

    id_prefix = "cmpl-"
    object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, tokenizer: Tokenizer, *, token_ids: bool = False, echo: Sequence[str] = ()) -> None:
        """`echo`: for each answer the prompt to begin its text with; empty: none."""
        self._logprobs = CompletionLogprobs(tokenizer)
        self._token_ids = token_ids
        self._echo = echo

    def opening(self, index: int) -> Json | None:
        if not self._echo:
            return None
        return {"index": index, "text": self._echo[index], "logprobs": None, "finish_reason": None}

    def delta(self, chunk: GenerationChunk) -> Json:
        logprobs = self._logprobs.of(chunk)
        choice = {"index": chunk.answer, "text": chunk.text, "logprobs": logprobs, "finish_reason": chunk.finish_reason}
        return choice | ({"token_ids": chunk.token_ids} if self._token_ids else {})

    def whole(self, chunk: GenerationChunk) -> Json:
        echo = self._echo[chunk.answer] if self._echo else ""
        return self.delta(chunk) | {"text": echo + chunk.text}


class Envelope:
    """What all bodies of one response have in common; for a stream's it is encoded once, and put around each choice."""

    def __init__(
        self, style: Style, admitted: Admitted, *, asked: Lane | None = None, include_usage: bool = False
    ) -> None:
        """Initialize the envelope.

        Args:
            asked: the lane that the request asked for; None means that it asked for none.
            include_usage: a stream ends with a usage chunk, and every other chunk has a usage of null.
        """
        self._style = style
        self._include_usage = include_usage
        self._head: Json = {
            "id": style.id_prefix + admitted.id,
            "object": style.object,
            "created": admitted.created,
            "model": admitted.model,
            "system_fingerprint": admitted.fingerprint,
            "service_tier": told_tier(asked, admitted.lane),
        }
        self._after = b'],"usage":null}' if include_usage else b"]}"

    @cached_property
    def _before(self) -> bytes:
        return encode_json(self._head | {"object": self._style.chunk_object, "choices": []}).removesuffix(b"]}")

    def opening(self, index: int) -> bytes | None:
        """A stream chunk, in JSON. None: there is nothing to tell a client."""
        choice = self._style.opening(index)
        return None if choice is None else self._chunk(choice)

    def delta(self, chunk: GenerationChunk) -> bytes | None:
        """As `opening`."""
        choice = self._style.delta(chunk)
        tells = any(choice.get(name) for name in ("text", "delta", "finish_reason", "logprobs", "token_ids"))
        return self._chunk(choice) if tells else None

    def usage(self, usage: Usage) -> bytes | None:
        if not self._include_usage:
            return None
        return self._before + b'],"usage":' + encode_json(usage_body(usage)) + b"}"

    def whole(self, chunks: Sequence[GenerationChunk]) -> Json:
        """The complete response, from all chunks of all answers."""
        choices = [self._style.whole(answer) for answer in join_answers(chunks)]
        usage = chunks[-1].usage
        return self._head | {"choices": choices, "usage": usage_body(usage) if usage else None}

    def _chunk(self, choice: Json) -> bytes:
        return self._before + encode_json(choice) + self._after


def usage_body(usage: Usage) -> Json:
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
    }
