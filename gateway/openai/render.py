"""Renders the gateway's generation chunks as OpenAI response bodies."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import msgspec
from msgspec import Raw

from engine.core.types import Lane
from gateway.core.errors import ApiError
from gateway.core.lanes import answer_tier
from gateway.openai.logprobs import ChatLogprobsRenderer, CompletionLogprobsRenderer, prompt_logprobs
from gateway.openai.tools import ChunkContent, ToolCalls, text_content
from gateway.requests.rendering import off_the_loop
from gateway.requests.types import Admitted, Generation, GenerationChunk, TokenUsage, join_answers
from gateway.text.tokenizer import Tokenizer

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


DONE = sse_event(b"[DONE]")
"""Last event of a stream of OpenAI's chunks."""


class Style(Protocol):
    """Renders the items of `choices` in one endpoint's responses, as JSON objects. An instance serves one request."""

    id_prefix: str
    object: str
    chunk_object: str

    def opening(self, index: int) -> Json | None:
        """Return the choice to stream before any text of the answer with the number `index`. None means that there is
        none."""

    def delta(self, chunk: GenerationChunk) -> Json:
        """Return the choice to stream for a chunk. Each answer's chunks must be passed once and in order."""

    def complete(self, chunk: GenerationChunk) -> Json:
        """Return the choice of a complete response, from one joined chunk that holds the whole answer."""

    def beside(self, chunk: GenerationChunk) -> Json:
        """Return the fields that a complete response has in addition to `choices` on its top level, from the joined
        chunk of the first answer."""


class ChatStyle:
    """The `Style` of /v1/chat/completions: renders messages and deltas with tool calls and log probabilities."""

    id_prefix = "chatcmpl-"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        token_ids: bool = False,
        tools: ToolCalls | None = None,
        prompt_logprobs: bool = False,
    ) -> None:
        """Initialize the style.

        Args:
            tokenizer: renders the tokens of log probabilities.
            token_ids: include the token ids in each choice.
            tools: reads tool calls from the answers. None means that no tools were offered and everything is text.
            prompt_logprobs: include log probabilities of the prompt beside the choices.
        """
        self._tokenizer = tokenizer
        self._prompt_logprobs = prompt_logprobs
        self._logprobs = ChatLogprobsRenderer(tokenizer, silent=token_ids)
        self._token_ids = token_ids
        self._tools = tools

    def opening(self, index: int) -> Json | None:
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def delta(self, chunk: GenerationChunk) -> Json:
        told = self._told(chunk)
        content = {"content": told.text} if told.text else {}
        content |= {"reasoning_content": chunk.reasoning} if chunk.reasoning else {}
        return self._choice(chunk, "delta", content | ({"tool_calls": told.calls} if told.calls else {}), told)

    def complete(self, chunk: GenerationChunk) -> Json:
        told = self._told(chunk)
        message: Json = {"role": "assistant", "content": told.text, "refusal": None}
        if chunk.reasoning:
            message["reasoning_content"] = chunk.reasoning
        if told.calls:
            calls = [{name: value for name, value in call.items() if name != "index"} for call in told.calls]
            message |= {"content": told.text or None, "tool_calls": calls}
        return self._choice(chunk, "message", message, told)

    def beside(self, chunk: GenerationChunk) -> Json:
        if not self._prompt_logprobs:
            return {}
        scores = chunk.prompt_scores
        return {"prompt_logprobs": prompt_logprobs(scores, scores.width, self._tokenizer)}

    def _told(self, chunk: GenerationChunk) -> ChunkContent:
        return self._tools.read(chunk) if self._tools else text_content(chunk)

    def _choice(self, chunk: GenerationChunk, name: str, content: Json, told: ChunkContent) -> Json:
        logprobs = self._logprobs.render(chunk)
        choice = {"index": chunk.answer, name: content, "logprobs": logprobs, "finish_reason": told.finish_reason}
        return choice | ({"token_ids": chunk.token_ids} if self._token_ids else {})


class CompletionStyle:
    """The `Style` of /v1/completions: renders texts with log probabilities, after the prompt if it is echoed."""

    id_prefix = "cmpl-"
    object = "text_completion"
    chunk_object = "text_completion"

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        token_ids: bool = False,
        echo: Sequence[str] = (),
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
    ) -> None:
        """Initialize the style.

        Args:
            tokenizer: renders the tokens of log probabilities.
            token_ids: include the token ids in each choice.
            echo: for each answer, the prompt that its text begins with; empty if prompts are not echoed.
            logprobs: number of alternatives to list for each token of an echoed prompt. None means that no log
                probabilities were requested.
            prompt_logprobs: number of alternatives to list for each token of the prompt in the choice's field of this
                name. None means that there is no such field.
        """
        self._tokenizer = tokenizer
        self._logprobs = CompletionLogprobsRenderer(tokenizer, () if logprobs is None else echo, logprobs or 0)
        self._token_ids = token_ids
        self._echo = echo
        self._prompt_logprobs = prompt_logprobs

    def opening(self, index: int) -> Json | None:
        if not self._echo:
            return None
        return {"index": index, "text": self._echo[index], "logprobs": None, "finish_reason": None}

    def delta(self, chunk: GenerationChunk) -> Json:
        logprobs = self._logprobs.render(chunk)
        choice = {"index": chunk.answer, "text": chunk.text, "logprobs": logprobs, "finish_reason": chunk.finish_reason}
        return choice | ({"token_ids": chunk.token_ids} if self._token_ids else {})

    def complete(self, chunk: GenerationChunk) -> Json:
        echo = self._echo[chunk.answer] if self._echo else ""
        choice = self.delta(chunk) | {"text": echo + chunk.text}
        if self._prompt_logprobs is not None:
            rendered = prompt_logprobs(chunk.prompt_scores, self._prompt_logprobs, self._tokenizer)
            choice["prompt_logprobs"] = rendered
        return choice

    def beside(self, chunk: GenerationChunk) -> Json:
        return {}


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
        return {name: _without_long_lists(inner, long) for name, inner in value.items()}
    if not isinstance(value, list):
        return value
    if len(value) > TURN_MEMBERS:
        long.append(value)
        return Raw(PLACE)
    return [_without_long_lists(inner, long) for inner in value]


class Envelope:
    """The `Renderer` of chats and completions: adds the fields that all bodies of a response share to the choices that
    a `Style` renders. For a stream the fields are encoded once and put around each choice."""

    ping = b": ping\n\n"

    def __init__(
        self,
        style: Style,
        admitted: Admitted,
        *,
        num_answers: int,
        asked: Lane | None = None,
        include_usage: bool = False,
    ) -> None:
        """Initialize the envelope.

        Args:
            style: renders the choices.
            admitted: the source of the shared fields.
            num_answers: number of answers of the request, over all prompts.
            asked: the lane that the request asked for; None means that it asked for none.
            include_usage: a stream ends with a usage chunk, and every other chunk has a usage of null.
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

    @cached_property
    def _before(self) -> bytes:
        return encode_json(self._head | {"object": self._style.chunk_object, "choices": []}).removesuffix(b"]}")

    def opening(self) -> bytes:
        choices = (self._style.opening(index) for index in range(self._num_answers))
        return b"".join(self._chunk(choice) for choice in choices if choice is not None)

    def delta(self, chunk: GenerationChunk) -> bytes:
        choice = self._style.delta(chunk)
        return self._chunk(choice) if _tells(choice) else b""

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
        return {"choices": list(map(self._style.complete, answers)), **self._style.beside(answers[0])}

    def _chunk(self, choice: Json) -> bytes:
        return sse_event(self._before + encode_json(choice) + self._after)


def _tells(choice: Json) -> bool:
    """Return whether a chunk with this choice would tell the client anything."""
    get = choice.get  # a generator expression over the names took 0.8 us of a token's 26
    return bool(get("delta") or get("text") or get("finish_reason") or get("logprobs") or get("token_ids"))


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
