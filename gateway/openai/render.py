"""Encodes the gateway's generations as OpenAI response bodies and server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import msgspec
from msgspec import Raw
from msgspec.structs import replace

from engine.core.messages.requests import Lane
from gateway.core.errors import ApiError
from gateway.core.lanes import answer_tier
from gateway.openai.styles import Style, ending, tells
from gateway.requests.rendering import off_the_loop
from gateway.requests.streams import join_answers
from gateway.requests.types import Admitted, Generation, GenerationChunk, TokenUsage

Json = dict[str, Any]

encode_json = msgspec.json.Encoder().encode

PLACE = b"\0"
"""Stands in a JSON text for a value that is encoded apart. JSON has no such byte elsewhere."""
TURN_MEMBERS = 500
"""Members of a list that are encoded before other requests get a turn on the event loop. The log probabilities of a
token and of 20 others have 2 kB."""


def sse_event(data: bytes, name: str = "") -> bytes:
    """Return a server-sent event with this data, which must be one line. An empty name leaves the event unnamed."""
    return (b"event: %b\n" % name.encode() if name else b"") + b"data: %b\n\n" % data


def event_data(frames: bytes) -> list[str]:
    """Return the data of server-sent events that `sse_event` made. Pings have none."""
    return [data.decode() for frame in frames.split(b"\n\n") if (data := frame.partition(b"data: ")[2])]


PING = b": ping\n"
"""Comment that is sent while a stream is silent. It has one newline: after an empty line, openai-go up to 3.42 parses
an event that is not there."""
DONE = sse_event(b"[DONE]")
"""Last event of a stream of OpenAI's chunks."""


class Renderer(Protocol):
    """Renders one response in the format of a protocol. An instance serves one request. Every method but `complete` is
    for streams and returns encoded server-sent events, in the order of the calls; empty means that there is none."""

    ping: bytes
    """Frame to send while a stream is silent."""

    def opening(self) -> bytes:
        """Return the events to send before the first chunk."""

    def delta(self, chunk: GenerationChunk) -> bytes:
        """Return the events for a chunk; there are none, for example, while text is held back. Each answer's chunks
        must be passed once and in order."""

    async def closing(self, usage: TokenUsage) -> bytes:
        """Return the events that end a stream whose answers are complete."""

    def failure(self, error: ApiError) -> bytes:
        """Return the events that end a stream because of an error."""

    async def complete(self, chunks: Sequence[GenerationChunk]) -> Json:
        """Return the body of the complete response, from all chunks of all answers; the last one has the usage."""


class WholeAnswer(NamedTuple):
    """The body of a complete response, and the usage of its request."""

    body: Json
    usage: TokenUsage


async def whole_answer(renderer: Renderer, generation: Generation) -> WholeAnswer:
    """Run a generation to its end and return its complete response."""
    chunks = [chunk async for chunk in generation]
    usage = chunks[-1].usage
    assert usage is not None, "the last chunk carries it"
    return WholeAnswer(await renderer.complete(chunks), usage)


async def encoded(body: Json) -> list[bytes]:
    """Encode the body of a response. Long lists of log probabilities in it are encoded in pieces, between which others
    get turns on the event loop: an answer of 12,000 tokens may have 20 MB of them."""
    long: list[list[Any]] = []
    shown = _without_long_lists(body, long)
    if not long:
        return [encode_json(body)]
    first, *others = encode_json(shown).split(PLACE)
    pieces = [first]
    for members, after in zip(long, others, strict=True):
        for start in range(0, len(members), TURN_MEMBERS):
            pieces.append((b"," if start else b"[") + encode_json(members[start : start + TURN_MEMBERS])[1:-1])
            await asyncio.sleep(0)
        pieces.append(b"]" + after)
    return pieces


def _without_long_lists(value: Any, long: list[list[Any]]) -> Any:
    """Return a value for JSON with PLACE instead of each list in it that has more than `TURN_MEMBERS` members. These
    are appended to `long`, in the order of the JSON text."""
    if isinstance(value, dict):
        holds = (dict, list)  # a call for each text and number of a body took 2 % of a short request's time
        return {name: _without_long_lists(at, long) if isinstance(at, holds) else at for name, at in value.items()}
    if not isinstance(value, list):
        return value
    if len(value) > TURN_MEMBERS:
        long.append(value)
        return Raw(PLACE)
    return [_without_long_lists(inner, long) for inner in value]


class Envelope:
    """The `Renderer` of chats and completions: adds the fields that all bodies of a response share to the choices that
    a `Style` renders. For a stream the fields are encoded once and put around each choice."""

    ping = PING

    def __init__(
        self,
        style: Style,
        admitted: Admitted,
        *,
        num_answers: int,
        asked: Lane | None = None,
        include_usage: bool = False,
        continuous_usage: bool = False,
    ) -> None:
        """Initialize the envelope.

        Args:
            style: renders the choices.
            admitted: the source of the shared fields.
            num_answers: number of answers of the request, over all prompts.
            asked: the lane that the request asked for; None means that it asked for none.
            include_usage: a stream ends with a usage chunk, and every other chunk has a usage of null.
            continuous_usage: other chunks have the usage so far instead of null.
        """
        self._style = style
        self._num_answers = num_answers
        self._include_usage = include_usage
        self._head: Json = {
            "id": style.id_prefix + admitted.id,
            "object": style.object,
            "created": admitted.created,
            "model": admitted.model,
            "system_fingerprint": admitted.fingerprint,
            "service_tier": answer_tier(asked, admitted.lane),
        }
        if admitted.member is not None:
            self._head["x_loralane"] = admitted.member
        self._after = b'],"usage":null}' if include_usage else b"]}"
        self._counted = TokenUsage(sum(map(len, admitted.prompt_ids)), 0, 0) if continuous_usage else None
        """The usage so far. None means that chunks do not tell it."""

    @cached_property
    def _before(self) -> bytes:
        return encode_json(self._head | {"object": self._style.chunk_object, "choices": []}).removesuffix(b"]}")

    def opening(self) -> bytes:
        choices = [self._style.opening(index) for index in range(self._num_answers)]
        shared = encode_json(self._style.shared)[1:-1]
        chunks = [self._chunk(choice, b"" if index else shared) for index, choice in enumerate(filter(None, choices))]
        return b"".join(chunks)

    def delta(self, chunk: GenerationChunk) -> bytes:
        if self._counted is not None:
            self._counted = replace(self._counted, completion=self._counted.completion + len(chunk.token_ids))
        choice = self._style.delta(chunk)
        if chunk.finish_reason is not None:
            return b"".join(map(self._chunk, ending(choice)))
        return self._chunk(choice) if tells(choice) else b""

    async def closing(self, usage: TokenUsage) -> bytes:
        """Return the usage chunk, if the request asked for it, and [DONE]."""
        if not self._include_usage:
            return DONE
        return sse_event(self._before + b'],"usage":' + encode_json(usage_body(usage)) + b"}") + DONE

    def failure(self, error: ApiError) -> bytes:
        """Return the error and [DONE], which is sent after an error too, because clients read a stream up to it."""
        return sse_event(encode_json(error.body())) + DONE

    async def complete(self, chunks: Sequence[GenerationChunk]) -> Json:
        usage = chunks[-1].usage
        rendered = await off_the_loop(chunks, lambda: self._rendered(join_answers(chunks)))
        return self._head | rendered | {"usage": usage_body(usage) if usage else None}

    def _rendered(self, answers: Sequence[GenerationChunk]) -> Json:
        choices = list(map(self._style.complete, answers))
        return {"choices": choices, **self._style.shared, **self._style.beside(answers[0])}

    def _chunk(self, choice: Json, shared: bytes = b"") -> bytes:
        """Return the event of a choice. `shared` is the JSON of further fields of the chunk."""
        after = self._after
        if self._counted is not None:
            after = b'],"usage":%b}' % encode_json(usage_body(self._counted))
        if shared:
            after = b"],%b,%b" % (shared, after[2:]) if len(after) > 2 else b"],%b}" % shared
        return sse_event(self._before + encode_json(choice) + after)


def usage_body(usage: TokenUsage) -> Json:
    body: Json = {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
    }
    details = {"reasoning_tokens": usage.reasoning} if usage.reasoning else {}
    if usage.accepted_prediction or usage.rejected_prediction:
        details["accepted_prediction_tokens"] = usage.accepted_prediction
        details["rejected_prediction_tokens"] = usage.rejected_prediction
    return body | {"completion_tokens_details": details} if details else body


def list_page(data: Sequence[Mapping[str, Any]], has_more: bool) -> Json:
    """Render a page of a list. Each member has an `id`; `has_more` is True if more members follow."""
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": has_more,
    }
