"""Converts requests of `loralane.v1` to the gateway's own; `answers.py` converts what comes back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_type_hints

import msgspec

from engine.core.messages.grammar import Grammar
from engine.core.messages.requests import Lane, SamplingParams
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
from gateway.openai.tools import offered_tools, tool_rule
from gateway.pb import generation_pb2 as pb
from gateway.requests.deadlines import TimeLimits
from gateway.requests.options import EncodingOptions, FieldNames, OutputOptions, Urgency
from gateway.requests.types import DEFAULTED, Chat, GenerateRequest, PromptInput
from gateway.text.chat_template import effort_variables, template_options

RANGES: Mapping[str, Any] = get_type_hints(ChatRequest, include_extras=True) | get_type_hints(
    CompletionRequest, include_extras=True
)
"""Types of the fields of a request for a chat or completion, by name; msgspec validates them with HTTP's ranges."""
SLO_RANGES: Mapping[str, Any] = get_type_hints(Slo, include_extras=True)
OWN = ("n", "stall_timeout", "cache_salt", "speculation", "request_class")
"""Optional fields of the message GenerateRequest itself that have a range."""

NOT_SAMPLING = frozenset({"max_tokens", "stop"})
"""Fields of the message SamplingParams that the gateway handles itself instead of passing them to the sampler."""

_LANE_ASKED: Mapping[int, Lane | None] = {
    pb.LANE_UNSPECIFIED: None,
    pb.LANE_INTERACTIVE: Lane.INTERACTIVE,
    pb.LANE_BATCH: Lane.BATCH,
}
_TOOL_MODE: Mapping[int, str] = {
    pb.ToolChoice.MODE_UNSPECIFIED: "auto",
    pb.ToolChoice.MODE_AUTO: "auto",
    pb.ToolChoice.MODE_NONE: "none",
    pb.ToolChoice.MODE_REQUIRED: "required",
}


def generate_request(message: pb.GenerateRequest, request_id: str, deadline: float | None) -> GenerateRequest:
    """Convert a request message to the gateway's request, with HTTP's checks. `deadline` is how many seconds the caller
    waits, or None. Raises ApiError: INVALID_REQUEST; UNSUPPORTED_PARAMETER, a role is `function`."""
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
        n=own.get("n", 1),
        sampling=_sampling(given, asked.grammar, speculates=own.get("speculation") != "off"),
        defaulted=DEFAULTED - given.keys(),
        output=OutputOptions(
            max_tokens=given.get("max_tokens"),
            thinking_budget=_thinking_budget(message.chat),
            stop=tuple(given.get("stop", ())),
        ),
        urgency=Urgency(
            lane_asked(message.lane), own.get("request_class", ""), message.priority or None, slo.ttft, slo.itl
        ),
        time_limits=TimeLimits(deadline, stall=own.get("stall_timeout")),
        encoding=EncodingOptions(cache_salt=own.get("cache_salt", "")),
        prediction=message.chat.prediction,
        fields=FieldNames(grammar=asked.field),
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


def _sampling(given: Mapping[str, Any], grammar: Grammar | None, *, speculates: bool) -> SamplingParams:
    values = {name: value for name, value in given.items() if name not in NOT_SAMPLING}
    values["logit_bias"] = tuple(given.get("logit_bias", {}).items())
    values["stop_token_ids"] = tuple(given.get("stop_token_ids", ()))
    return SamplingParams(**values, grammar=grammar, speculates=speculates)


def lane_asked(number: int) -> Lane | None:
    if number not in _LANE_ASKED:
        raise invalid_request(f"lane {number} is none of {', '.join(pb.Lane.keys())}", "lane")
    return _LANE_ASKED[number]
