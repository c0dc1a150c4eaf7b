"""Converts requests to bodies of OpenAI's chat completions and completions. A field that would change the answer is
sent or refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from engine.core.messages.grammar import Grammar, GrammarKind
from engine.core.messages.requests import PoolingKind
from gateway.core.errors import invalid_request, unsupported_parameter
from gateway.requests.types import DEFAULTED, Chat, GenerateRequest
from gateway.text.chat_template import (
    EFFORTS,
    VARIABLES,
    Message,
    TemplateOptions,
)
from gateway.text.tools.rule import ToolRule
from gateway.upstreams.wire import LIMIT, Json

MOST_ANSWERS, MOST_VECTORS = 128, 2048
"""Maximum numbers of answers and of vectors of a request, as many as engines give."""
OFF: Mapping[str, float] = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
"""Value of each sampling parameter in `DEFAULTED` that changes no probability. All servers that know `top_k` read -1 as
none, which is 0 here."""


def check(request: GenerateRequest) -> None:
    """Raise ApiError (UNSUPPORTED_PARAMETER, or INVALID_REQUEST for too many texts and for a schema that is no JSON) if
    an upstream cannot do what a request asks for. Whatever depends on the model's tokens is refused, such as
    logit_bias, except prompts of token ids for vectors."""
    sampling, pooling, output, fields = request.sampling, request.pooling, request.output, request.fields
    if pooling is not None and len(request.prompts) > MOST_VECTORS:  # before each text is tokenised to estimate limits
        field = request.prompt_field(MOST_VECTORS).split("[")[0]
        raise invalid_request(f"a request may have at most {MOST_VECTORS} texts", field)
    ids = any(isinstance(prompt, tuple) for prompt in request.prompts)
    chats = sum(isinstance(prompt, Chat) for prompt in request.prompts)
    refused = {
        "prompt": (ids and pooling is None) or (chats > 0 and len(request.prompts) > 1),
        "pooling": pooling is not None and (chats > 0 or pooling.kind is not PoolingKind.LAST),
        "n": len(request.prompts) * request.n > MOST_ANSWERS and pooling is None,
        "logprobs": sampling.logprobs is not None,
        "prompt_logprobs": sampling.prompt_logprobs is not None,
        "logit_bias": bool(sampling.logit_bias),
        "stop_token_ids": bool(sampling.stop_token_ids),
        "ignore_eos": sampling.ignore_eos,
        "min_tokens": bool(sampling.min_tokens),
        "include_stop_str_in_output": output.keep_stop,
        "truncate_prompt_tokens": request.encoding.truncation is not None,
        fields.local or "model": bool(fields.local),
        "thinking": output.needs_thinking,
        "thinking_token_budget": output.thinking_budget is not None,
        fields.grammar or "grammar": _is_other_grammar(sampling.grammar) or (sampling.grammar and not chats),
        "continue_final_message": any(
            isinstance(prompt, Chat) and prompt.options.continue_final_message for prompt in request.prompts
        ),
    }
    for param, is_asked in refused.items():
        if is_asked:
            raise unsupported_parameter(param, "is not supported by the upstream that would answer")
    if sampling.grammar is not None:
        _schema(sampling.grammar, fields.grammar)


def _schema(grammar: Grammar, field: str = "") -> Json:
    """Return the JSON schema in a grammar, whose text is still as the caller sent it, unparsed. Raises ApiError
    (INVALID_REQUEST, naming `field`) if it is no JSON object."""
    try:
        schema = msgspec.json.decode(grammar.text)
    except (msgspec.DecodeError, ValueError) as error:
        raise invalid_request(f"{field} is not valid JSON: {error}", field) from error
    if not isinstance(schema, dict):
        raise invalid_request(f"{field} is not a JSON object, as a schema must be", field)
    return schema


def _is_other_grammar(grammar: Grammar | None) -> bool:
    return grammar is not None and grammar.kind is not GrammarKind.JSON_SCHEMA


def body_of(request: GenerateRequest, model: str, limit_field: str = LIMIT) -> Json:
    """Return the body for a request for answers that `check` accepts: of a chat completion if it is a chat, otherwise
    of a completion. `model` is the model's name at the upstream, `limit_field` the field of chats for the maximum
    number of output tokens. Values that the caller did not set are left out, because some servers refuse fields that
    they do not know."""
    sampling, chat = request.sampling, request.prompts[0]
    body: Json = {"model": model, "stream": True, "stream_options": {"include_usage": True}}
    body |= _choosing(request)
    optional: dict[str, tuple[Any, Any]] = {
        "presence_penalty": (sampling.presence_penalty, 0.0),
        "frequency_penalty": (sampling.frequency_penalty, 0.0),
        limit_field if isinstance(chat, Chat) else LIMIT: (request.output.asked_tokens, None),
        "seed": (request.given("seed"), None),
        "n": (request.n, 1),
        "stop": (list(request.output.stop), []),
        "add_special_tokens": (request.encoding.add_special_tokens, None),
    }
    body |= {name: value for name, (value, default) in optional.items() if value != default}
    if not isinstance(chat, Chat):
        return body | {"prompt": list(request.prompts) if len(request.prompts) > 1 else chat}
    body["messages"] = [_message(message) for message in chat.messages]
    body |= _rendering(chat.options)
    if sampling.grammar is not None:
        body["response_format"] = _format(_schema(sampling.grammar))
    if chat.tools:
        body |= {"tools": list(chat.tools), **_choice(chat.rule)}
    return body


def _choosing(request: GenerateRequest) -> Json:
    """Return the parameters in `DEFAULTED` that the caller set, or that the gateway set for it, to other values than
    OFF. A server whose model has defaults of its own needs the caller's, even if they are OFF, unless the answer is
    greedy anyway."""
    sampling, given = request.sampling.with_greedy, DEFAULTED - request.defaulted
    values = {name: getattr(sampling, name) for name in OFF} | {"top_k": sampling.top_k or OFF["top_k"]}
    told = given & {"temperature", "repetition_penalty"} if sampling.temperature == 0 else given
    return {name: value for name, value in values.items() if value != OFF[name] or name in told}


def _rendering(options: TemplateOptions) -> Json:
    """Return the fields that decide how the upstream renders a chat: `reasoning_effort`, which OpenAI's API has, and
    those of vLLM's and SGLang's that the caller wrote itself, because OpenAI's servers refuse these."""
    body: Json = {} if options.add_generation_prompt else {"add_generation_prompt": False}
    if options.effort in EFFORTS:
        body["reasoning_effort"] = options.effort
    return body | ({VARIABLES: dict(options.own)} if options.own else {})


def _format(schema: Json) -> Json:
    if schema == {"type": "object"}:
        return {"type": "json_object"}
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


def _choice(rule: ToolRule) -> Json:
    choice: Any = "required" if rule.required else "auto"
    if rule.named is not None:
        choice = {"type": "function", "function": {"name": rule.named}}
    return {"tool_choice": choice} | ({} if rule.parallel else {"parallel_tool_calls": False})


def _message(message: Message) -> Json:
    """Return a message in OpenAI's form, in which arguments of tool calls are JSON texts."""
    calls = [_call(call) for call in message.get("tool_calls") or ()]
    told = {name: value for name, value in message.items() if name != "tool_calls" and value is not None}
    return told | ({"tool_calls": calls} if calls else {})


def _call(call: Mapping[str, Any]) -> Json:
    function = call["function"]
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"id": call.get("id"), "type": "function", "function": {"name": function["name"], "arguments": text}}
