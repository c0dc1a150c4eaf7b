"""Parses request bodies into the structs of `gateway.api_schema`, with errors that name the offending field."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache, partial
from typing import Any, TypeVar

import msgspec
from msgspec import Raw, Struct

from gateway.api_schema.chat_messages import Function, Tool, WrittenTool
from gateway.api_schema.chats import (
    ChatRequest,
    CompletionRequest,
    Extended,
    JsonSchema,
    ReasoningOptions,
    ResponseFormat,
    Sampled,
    Slo,
    StreamOptions,
    StructuredOutputs,
)
from gateway.api_schema.tokens import TokenizeRequest
from gateway.core.errors import MAX_MESSAGE, ApiError, Fault, invalid_request
from gateway.core.json_bounds import check_json
from gateway.core.tenants import UnknownFields
from gateway.openai.choices import refuse_long_choices
from gateway.openai.culprits import with_culprit
from gateway.openai.refused_fields import Refused, fields_of, refuse_unsupported
from gateway.openai.unknown import check_unknown, suggestion, unknown_field

KNOWN: Mapping[str, frozenset[str]] = {
    "": frozenset((*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__)),
    "stream_options": frozenset(StreamOptions.__struct_fields__),
    "response_format": frozenset(ResponseFormat.__struct_fields__),
    "response_format.json_schema": frozenset(JsonSchema.__struct_fields__),
    "structured_outputs": frozenset(StructuredOutputs.__struct_fields__),
    "slo": frozenset(Slo.__struct_fields__),
    "reasoning": frozenset((*ReasoningOptions.__struct_fields__, "exclude", "summary")),
    "tools": frozenset(Tool.__struct_fields__),
    "tools.function": frozenset(Function.__struct_fields__),
}
"""Known field names of each object in the body of a generation, by the object's path; the body itself has an empty
path."""
ELSEWHERE: Mapping[str, Refused] = {
    **fields_of(ChatRequest, "is a field of /v1/chat/completions"),
    **fields_of(CompletionRequest, "is a field of /v1/completions"),
    "max_completion_tokens": Refused((None,), "is a field of /v1/chat/completions; use max_tokens"),
}
"""Fields of which each of the two routes lacks some."""
NAMED_BYTES = 2**20
"""Maximum bytes of a body in which the field with too many values is looked for, which takes up to 10 ms."""
EXACT = 2**53
"""Bound of magnitude below which a float represents every integer exactly."""

Body = TypeVar("Body", bound=Struct)

_PLACE = re.compile(r"^(?P<what>.*?)(?: - at (?P<key>`key` in )?`\$\.?(?P<path>[^`]*)`)?$", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(\w+)`")


def parse(body: bytes, kind: type[Body], unknown: UnknownFields = "ignore") -> Body:
    """Parse a JSON request body into a struct, which is returned.

    Args:
        body: the body as received.
        kind: the struct to parse it into.
        unknown: policy for unknown fields of a generation's body that are not misspellings of known ones; misspellings
            are always refused. Other bodies may have unknown fields unless their struct forbids them.

    Raises:
        ApiError: INVALID_JSON; INVALID_REQUEST, a field is missing, unknown (see above), of a wrong type or out of
            range, or the body has too many or too deeply nested values; UNSUPPORTED_PARAMETER, a generation's body sets
            an unsupported field. The last two name the field.
    """
    document = decode_json(body, kind)
    if issubclass(kind, Sampled) and isinstance(document, dict):
        check_unknown(document, KNOWN, unknown)
    parsed = to_struct(document, kind)
    if issubclass(kind, Sampled | TokenizeRequest):
        refuse_unsupported(document, kind, ELSEWHERE if issubclass(kind, Sampled) else {})
    if isinstance(parsed, ChatRequest | TokenizeRequest) and parsed.tools:
        pairs = zip(parsed.tools, document["tools"], strict=True)
        parsed.tools = [WrittenTool(tool.type, tool.function, written) for tool, written in pairs]
    return parsed


def decode_json(body: bytes, kind: type[Struct]) -> Any:
    """Decode a JSON body, which will be converted to a struct of the type `kind`. Raises ApiError: INVALID_JSON;
    INVALID_REQUEST, it exceeds a bound of `check_json`."""
    body = bytes(body)  # a line of a batch is a `Raw`
    try:
        check_json(body)
    except ApiError as error:
        if field := _heaviest(body, kind):
            error.param, error.message = field, f"{error.message}; look at {field}"
        raise
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, ValueError) as error:  # the last: thousands of digits, broken UTF-8
        raise ApiError(Fault.INVALID_JSON, f"the body is not valid JSON: {error}") from error


def _heaviest(body: bytes, kind: type[Struct]) -> str | None:
    """Return the field of a body that has the most brackets and commas. None means that it has no such field, or that
    the body is so long that to look for it would take as long as to decode it."""
    if len(body) > NAMED_BYTES:
        return None
    try:
        fields = msgspec.structs.asdict(msgspec.json.decode(body, type=_undecoded(kind)))
    except (msgspec.DecodeError, RecursionError, ValueError):
        return None
    weights = {name: sum(map(bytes(text).count, (b"[", b"{", b","))) for name, text in fields.items()}
    name = max(weights, key=weights.__getitem__, default="")
    return name if weights.get(name) else None


@cache
def _undecoded(kind: type[Struct]) -> type[Struct]:
    """Return a struct with the same fields as `kind`, whose values stay JSON."""
    return msgspec.defstruct("Undecoded", [(name, Raw, Raw()) for name in kind.__struct_fields__])


def to_struct(document: Any, kind: type[Body]) -> Body:
    """Convert a decoded body to a struct. Raises ApiError: INVALID_REQUEST, naming the field that does not fit."""
    convert = partial(msgspec.convert, type=kind, str_keys=True)
    whole = _with_integers(document)
    refuse_long_choices(whole, kind)
    try:
        return convert(whole)
    except msgspec.ValidationError as error:
        problem = invalid_field(str(error), frozenset(kind.__struct_fields__))
        shown = issubclass(kind, Extended)  # bodies of administrators may hold secrets, which no error should quote
        raise with_culprit(problem, str(error), whole, convert, shows_value=shown) from error


def _with_integers(document: Any) -> Any:
    """Return the document with whole floats among its top-level fields replaced by integers, because some clients have
    only one number type. Floats of EXACT or more, in magnitude, stay as they are."""
    if not isinstance(document, dict):
        return document
    floats = {name: value for name, value in document.items() if isinstance(value, float)}
    whole = {name: int(value) for name, value in floats.items() if value.is_integer() and abs(value) < EXACT}
    return {**document, **whole} if whole else document


def invalid_field(message: str, known: frozenset[str] = frozenset()) -> ApiError:
    """Return the ApiError (INVALID_REQUEST) for a validation message of msgspec, such as "Expected `int`, got `str` -
    at `$.max_tokens`". The field's path becomes the error's `param`. For an unknown field of the body itself, the
    message suggests the name in `known` that it is a misspelling of."""
    if len(message) > 2 * MAX_MESSAGE:  # it quotes the caller's value, and the pattern would take seconds
        message = f"{message[:MAX_MESSAGE]}...{message[-MAX_MESSAGE:]}"
    match = _PLACE.match(message)
    what, path = (match["what"], (match["path"] or "").removesuffix("[...]")) if match else (message, "")
    if unknown := _UNKNOWN.match(what):
        param = ".".join(filter(None, (path, unknown[1])))
        return unknown_field(param, None if path else suggestion(param, known))
    missing = _MISSING.match(what)
    if missing:
        param = ".".join(filter(None, (path, missing[1])))
        return invalid_request(f"{param} is required", param)
    return invalid_request(f"{path}: {what}" if path else what, path or None)
