"""Renders chat messages to the text that the model reads, with the model's chat template."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import msgspec
from jinja2.exceptions import TemplateError
from msgspec import Struct

from engine.process.small_files import read_small_text
from gateway.api_schema.chats import EFFORTS
from gateway.core.errors import ApiError, invalid_request
from gateway.text.template_budget import TooCostly

Message = dict[str, Any]
"""A chat message as templates read it: role, content, and fields for tool calls."""

ToolSchema = Mapping[str, Any]
"""A tool as templates read it, in the format of the OpenAI API: what the caller wrote, without additions."""
NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
"""Schema of the arguments of a tool that lists no parameters."""

VARIABLES = "chat_template_kwargs"
"""Request field in which a caller sets variables of the template."""
MOST_BYTES = 16_384
"""Maximum size of a request's template variables, in bytes of JSON."""
VARIABLE = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")
RESERVED = frozenset(
    (
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "documents",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "self",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    )
)
"""Names that a caller must not use for template variables: arguments of transformers' `apply_chat_template`, and values
that have request fields of their own. Names that end in `_token` or `_tokens` are reserved for the tokenizer."""

SHORT_ID = re.compile("[A-Za-z0-9]{9}")
REFUSALS = (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError)
"""Exceptions that a template may raise if it cannot render its input."""


class TemplateOptions(Struct, frozen=True):
    """Options of a request for rendering its chat."""

    add_generation_prompt: bool = True
    """True means that the text ends with the beginning of an assistant's message."""
    continue_final_message: bool = False
    """True means that the text ends with the last message, left open, so that the answer continues that message."""
    variables: Mapping[str, Any] = MappingProxyType({})
    """Template variables that the caller sets, such as `enable_thinking`."""
    own: Mapping[str, Any] = MappingProxyType({})
    """The part of `variables` that the caller itself wrote in `chat_template_kwargs`."""
    effort: str | None = None
    """Value of `reasoning_effort` that says to an upstream what the caller asked for. None means that it asked for
    nothing that this field can say."""


DEFAULT_OPTIONS = TemplateOptions()


def template_options(
    add: bool | None,
    resume: bool | None,
    own: Mapping[str, Any] | None,
    implied: Mapping[str, Any] = MappingProxyType({}),
    effort: str | None = None,
) -> TemplateOptions:
    """Build the options from `add_generation_prompt`, by default on unless the last message is continued,
    `continue_final_message`, `chat_template_kwargs` (`own`), and `implied` variables, which `own` overrides. Raises
    ApiError (INVALID_REQUEST)."""
    if add and resume:
        message = "add_generation_prompt and continue_final_message exclude each other"
        raise invalid_request(message, "continue_final_message")
    variables = {**implied, **(own or {})}
    if variables:
        _check_variables(variables)
    return TemplateOptions(not resume if add is None else add, bool(resume), variables, own or {}, effort)


def parameters_of(tool: ToolSchema) -> Mapping[str, Any]:
    """Return the JSON schema of a tool's arguments."""
    parameters: Mapping[str, Any] = tool["function"].get("parameters") or NO_PARAMETERS
    return parameters


def effort_variables(effort: str | None, param: str = "reasoning_effort") -> dict[str, Any]:
    """Return the template variables for a reasoning effort: `reasoning_effort`, and the switches of
    `thinking_variables`, off only for `none`; nothing for None. Raises ApiError (INVALID_REQUEST, naming `param`) if it
    is unknown."""
    if effort is None:
        return {}
    if effort not in EFFORTS:
        raise invalid_request(f"the effort must be one of {', '.join(EFFORTS)}", param, "invalid_value")
    return {"reasoning_effort": effort, **thinking_variables(effort != "none")}


def thinking_variables(enabled: bool) -> dict[str, Any]:
    """Return the template variables that switch reasoning on or off: `enable_thinking`, which the templates of Qwen 3
    read, and `thinking`, which those of DeepSeek and Granite read."""
    return {"enable_thinking": enabled, "thinking": enabled}


def read_template(path: Path) -> str:
    """Read a chat template from a file. Raises OSError, also for one of over 4 MiB, and ValueError if the file is not
    UTF-8 text."""
    try:
        return read_small_text(path)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no UTF-8 text") from error


class Renders(Protocol):
    """A template, with all that it may read beside a chat."""

    def __call__(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema], options: TemplateOptions, /
    ) -> str: ...


def render(
    template: Renders,
    messages: Sequence[Message],
    tools: Sequence[ToolSchema] = (),
    options: TemplateOptions = DEFAULT_OPTIONS,
) -> str:
    """Return the text of messages rendered with a template in Jinja's sandbox. Raises ApiError (INVALID_REQUEST) if the
    template refuses them."""
    # Arguments that are no JSON object are passed as a string. A template that fails is run again with tools that all
    # have description and parameters, and other forms of calls.
    try:
        return template(messages, tools, options)
    except TooCostly as error:
        raise _refusal(error, options) from None
    except REFUSALS as error:
        refusal = _refusal(error, options)
    given, whole = list(messages), [_whole(tool) for tool in tools]
    for adapted in (given, *([_with_calls(message, form) for message in messages] for form in (_object, _text))):
        if adapted != given or whole != list(tools):
            with suppress(*REFUSALS):
                return template(adapted, whole, options)
    try:
        raise refusal
    finally:
        del refusal  # its traceback refers to this frame: a cycle would keep what the frame holds


def with_thinking(message: Message, *, with_calls: bool = False) -> Message:
    """Return a message with its reasoning copied to the field `thinking`, which the templates of gpt-oss and LFM2 read.
    Unless `with_calls`, a message with both text and tool calls is returned unchanged, because gpt-oss's template
    refuses `thinking` there."""
    reasoning = message.get("reasoning_content")
    if not reasoning or "thinking" in message:
        return message
    has_both = message.get("content") and message.get("tool_calls")
    return message if has_both and not with_calls else {**message, "thinking": reasoning}


def _whole(tool: ToolSchema) -> ToolSchema:
    """Return a tool with a description and parameters, which some templates need."""
    function = tool["function"]
    described = {"description": function.get("description") or "", "parameters": parameters_of(tool)}
    return {**tool, "type": "function", "function": {**function, **described}}


def _with_calls(message: Message, adapt: Callable[[Any], Any]) -> Message:
    """Return the message with `adapt` applied to the arguments of its tool calls, and with the ids of its tool calls,
    or of the call that it answers, in the short form that Mistral's templates demand."""
    if "tool_call_id" in message:
        return {**message, "tool_call_id": _short_id(message["tool_call_id"])}
    if "tool_calls" not in message:
        return message
    return {**message, "tool_calls": [_adapted(call, adapt) for call in message["tool_calls"]]}


def _adapted(call: Message, adapt: Callable[[Any], Any]) -> Message:
    function = call["function"]
    return {
        **call,
        "id": _short_id(call.get("id")),
        "function": {**function, "arguments": adapt(function["arguments"])},
    }


def _object(arguments: Any) -> Any:
    """Return arguments, wrapped in an object if they are a string: some templates can only read objects."""
    return {"arguments": arguments} if isinstance(arguments, str) else arguments


def _text(arguments: Any) -> str:
    """Return arguments as JSON text: DeepSeek's templates up to R1 can only read text."""
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _short_id(call_id: object) -> str:
    """Return the id if it consists of nine letters and digits, else nine hex digits of its hash. Equal ids stay
    equal."""
    text = str(call_id)
    return text if SHORT_ID.fullmatch(text) else hashlib.sha256(text.encode()).hexdigest()[:9]


def _refusal(error: Exception, options: TemplateOptions) -> ApiError:
    what = f"these messages or {VARIABLES}" if options.variables else "these messages"
    return invalid_request(f"the model's chat template refuses {what}: {error}", "messages")


def _check_variables(variables: Mapping[str, Any]) -> None:
    if len(msgspec.json.encode(variables)) > MOST_BYTES:
        raise invalid_request(f"{VARIABLES} must have at most {MOST_BYTES} bytes of JSON", VARIABLES)
    for name in variables:
        if not VARIABLE.fullmatch(name):
            raise invalid_request(f"{name[:80]!r} in {VARIABLES} is no name of a template's variable", VARIABLES)
        if name in RESERVED or name.endswith(("_token", "_tokens")):
            raise invalid_request(f"{VARIABLES} must not set {name}", f"{VARIABLES}.{name}")
