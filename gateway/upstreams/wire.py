"""Reads the events of streams of OpenAI's chat completions and completions, and errors."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import msgspec
from msgspec import Struct

from gateway.core.errors import ApiError, Fault
from gateway.requests.types import Finish, GenerationChunk, TokenUsage
from gateway.text.tools.calls import ToolCallPart

Json = dict[str, Any]

MOST_TOKENS = 10_000_000
"""Maximum of each token count in the usage that an upstream reports. Larger counts are cut to it."""
LIMIT, NEWER_LIMIT = "max_tokens", "max_completion_tokens"
"""Fields for the maximum number of output tokens: the one that all servers know, and the only one that OpenAI's
reasoning models accept."""
MOST_CALLS = 1024
"""Maximum number of tool calls of an answer."""
FINISHES: Mapping[str, Finish] = {"length": "length", "max_tokens": "length"}
"""The gateway's finish reason for each finish reason of an upstream; those not listed become `stop`. Tool calls are
recognised by the calls themselves."""


class UpstreamFailed(Exception):
    """An upstream did not answer; the text says why, without secrets. `is_transient` means that a retry may help.
    `is_counted` is False if the failure may be due to what the request asks for: one tenant's requests must not open
    the breaker for all."""

    def __init__(self, reason: str, *, is_transient: bool = True, is_counted: bool = True) -> None:
        super().__init__(reason)
        self.is_transient, self.is_counted = is_transient, is_counted


class TooLong(UpstreamFailed):
    """The answer is longer than `max_response_bytes`, which is due to what the request asks for."""

    def __init__(self) -> None:
        super().__init__("an answer that is too long", is_transient=False, is_counted=False)


class CalledText(Struct):
    name: str | None = None
    arguments: str | None = None


class CallDelta(Struct):
    index: int = 0
    id: str | None = None
    function: CalledText | None = None


class ToldCall(Struct):
    """A tool call that an upstream has begun to send, with its number in the answer as clients get it."""

    number: int
    id: str = ""
    is_named: bool = False


class Delta(Struct):
    content: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    tool_calls: list[CallDelta] | None = None


class ChoiceDelta(Struct):
    index: int = 0
    delta: Delta | None = None
    text: str | None = None
    """New text of a completion that is no chat."""
    finish_reason: str | None = None


class PromptDetails(Struct):
    cached_tokens: int | None = None


class CompletionDetails(Struct):
    reasoning_tokens: int | None = None


class Usage(Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: PromptDetails | None = None
    completion_tokens_details: CompletionDetails | None = None


class Event(Struct):
    """One event of a stream of chat completions or completions, with only the fields that the gateway reads."""

    choices: list[ChoiceDelta] = []
    usage: Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(Event).decode


def read_event(data: bytes) -> Event:
    """Return the event in the data of a server-sent event. Raises UpstreamFailed if it is an error, or none of a
    completion."""
    try:
        event = _decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise UpstreamFailed("an event that is not of a completion", is_transient=False) from error
    if event.error:
        raise UpstreamFailed("an error in place of an answer's next piece")
    return event


class CallNumbers:
    """Numbers the tool calls of one answer from 0. Some servers repeat a call's name in all of its parts, count from 1,
    or give all calls the index 0."""

    def __init__(self) -> None:
        self._calls: dict[str, ToldCall] = {}
        """The last tool call that the upstream sent under each of its indices, which are texts, because many integers
        may have one hash."""
        self._count = 0

    def part(self, delta: CallDelta) -> ToolCallPart:
        """Convert a piece of a tool call to the gateway's form, with the call's number in the answer, and the name only
        in the first piece that has it. Raises UpstreamFailed if the answer has too many calls."""
        function, call = delta.function or CalledText(), self._calls.get(str(delta.index))
        if call is None or (function.name and delta.id and call.id and delta.id != call.id):
            if self._count == MOST_CALLS:
                raise UpstreamFailed(f"more than {MOST_CALLS} tool calls", is_transient=False, is_counted=False)
            call = self._calls[str(delta.index)] = ToldCall(self._count)
            self._count += 1
        name = "" if call.is_named else function.name or ""
        call.id, call.is_named = call.id or delta.id or "", call.is_named or bool(name)
        return ToolCallPart(call.number, name, function.arguments or "")


def chunk_of(choice: ChoiceDelta, num_answers: int, calls: Mapping[int, CallNumbers]) -> GenerationChunk:
    """Return the chunk with which a choice of an event continues an answer. `calls` number the tool calls of each
    answer. Raises UpstreamFailed if there is no such answer."""
    if not 0 <= choice.index < num_answers:
        raise UpstreamFailed("an answer that was not asked for", is_transient=False)
    delta, reason = choice.delta or Delta(), choice.finish_reason
    return GenerationChunk(
        choice.index,
        (choice.text or "") + (delta.content or "") + (delta.refusal or ""),
        reasoning=delta.reasoning_content or "",
        calls=tuple(map(calls[choice.index].part, delta.tool_calls or ())),
        finish_reason=FINISHES.get(reason, "stop") if reason else None,
    )


def usage_of(usage: Usage | None) -> TokenUsage:
    """Return the usage that an upstream told; 0 tokens mean that it told none. Numbers out of range are
    cut."""
    if usage is None:
        return TokenUsage(0, 0, 0)
    prompt = _bounded(usage.prompt_tokens)
    cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else 0
    reasoning = usage.completion_tokens_details.reasoning_tokens if usage.completion_tokens_details else 0
    completion = _bounded(usage.completion_tokens)
    cached, reasoning = min(prompt, _bounded(cached or 0)), min(completion, _bounded(reasoning or 0))
    return TokenUsage(prompt, completion, cached, reasoning=reasoning)


def _bounded(tokens: int) -> int:
    return min(max(0, tokens), MOST_TOKENS)


class ErrorDetail(Struct):
    message: str = ""
    code: Any = None
    param: Any = None


class ErrorBody(Struct):
    error: ErrorDetail


def wants_newer_limit(text: bytes) -> bool:
    """Return whether a refusal, whose body begins with `text`, says to send NEWER_LIMIT in place of LIMIT."""
    detail = _detail(text)
    return detail.param == LIMIT and NEWER_LIMIT in detail.message


def refusal(status: int, text: bytes, shown: int) -> ApiError:
    """Return the error for a status of 400, 413 or 422: the upstream refuses the request itself. Its message is quoted
    up to `shown` characters."""
    detail = _detail(text)
    is_long = detail.code == "context_length_exceeded" or status == 413
    fault = Fault.CONTEXT_LENGTH_EXCEEDED if is_long else Fault.INVALID_REQUEST
    return ApiError(fault, f"the upstream refused the request: {detail.message[:shown] or status}")


def _detail(text: bytes) -> ErrorDetail:
    """Return what the body of an error says; nothing if it cannot be read."""
    with suppress(msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return msgspec.json.decode(text, type=ErrorBody).error
    return ErrorDetail()
