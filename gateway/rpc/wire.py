"""Converts messages of `loralane.v1` to the gateway's own types and back; `pooled.py` does so for vectors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_type_hints

import msgspec

from engine.core.messages.grammar import Grammar
from engine.core.messages.requests import Lane, SamplingParams, TokenLogprobs
from gateway.api_schema.chat_messages import (
    AssistantCall,
    CalledFunction,
    ChatMessage,
    Function,
    FunctionName,
    Tool,
    ToolChoice,
)
from gateway.api_schema.chats import ChatRequest, CompletionRequest, Slo, StructuredOutputs
from gateway.core.errors import invalid_request
from gateway.core.json_bounds import JsonCount
from gateway.core.routing import ModelQuery
from gateway.openai.choices import refuse_long_choices
from gateway.openai.convert import chat_messages
from gateway.openai.structured import Constraint, by_kind
from gateway.openai.tools import ChunkContent, offered_tools, tool_rule
from gateway.pb import generation_pb2 as pb
from gateway.requests.prompt_scores import PromptScores
from gateway.requests.streams import join_answers
from gateway.requests.types import (
    DEFAULTED,
    Admitted,
    Chat,
    GenerateRequest,
    GenerationChunk,
    PromptInput,
    TokenUsage,
)
from gateway.text.chat_template import effort_variables, template_options

RANGES: Mapping[str, Any] = get_type_hints(ChatRequest, include_extras=True) | get_type_hints(
    CompletionRequest, include_extras=True
)
"""Types of the fields of a request for a chat or completion, by name; msgspec validates them with HTTP's ranges."""
SLO_RANGES: Mapping[str, Any] = get_type_hints(Slo, include_extras=True)
OWN = ("n", "stall_timeout", "cache_salt", "speculation", "request_class")
"""Optional fields of the message GenerateRequest itself that have a range."""

NOT_SAMPLING = frozenset({"max_tokens", "seed", "stop"})
"""Fields of the message SamplingParams that the gateway handles itself instead of passing them to the sampler."""

TokenText = Callable[[int], str]
Read = Callable[[GenerationChunk], ChunkContent]
"""Function that separates the tool calls of a chunk from its text."""

_LANE_ASKED: Mapping[int, Lane | None] = {
    pb.LANE_UNSPECIFIED: None,
    pb.LANE_INTERACTIVE: Lane.INTERACTIVE,
    pb.LANE_BATCH: Lane.BATCH,
}
_LANE: Mapping[Lane, pb.Lane] = {Lane.INTERACTIVE: pb.LANE_INTERACTIVE, Lane.BATCH: pb.LANE_BATCH}
_TOOL_MODE: Mapping[int, str] = {
    pb.ToolChoice.MODE_UNSPECIFIED: "auto",
    pb.ToolChoice.MODE_AUTO: "auto",
    pb.ToolChoice.MODE_NONE: "none",
    pb.ToolChoice.MODE_REQUIRED: "required",
}
_FINISH: Mapping[str | None, pb.FinishReason] = {
    None: pb.FINISH_REASON_UNSPECIFIED,
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
    "tool_calls": pb.FINISH_REASON_TOOL_CALLS,
}


def generate_request(message: pb.GenerateRequest, request_id: str, deadline: float | None) -> GenerateRequest:
    """Convert a request message to the gateway's request, with the same checks of ranges as over HTTP.

    `deadline` is how many seconds the caller will wait for the whole answer. None means that it set no deadline.

    Raises ApiError: INVALID_REQUEST, a field is missing or invalid; UNSUPPORTED_PARAMETER, a role is `function`.
    """
    given = {field.name: _plain(value) for field, value in message.sampling.ListFields()}
    _check_ranges(given, RANGES)
    if given.get("max_tokens") == 0 and "prompt_logprobs" not in given:  # unlike HTTP, gRPC has no `echo`
        raise invalid_request("max_tokens must be at least 1 without prompt_logprobs", "max_tokens")
    slo, asked = slo_asked(message.slo), _asked(message.structured_outputs)
    _check_ranges(own := {name: getattr(message, name) for name in OWN if message.HasField(name)}, RANGES)
    return GenerateRequest(
        model=model_query(message.model),
        prompts=(prompt_input(message),),
        request_id=request_id,
        thinking_budget=_thinking_budget(message.chat),
        sampling=_sampling(given, asked.grammar),
        defaulted=DEFAULTED - given.keys(),
        grammar_field=asked.field,
        max_tokens=given.get("max_tokens"),
        seed=given.get("seed"),
        stop=tuple(given.get("stop", ())),
        n=own.get("n", 1),
        lane=lane_asked(message.lane),
        priority=message.priority or None,
        request_class=own.get("request_class", ""),
        deadline=deadline,
        stall=own.get("stall_timeout"),
        ttft=slo.ttft,
        itl=slo.itl,
        cache_salt=own.get("cache_salt", ""),
        speculates=own.get("speculation") != "off",
        prediction=message.chat.prediction,
    )


def _thinking_budget(chat: pb.Chat) -> int | None:
    if not chat.HasField("thinking_token_budget"):
        return None
    _check_ranges({"thinking_token_budget": chat.thinking_token_budget}, RANGES)
    return chat.thinking_token_budget


def model_query(model: str) -> ModelQuery:
    """Return the query for a model's name, without looking it up. Raises ApiError: INVALID_REQUEST, it is empty."""
    if not model:
        raise invalid_request("model is required", "model")
    return ModelQuery(model)


def prompt_input(message: pb.GenerateRequest | pb.TokenizeRequest) -> PromptInput:
    """Return the chat, the text or the token ids in the oneof `input` of a message. Raises ApiError: INVALID_REQUEST,
    none is set or a chat is invalid; UNSUPPORTED_PARAMETER, a chat message's role is `function`."""
    match message.WhichOneof("input"):
        case "chat":
            return _chat(message.chat)
        case "prompt":
            return message.prompt
        case "prompt_ids" if isinstance(message, pb.GenerateRequest):
            return tuple(message.prompt_ids.ids)
    names = [field.name for field in message.DESCRIPTOR.oneofs_by_name["input"].fields]
    raise invalid_request(f"one of {', '.join(names)} is required", "input")


def chunk_to_pb(
    admitted: Admitted, chunk: GenerationChunk, told: ChunkContent, token_text: TokenText
) -> pb.GenerateChunk:
    choice = _choice(chunk, told, token_text)
    return pb.GenerateChunk(choice=choice, usage=usage_to_pb(chunk.usage), **head_fields(admitted))


def response_bytes(admitted: Admitted, chunks: Sequence[GenerationChunk], read: Read, token_text: TokenText) -> bytes:
    """Return the complete response to the `admitted` request, an encoded GenerateResponse. `chunks` holds all chunks of
    all answers, each answer's in order; the last has the usage. `read` separates tool calls; `token_text` returns a
    token's text.

    Each answer is encoded by itself, because a thread lets others run only between two calls into protobuf: 128 answers
    with log probabilities took 0.1 s at once. A message's parts may follow each other (the encoding's "last one wins"
    and "repeated fields are concatenated").
    """
    head = pb.GenerateResponse(usage=usage_to_pb(chunks[-1].usage), **head_fields(admitted))
    choices = (_choice(answer, read(answer), token_text) for answer in join_answers(chunks))
    parts = [pb.GenerateResponse(choices=[choice]).SerializeToString() for choice in choices]
    return b"".join([head.SerializeToString(), *parts])


def usage_metadata(usage: TokenUsage) -> dict[str, str]:
    """Return a request's usage as entries of trailing metadata: from header name to number of tokens, as text."""
    return {
        "x-loralane-prompt-tokens": str(usage.prompt),
        "x-loralane-cached-tokens": str(usage.cached),
        "x-loralane-completion-tokens": str(usage.completion),
    }


def _chat(message: pb.Chat) -> Chat:
    """Convert a chat by way of OpenAI's types, so that it is validated and interpreted as over HTTP. Raises ApiError:
    INVALID_REQUEST, a message, tool or tool choice is invalid; UNSUPPORTED_PARAMETER, a role is `function`."""
    count = JsonCount()
    tools = [_tool(tool, f"tools[{index}]", count) for index, tool in enumerate(message.tools)]
    choice = _tool_choice(message.tool_choice)
    parallel = message.parallel_tool_calls if message.HasField("parallel_tool_calls") else None
    rule = tool_rule(tools, choice, parallel)
    effort = message.reasoning_effort or None
    options = template_options(None, None, None, effort_variables(effort), effort)
    return Chat(chat_messages(list(map(_message, message.messages))), offered_tools(tools, choice), rule, options)


def _message(message: pb.ChatMessage) -> ChatMessage:
    calls = [AssistantCall(CalledFunction(call.name, call.arguments), call.id) for call in message.tool_calls]
    return ChatMessage(
        message.role,
        message.content,
        calls,
        reasoning_content=message.reasoning_content or None,
        tool_call_id=message.tool_call_id or None,
        name=message.name or None,
    )


def _tool(tool: pb.Tool, place: str, count: JsonCount) -> Tool:
    text = tool.parameters.encode() or b"null"
    count.add(text, f"{place}.parameters")
    try:
        parameters = msgspec.json.decode(text, type=dict[str, Any] | None)
    except (msgspec.DecodeError, ValueError) as error:
        raise invalid_request(f"{place}.parameters: {error}", f"{place}.parameters") from error
    return Tool("function", Function(tool.name, tool.description, parameters, tool.strict))


def _tool_choice(message: pb.ToolChoice) -> str | ToolChoice | None:
    if message.WhichOneof("choice") == "name":
        return ToolChoice("function", FunctionName(message.name))
    if message.mode not in _TOOL_MODE:
        raise invalid_request(f"mode {message.mode} is none of {', '.join(pb.ToolChoice.Mode.keys())}", "tool_choice")
    return _TOOL_MODE[message.mode]


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, Sequence) else value


def _check_ranges(given: Mapping[str, Any], ranges: Mapping[str, Any], place: str = "") -> None:
    for name, value in given.items():
        refuse_long_choices(value, ranges[name], f"{place}{name}")
        try:
            msgspec.convert(value, ranges[name])
        except msgspec.ValidationError as error:
            raise invalid_request(f"{place}{name}: {error}", f"{place}{name}") from error


def slo_asked(message: pb.Slo) -> Slo:
    given = {field.name: value for field, value in message.ListFields()}
    _check_ranges(given, SLO_RANGES, "slo.")
    return Slo(**given)


def _asked(message: pb.StructuredOutputs) -> Constraint:
    kind = message.WhichOneof("kind")
    if kind is None:
        return Constraint()
    value = list(message.choice.choice) if kind == "choice" else getattr(message, kind)
    return by_kind(msgspec.convert({kind: value}, StructuredOutputs))


def _sampling(given: Mapping[str, Any], grammar: Grammar | None) -> SamplingParams:
    values = {name: value for name, value in given.items() if name not in NOT_SAMPLING}
    values["logit_bias"] = tuple(given.get("logit_bias", {}).items())
    values["stop_token_ids"] = tuple(given.get("stop_token_ids", ()))
    return SamplingParams(**values, grammar=grammar)


def lane_asked(number: int) -> Lane | None:
    if number not in _LANE_ASKED:
        raise invalid_request(f"lane {number} is none of {', '.join(pb.Lane.keys())}", "lane")
    return _LANE_ASKED[number]


def head_fields(admitted: Admitted) -> dict[str, Any]:
    """Return the fields, by name, that the messages GenerateResponse and GenerateChunk have in common."""
    return {
        "id": admitted.id,
        "model": admitted.model,
        "lane": _LANE[admitted.lane],
        "system_fingerprint": admitted.fingerprint,
    }


def _choice(chunk: GenerationChunk, told: ChunkContent, token_text: TokenText) -> pb.Choice:
    return pb.Choice(
        index=chunk.answer,
        text=told.text,
        token_ids=chunk.token_ids,
        logprobs=_logprobs(chunk, token_text),
        finish_reason=_FINISH[told.finish_reason],
        tool_calls=map(_tool_call, told.calls),
        reasoning_content=chunk.reasoning,
        prompt_logprobs=_prompt_logprobs(chunk.prompt_scores, token_text),
    )


def _tool_call(call: Mapping[str, Any]) -> pb.ToolCall:
    function = call["function"]
    return pb.ToolCall(
        index=call["index"],
        id=call.get("id", ""),
        name=function.get("name", ""),
        arguments=function["arguments"],
    )


def _logprobs(chunk: GenerationChunk, token_text: TokenText) -> list[pb.TokenLogprob]:
    if not chunk.logprobs:
        return []
    pairs = zip(chunk.token_ids, chunk.logprobs, strict=True)
    return [_token_logprob(token_id, values, token_text) for token_id, values in pairs]


def _prompt_logprobs(scores: PromptScores, token_text: TokenText) -> list[pb.TokenLogprob]:
    found = []
    for token_id, scored in scores.pairs():
        if scored is not None:
            found.append(_token_logprob(token_id, scored.values, token_text))
            found[-1].rank = scored.rank
    return found


def _token_logprob(token_id: int, values: TokenLogprobs, token_text: TokenText) -> pb.TokenLogprob:
    top = [pb.TopLogprob(token_id=other, token=token_text(other), logprob=logprob) for other, logprob in values.top]
    return pb.TokenLogprob(token_id=token_id, token=token_text(token_id), logprob=values.logprob, top=top)


def usage_to_pb(usage: TokenUsage | None) -> pb.Usage | None:
    if usage is None:
        return None
    return pb.Usage(
        prompt_tokens=usage.prompt,
        cached_tokens=usage.cached,
        completion_tokens=usage.completion,
        reasoning_tokens=usage.reasoning,
        accepted_prediction_tokens=usage.accepted_prediction,
        rejected_prediction_tokens=usage.rejected_prediction,
    )
