"""Renders a generation as a response object of OpenAI's Responses API, or as the typed events of its stream."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec
from msgspec import Raw
from msgspec.structs import replace

from gateway.core.errors import ApiError
from gateway.core.lanes import answer_tier
from gateway.openai.logprobs import ChatLogprobsRenderer
from gateway.openai.render import PING, encode_json, sse_event
from gateway.openai.tools import ToolCalls
from gateway.requests.rendering import off_the_loop
from gateway.requests.streams import join_chunks
from gateway.requests.types import Admitted, GenerateRequest, GenerationChunk, TokenUsage
from gateway.responses.items import Event, OutputItems
from gateway.responses.schema import ResponsesRequest, ResponseTool, TextFormat
from gateway.text.tokenizer import Tokenizer

Json = dict[str, Any]

Keep = Callable[[Json], Awaitable[bool]]
"""Stores a complete response object. Returns whether it was stored."""


class AnswerReader:
    """Reads output items from the chunks of one answer."""

    def __init__(self, tokenizer: Tokenizer, tools: ToolCalls | None) -> None:
        """`tokenizer` renders the tokens of log probabilities. `tools` reads tool calls; None means that no tools were
        offered and everything is text."""
        self._logprobs = ChatLogprobsRenderer(tokenizer)
        self._tools = tools

    def read(self, chunk: GenerationChunk, items: OutputItems) -> Iterator[Event]:
        """Add a chunk to the items, and yield the events that report it. The chunks must be passed in order."""
        rendered = self._logprobs.render(chunk)
        if chunk.reasoning:
            yield from items.add_reasoning(chunk.reasoning)
        if rendered and (chunk.text or not items.is_reasoning):
            items.add_logprobs(rendered["content"])
        for part in self._tools.parts(chunk) if self._tools else filter(None, (chunk.text,)):
            yield from items.add_text(part) if isinstance(part, str) else items.add_call(part)
        if chunk.finish_reason is not None:
            yield from items.finish(complete=chunk.finish_reason != "length")


class ResponseRenderer:
    """The `Renderer` of /v1/responses. Its events are named after their types and numbered from 0."""

    ping = PING

    def __init__(
        self,
        echo: Json,
        request: GenerateRequest,
        admitted: Admitted,
        reader: AnswerReader,
        keep: Keep | None = None,
    ) -> None:
        """`echo` has the fields of the response that repeat the request's (`echo_of`). `keep` stores the complete
        response before it is sent; None means that it is not stored."""
        self._head = {**_head(admitted, request), **echo, "store": bool(keep or echo["background"])}
        self._keep = keep
        self._items = OutputItems(admitted.id)
        self.reader = reader
        self._finish: str | None = None
        self._sequence = 0

    def answered_by(self, admitted: Admitted, reader: AnswerReader) -> None:
        """Take over what is known once a request that began later than its response runs: how the answer is sampled,
        and how it is read."""
        self._head |= _sampling(admitted)
        self.reader = reader

    def opening(self) -> bytes:
        return b"".join(self.events_as("in_progress", "created", "in_progress"))

    def delta(self, chunk: GenerationChunk) -> bytes:
        return b"".join(self.events(chunk))

    async def closing(self, usage: TokenUsage) -> bytes:
        return last_event(await self._kept(self.ended(usage)), self._sequence)

    def failure(self, error: ApiError) -> bytes:
        """Return the event `response.failed`, whose response has the error and the items so far and is not stored."""
        return last_event(self.failed(error) | {"store": False}, self._sequence)

    def events_as(self, status: str, *kinds: str) -> list[bytes]:
        """Return one event for each of `kinds`, such as `created`. Each holds the response object without output and
        with this status."""
        response = {"response": self._response(status)}
        return self._encoded([(f"response.{kind}", response) for kind in kinds])

    def events(self, chunk: GenerationChunk) -> list[bytes]:
        """Return the events for a chunk."""
        self._finish = chunk.finish_reason
        return self._encoded(self.reader.read(chunk, self._items))

    def queued(self) -> Json:
        """Return the response object of a background request that has not begun."""
        return self._response("queued")

    def failed(self, error: ApiError) -> Json:
        """Return the response object after an error, with the items so far."""
        list(self._items.end(complete=False))
        details = {"code": error.code or "server_error", "message": error.message}
        return self._response("failed") | {"error": details, "output": self._items.items}

    async def complete(self, chunks: Sequence[GenerationChunk]) -> Json:
        return await self._kept(await off_the_loop(chunks, lambda: self.completed(chunks)))

    def completed(self, chunks: Sequence[GenerationChunk]) -> Json:
        """Return the response object of a complete answer, given all its chunks, without storing it."""
        answer, usage = join_chunks(chunks), chunks[-1].usage
        assert usage is not None, "the last chunk carries it"
        self._finish = answer.finish_reason
        if answer.logprobs:  # those of reasoning belong to no text
            first = usage.reasoning
            answer = replace(answer, token_ids=answer.token_ids[first:], logprobs=answer.logprobs[first:])
        list(self.reader.read(answer, self._items))
        return self.ended(usage)

    async def _kept(self, response: Json) -> Json:
        """Store the complete response, and return it with `store` saying whether that succeeded: an answer that has
        been paid for is sent even if Redis is away."""
        return response if self._keep is None else response | {"store": await self._keep(response)}

    def ended(self, usage: TokenUsage) -> Json:
        """Return the response object of an answer after its last chunk was read, with output and usage. Its status is
        `completed`, or `incomplete` if the answer was cut off at max_output_tokens."""
        if self._finish == "length":
            response = self._response("incomplete") | {"incomplete_details": {"reason": "max_output_tokens"}}
        else:
            response = self._response("completed") | {"completed_at": int(time.time())}
        return response | {"output": self._items.items, "usage": usage_body(usage)}

    def _response(self, status: str) -> Json:
        return self._head | {"status": status}

    def _encoded(self, events: Iterable[Event]) -> list[bytes]:
        encoded = [typed_event(kind, number, fields) for number, (kind, fields) in enumerate(events, self._sequence)]
        self._sequence += len(encoded)
        return encoded


def typed_event(kind: str, number: int, fields: Json) -> bytes:
    """Return a server-sent event with this type and sequence number, and these other fields."""
    return sse_event(encode_json({"type": kind, "sequence_number": number, **fields}), kind)


def last_event(response: Json, number: int) -> bytes:
    """Return the event that ends the stream of a response that has ended. OpenAI's API has none for a response that was
    cancelled; it is `response.failed`, with the status `cancelled`."""
    status = response["status"]
    return typed_event(f"response.{'failed' if status == 'cancelled' else status}", number, {"response": response})


def usage_body(usage: TokenUsage) -> Json:
    """Return the `usage` of a response object. `cache_write_tokens` is always 0, because writing to the prefix cache is
    not charged."""
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
        "output_tokens": usage.completion,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.prompt + usage.completion,
    }


def _head(admitted: Admitted, request: GenerateRequest) -> Json:
    """Return the fields of a response that the gateway decides, as they are before the answer."""
    return {
        "id": f"resp_{admitted.id}",
        "object": "response",
        "created_at": admitted.created,
        "completed_at": None,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "model": admitted.model,
        "output": [],
        "usage": None,
        "service_tier": answer_tier(request.urgency.lane, admitted.lane),
        "truncation": "disabled",
        **_sampling(admitted),
        "top_logprobs": request.sampling.logprobs or 0,
    }


def _sampling(admitted: Admitted) -> Json:
    """Return the fields of a response that say how its answer is sampled, null where that is not known."""
    return {"temperature": admitted.temperature, "top_p": admitted.top_p}


def echo_of(body: ResponsesRequest) -> Json:
    """Return the fields of a response that repeat the request's. Those that may be long are encoded once, because each
    event with the whole response repeats them."""
    text_format = body.text.format if body.text and body.text.format else TextFormat("text")
    return {
        "background": bool(body.background),
        "instructions": Raw(encode_json(body.instructions)),
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "previous_response_id": body.previous_response_id,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "reasoning": msgspec.structs.asdict(body.reasoning) if body.reasoning else None,
        "text": {"format": _given(text_format)},
        "tool_choice": "auto" if body.tool_choice is None else msgspec.to_builtins(body.tool_choice),
        "tools": Raw(encode_json([_tool(tool) for tool in body.tools or () if tool.is_function])),
    }


def _given(struct: msgspec.Struct) -> Json:
    """Return the fields of a struct that are not None."""
    return {name: value for name, value in msgspec.structs.asdict(struct).items() if value is not None}


def _tool(tool: ResponseTool) -> ResponseTool:
    return replace(tool, strict=bool(tool.strict))
