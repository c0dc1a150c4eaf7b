"""Renders the gateway's generation chunks as messages of Anthropic's API, whole or as events of a stream."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import msgspec

from gateway.anthropic.errors import error_body
from gateway.core.errors import ApiError
from gateway.openai.render import Json, encode_json, sse_event
from gateway.openai.tools import ToolCalls
from gateway.requests.streams import join_chunks
from gateway.requests.types import Admitted, GenerationChunk, TokenUsage
from gateway.text.tools.calls import ToolCallPart
from gateway.text.tools.parser import Part


class Thought(NamedTuple):
    """New text of an answer's reasoning."""

    text: str


class AnswerReader:
    """Separates one answer into reasoning, text and tool calls, and finds out why it ended."""

    def __init__(self, tools: ToolCalls | None) -> None:
        """`tools` reads tool calls; None means that no tools were offered and everything is text."""
        self._tools = tools
        self._called = False
        self.stop_reason: str | None = None
        """Set by the last chunk: end_turn, stop_sequence, tool_use or max_tokens."""
        self.stop_sequence: str | None = None

    def read(self, chunk: GenerationChunk) -> list[Part | Thought]:
        """Return the reasoning, the texts and the parts of tool calls in a chunk, in order. Chunks must be passed in
        order, too."""
        parts: list[Part] = self._tools.parts(chunk) if self._tools else [chunk.text] if chunk.text else []
        self._called |= any(isinstance(part, ToolCallPart) for part in parts)
        if chunk.finish_reason is not None:
            self.stop_reason, self.stop_sequence = self._ending(chunk), chunk.stop_string
        return [Thought(chunk.reasoning), *parts] if chunk.reasoning else [*parts]

    def _ending(self, chunk: GenerationChunk) -> str:
        if chunk.finish_reason == "length":
            return "max_tokens"
        if chunk.stop_string is not None:
            return "stop_sequence"
        return "tool_use" if self._called else "end_turn"


class MessageRenderer:
    """The `Renderer` of /v1/messages. An answer consists of blocks: reasoning, texts and tool calls."""

    ping = sse_event(b'{"type":"ping"}', "ping")

    def __init__(self, admitted: Admitted, reader: AnswerReader) -> None:
        self._reader = reader
        self._request_id = admitted.request_id
        self._num_prompt_tokens = len(admitted.prompt_ids[0])
        self._head: Json = {
            "id": f"msg_{admitted.id}",
            "type": "message",
            "role": "assistant",
            "model": admitted.model,
        }
        self._index = -1
        """Number of the last block in a stream; -1 while there is none."""
        self._open = False
        self._kind: str | int = ""
        """Kind of the last block, as `_kind_of` returns it."""
        self._held: list[str] | None = None
        """Arguments of the current tool call that are held back until they are seen to begin a JSON object, because
        clients parse the pieces. None means that pieces are sent as they come."""

    def opening(self) -> bytes:
        """Return message_start. Its usage assumes that no prompt tokens are cached; message_delta corrects it."""
        usage = usage_body(TokenUsage(self._num_prompt_tokens, 0, 0))
        return _event("message_start", message=self._head | _ending(None, None) | {"content": [], "usage": usage})

    def delta(self, chunk: GenerationChunk) -> bytes:
        events = [event for part in self._reader.read(chunk) for event in self._part(part)]
        if chunk.finish_reason is not None:
            events += self._stop()
        return b"".join(events)

    async def closing(self, usage: TokenUsage) -> bytes:
        delta = _ending(self._reader.stop_reason, self._reader.stop_sequence)
        return _event("message_delta", delta=delta, usage=usage_body(usage)) + _event("message_stop")

    def failure(self, error: ApiError) -> bytes:
        return sse_event(encode_json(error_body(error, self._request_id)), "error")

    async def complete(self, chunks: Sequence[GenerationChunk]) -> Json:
        parts, usage = self._reader.read(join_chunks(chunks)), chunks[-1].usage
        ending = _ending(self._reader.stop_reason, self._reader.stop_sequence)
        return self._head | ending | {"content": _blocks(parts), "usage": usage_body(usage) if usage else None}

    def _part(self, part: Part | Thought) -> Iterator[bytes]:
        """Yield the events of one part of the answer: reasoning, text, or a piece of a tool call. A part begins a new
        content block unless it continues the last one."""
        kind = _kind_of(part)
        if not self._open or kind != self._kind:
            yield from self._stop()
            self._index, self._open, self._kind, self._held = self._index + 1, True, kind, []
            yield _event("content_block_start", index=self._index, content_block=_new_block(part))
        if isinstance(part, str):
            yield self._delta({"type": "text_delta", "text": part})
        elif isinstance(part, Thought):
            yield self._delta({"type": "thinking_delta", "thinking": part.text})
        elif part.arguments:
            yield from self._arguments(part.arguments)

    def _arguments(self, text: str) -> Iterator[bytes]:
        """Yield the event of a piece of a tool call's arguments. Arguments that do not begin as a JSON object are held
        back until the call ends."""
        if self._held is not None:
            self._held.append(text)
            text = "".join(self._held)
            if not text.lstrip().startswith("{"):
                return
            self._held = None
        yield self._delta({"type": "input_json_delta", "partial_json": text})

    def _delta(self, delta: Json) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)

    def _stop(self) -> Iterator[bytes]:
        if self._open:
            self._open = False
            if isinstance(self._kind, int) and self._held:
                held = encode_json(_input("".join(self._held))).decode()
                yield self._delta({"type": "input_json_delta", "partial_json": held})
            yield _event("content_block_stop", index=self._index)


def usage_body(usage: TokenUsage) -> Json:
    """Return a usage as Anthropic counts it: the prompt's tokens are the sum of `input_tokens` and of those that were
    read from the cache."""
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.completion,
    }


def _event(name: str, **fields: Any) -> bytes:
    return sse_event(encode_json({"type": name, **fields}), name)


def _ending(reason: str | None, sequence: str | None) -> Json:
    return {"stop_reason": reason, "stop_sequence": sequence}


def _kind_of(part: Part | Thought) -> str | int:
    """Return what block a part belongs to: `thinking`, `text`, or the number of its tool call."""
    if isinstance(part, ToolCallPart):
        return part.index
    return "thinking" if isinstance(part, Thought) else "text"


def _new_block(part: Part | Thought) -> Json:
    if isinstance(part, str):
        return {"type": "text", "text": ""}
    if isinstance(part, Thought):
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "tool_use", "id": f"toolu_{uuid.uuid4().hex[:24]}", "name": part.name, "input": {}}


def _blocks(parts: Sequence[Part | Thought]) -> list[Json]:
    """Return the content blocks of a complete answer. Consecutive parts of one kind, or of one tool call, become one
    block."""
    blocks: list[Json] = []
    for _, group in groupby(parts, _kind_of):
        pieces = list(group)
        field = "input" if isinstance(pieces[0], ToolCallPart) else str(_kind_of(pieces[0]))
        blocks.append(_new_block(pieces[0]) | {field: "".join(map(_text_of, pieces))})
    return [block | {"input": _input(block["input"])} if "input" in block else block for block in blocks]


def _text_of(part: Part | Thought) -> str:
    if isinstance(part, ToolCallPart):
        return part.arguments
    return part.text if isinstance(part, Thought) else part


def _input(text: str) -> Json:
    """Parse the arguments of a tool call. Arguments that are no JSON object, for example because the model was cut off,
    become an object with the text as `arguments`, because clients expect an object."""
    try:
        arguments = msgspec.json.decode(text or "{}")
    except (ValueError, RecursionError):  # msgspec.DecodeError is a ValueError
        return {"arguments": text}
    return arguments if isinstance(arguments, dict) else {"arguments": text}
