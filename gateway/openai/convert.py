"""Converts OpenAI request bodies to the gateway's `GenerateRequest`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from msgspec.structs import replace

from engine.core.messages.grammar import Grammar
from engine.core.messages.requests import SamplingParams
from gateway.api_schema.chat_messages import ROLES, ChatMessage, ContentPart
from gateway.api_schema.chats import (
    ChatRequest,
    CompletionRequest,
    Extended,
    Prediction,
    ReasoningOptions,
    Sampled,
    Shaped,
    Slo,
)
from gateway.core.errors import invalid_request, unsupported_parameter
from gateway.core.json_bounds import JsonCount
from gateway.core.lanes import requested_lane
from gateway.core.routing import ModelQuery
from gateway.core.trace_context import UNKNOWN, Ingress
from gateway.openai.structured import by_format, constraint
from gateway.openai.tools import offered_tools, template_call, tool_rule
from gateway.requests.truncation import Side, Truncation, truncation
from gateway.requests.types import DEFAULTED, Chat, GenerateRequest, PromptInput
from gateway.text.chat_template import Message, effort_variables, template_options, thinking_variables
from gateway.text.tools.results import left_out


class Truncatable(Protocol):
    """A body whose prompts may be cut."""

    truncate_prompt_tokens: int | None
    truncation_side: Side | None


COMPLETION_TOKENS = 16
"""Default maximum of output tokens of /v1/completions, as OpenAI documents it."""


def chat_request(body: ChatRequest, request_id: str, ingress: Ingress = UNKNOWN) -> GenerateRequest:
    """Convert the body of a chat to a request with one prompt. `max_completion_tokens` limits the output in place of
    `max_tokens`; the larger of the two is reserved with the rate limiter. Raises ApiError: INVALID_REQUEST, fields
    contradict each other or a message, tool, template variable or grammar is invalid; UNSUPPORTED_PARAMETER, such a
    part is of an unsupported kind, or `best_of` is not `n`."""
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid_request("top_logprobs needs logprobs to be true", "top_logprobs")
    limits = [limit for limit in (body.max_completion_tokens, body.max_tokens) if limit is not None]
    request = _request(
        body,
        prompts=(_chat(body),),
        request_id=request_id,
        ingress=ingress,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
        max_tokens=limits[0] if limits else None,
        reserve_tokens=max(limits, default=0),
    )
    reasoning = body.reasoning or ReasoningOptions()
    budget = body.thinking_token_budget or reasoning.max_tokens
    return replace(request, thinking_budget=budget, prediction=_predicted(body.prediction))


def _predicted(prediction: Prediction | None) -> str:
    content = prediction.content if prediction else None
    return content_text(content, "user", "prediction")


def _chat(body: ChatRequest) -> Chat:
    tools = offered_tools(body.tools or (), body.tool_choice)
    rule = tool_rule(body.tools or (), body.tool_choice, body.parallel_tool_calls)
    implied, effort, own = _reasoning_variables(body), _told_effort(body), body.chat_template_kwargs
    options = template_options(body.add_generation_prompt, body.continue_final_message, own, implied, effort)
    return Chat(chat_messages(body.messages), tools, rule, options)


def _reasoning_variables(body: ChatRequest) -> dict[str, Any]:
    """Return the template variables for `reasoning_effort` and `reasoning`. Raises ApiError: INVALID_REQUEST, they name
    two efforts."""
    reasoning = body.reasoning or ReasoningOptions()
    effort = body.reasoning_effort or reasoning.effort
    if reasoning.effort not in (None, effort):
        raise invalid_request("reasoning.effort and reasoning_effort exclude each other", "reasoning.effort")
    if effort is None and reasoning.enabled is not None:
        return thinking_variables(reasoning.enabled)
    return effort_variables(effort)


def _told_effort(body: ChatRequest) -> str | None:
    """Return the reasoning effort that an upstream is told. OpenRouter's `reasoning` also has a switch: off is its
    effort `none`, and on is no effort."""
    reasoning = body.reasoning or ReasoningOptions()
    return body.reasoning_effort or reasoning.effort or ("none" if reasoning.enabled is False else None)


def completion_request(body: CompletionRequest, request_id: str, ingress: Ingress = UNKNOWN) -> GenerateRequest:
    """Convert the body of a completion to a request with one or several prompts. An echo with `logprobs` asks for log
    probabilities of the prompt, too. Raises ApiError: INVALID_REQUEST, fields contradict each other or a prompt or
    grammar is invalid; UNSUPPORTED_PARAMETER, the grammar's kind, or a `best_of` other than `n` is not supported."""
    if body.echo and body.truncate_prompt_tokens is not None:
        raise invalid_request("echo and truncate_prompt_tokens exclude each other", "truncate_prompt_tokens")
    if body.max_tokens == 0 and not body.echo and body.prompt_logprobs is None:
        raise invalid_request("max_tokens must be at least 1 without echo or prompt_logprobs", "max_tokens")
    asked = [width for width in (body.logprobs if body.echo else None, body.prompt_logprobs) if width is not None]
    return _request(
        body,
        prompts=prompts_of(body.prompt, "prompt"),
        request_id=request_id,
        ingress=ingress,
        logprobs=body.logprobs,
        prompt_logprobs=max(asked, default=None),
        max_tokens=body.max_tokens,
        default_max_tokens=COMPLETION_TOKENS,
    )


def chat_messages(messages: list[ChatMessage]) -> tuple[Message, ...]:
    """Check messages, and convert them to the form that chat templates read: the role `developer` becomes `system`, and
    content parts are joined by newlines. Raises ApiError: INVALID_REQUEST, there are none, or a role, content or tool
    call is invalid; UNSUPPORTED_PARAMETER, a message is or calls a `function`, or a part is no text."""
    if not messages:
        raise invalid_request("messages must not be empty", "messages", "empty_array")
    count = JsonCount()
    return tuple(_message(message, f"messages[{index}]", count) for index, message in enumerate(messages))


def _message(message: ChatMessage, place: str, count: JsonCount) -> Message:
    if message.role == "function" or message.function_call:
        field = "role" if message.role == "function" else "function_call"
        raise unsupported_parameter(f"{place}.{field}", "is not supported; use tools")
    if message.role not in ROLES:
        raise invalid_request(f"unknown role {message.role[:80]!r}", f"{place}.role", "invalid_value")
    if message.content is None and message.role != "assistant":
        raise invalid_request("content must be a text", f"{place}.content")
    role = "system" if message.role == "developer" else message.role
    thought = message.reasoning_content or message.reasoning
    reasoning = {"reasoning_content": thought} if thought else {}
    content = content_text(message.content, role, place)
    return {"role": role, "content": content, **reasoning, **_calls(message, place, count)}


def _calls(message: ChatMessage, place: str, count: JsonCount) -> Message:
    """Return the fields of a message that concern tool calls, as chat templates read them; `place` is the message's
    path for errors. Raises ApiError: INVALID_REQUEST, a tool's message has no id, or not the assistant makes a call."""
    if message.role == "tool":
        if message.tool_call_id is None:
            raise invalid_request("a tool's message needs a tool_call_id", f"{place}.tool_call_id")
        return {"tool_call_id": message.tool_call_id} | ({"name": message.name} if message.name else {})
    if not message.tool_calls:
        return {}
    if message.role != "assistant":
        raise invalid_request("only an assistant calls tools", f"{place}.tool_calls")
    return {"tool_calls": [template_call(call, count) for call in message.tool_calls]}


def content_text(content: str | Sequence[ContentPart] | None, role: str, place: str) -> str:
    """Return the text of the field `content` in `place`, its parts joined by newlines. An assistant's refusal
    counts as text, and a sentence stands for what is no text in a tool's result. Raises ApiError: INVALID_REQUEST, a
    part lacks its text; UNSUPPORTED_PARAMETER, another part is not text."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(_part(part, role, f"{place}.content[{index}]") for index, part in enumerate(content))


def _part(part: ContentPart, role: str, place: str) -> str:
    if part.type == "refusal" and role == "assistant":
        if part.refusal is None:
            raise invalid_request("a refusal part needs a refusal", f"{place}.refusal")
        return part.refusal
    if role == "tool" and part.type != "text":  # which an agent sends again with each request of its session
        return left_out(part.type)
    if part.type != "text":
        raise unsupported_parameter(f"{place}.type", f"{part.type[:80]!r} is not supported; this model reads text")
    if part.text is None:
        raise invalid_request("a text part needs a text", f"{place}.text")
    return part.text


def prompts_of(prompt: str | list[str | int | list[int]], field: str) -> tuple[str | tuple[int, ...], ...]:
    """Return the prompts in a field: a text, a list of token ids, or a list of texts or of lists of ids.

    Raises ApiError: INVALID_REQUEST, the list is empty or mixes kinds.
    """
    if isinstance(prompt, str):
        return (prompt,)
    if not prompt:
        raise invalid_request(f"the {field} is empty", field)
    for kind in (str, int, list):
        if all(isinstance(item, kind) for item in prompt):
            return (tuple(prompt),) if kind is int else tuple(_prompt(item) for item in prompt)  # type: ignore[arg-type]
    raise invalid_request(f"{field} must be a text, token ids, a list of texts or a list of lists of token ids", field)


def _prompt(item: str | int | list[int]) -> str | tuple[int, ...]:
    return tuple(item) if isinstance(item, list) else str(item)


def _request(
    body: Sampled,
    *,
    prompts: tuple[PromptInput, ...],
    request_id: str,
    ingress: Ingress,
    logprobs: int | None,
    prompt_logprobs: int | None,
    max_tokens: int | None,
    reserve_tokens: int = 0,
    default_max_tokens: int | None = None,
) -> GenerateRequest:
    if body.stream_options is not None and not body.stream:
        raise invalid_request("stream_options needs stream to be true", "stream_options")
    if body.prompt_logprobs is not None and body.stream:
        raise unsupported_parameter("prompt_logprobs", "cannot be streamed; completions stream those of an echo")
    if body.best_of not in (None, body.n or 1):
        raise unsupported_parameter("best_of")
    asked = constraint(body, by_format(body.response_format))
    return GenerateRequest(
        model=ModelQuery(body.model, body.adapter_id, body.lora_path),
        prompts=prompts,
        request_id=request_id,
        ingress=ingress,
        sampling=sampling_of(body, logprobs, asked.grammar)._replace(prompt_logprobs=prompt_logprobs),
        grammar_field=asked.field,
        max_tokens=max_tokens,
        reserve_tokens=reserve_tokens,
        default_max_tokens=default_max_tokens,
        seed=body.seed,
        stop=body.stop_strings,
        keep_stop=bool(body.include_stop_str_in_output),
        coalesce=not body.stream,
        n=body.n or 1,
        lane=requested_lane(body.service_tier),
        truncation=truncation_of(body, "left"),
        local_field=_local_field(body),
        **extensions(body),
    )


def _local_field(body: Sampled) -> str:
    """Return the name of a field that asks for what no server elsewhere tells: token ids, or how many there are before
    an answer ends. Empty means that the body has none."""
    if body.return_token_ids:
        return "return_token_ids"
    return "stream_options.continuous_usage_stats" if body.continuous_usage else ""


def truncation_of(body: Truncatable, default: Side) -> Truncation | None:
    """Return how prompts are cut. Raises ApiError: INVALID_REQUEST, to no tokens at all."""
    if body.truncate_prompt_tokens == 0:
        raise invalid_request(
            "truncate_prompt_tokens must be -1 or above 0", "truncate_prompt_tokens", "integer_below_min_value"
        )
    return truncation(body.truncate_prompt_tokens, body.truncation_side, default)


def extensions(body: Extended) -> dict[str, Any]:
    """Return the arguments of `GenerateRequest`, by name, that follow from the fields of `Extended` in a body, except
    those that choose the model."""
    slo = body.slo or Slo()
    return {
        "priority": body.priority,
        "request_class": body.request_class or "",
        "ttft": slo.ttft,
        "itl": slo.itl,
        "deadline": body.timeout,
        "stall": body.stall_timeout,
        "cache_salt": body.cache_salt or "",
        "speculates": body.speculation != "off",
        "add_special_tokens": getattr(body, "add_special_tokens", None),
        "defaulted": frozenset(name for name in DEFAULTED if getattr(body, name, None) is None),
    }


def sampling_of(body: Shaped, logprobs: int | None, grammar: Grammar | None) -> SamplingParams:
    """Return the sampling parameters of a body, which has `temperature` and `top_p`, too. Raises ApiError:
    INVALID_REQUEST, it has two penalties of repetition."""

    if body.repeat_penalty not in (None, body.repetition_penalty):
        raise invalid_request("repeat_penalty and repetition_penalty exclude each other", "repeat_penalty")

    def given(name: str, default: float) -> Any:
        value = getattr(body, name)
        return default if value is None else value

    return SamplingParams(
        min_tokens=given("min_tokens", 0),
        temperature=given("temperature", 1.0),
        top_p=given("top_p", 1.0),
        top_k=max(0, given("top_k", 0)),
        min_p=given("min_p", 0.0),
        presence_penalty=given("presence_penalty", 0.0),
        frequency_penalty=given("frequency_penalty", 0.0),
        repetition_penalty=given("repetition_penalty", 1.0),
        logit_bias=tuple((body.logit_bias or {}).items()),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        logprobs=logprobs,
        grammar=grammar,
    )
