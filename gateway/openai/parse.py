"""Parses request bodies into the structs of `schema.py`, with errors that name the offending field."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from gateway.core.errors import ApiError, Fault, invalid_request, unsupported_parameter
from gateway.core.tenants import UnknownFields
from gateway.openai.messages import Function, Tool
from gateway.openai.schema import (
    REFUSED,
    ChatRequest,
    CompletionRequest,
    JsonSchema,
    ResponseFormat,
    Sampled,
    Slo,
    StreamOptions,
    StructuredOutputs,
)
from gateway.openai.unknown import check_unknown

KNOWN: Mapping[str, frozenset[str]] = {
    "": frozenset((*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__, *REFUSED)),
    "stream_options": frozenset(StreamOptions.__struct_fields__),
    "response_format": frozenset(ResponseFormat.__struct_fields__),
    "response_format.json_schema": frozenset(JsonSchema.__struct_fields__),
    "structured_outputs": frozenset(StructuredOutputs.__struct_fields__),
    "slo": frozenset(Slo.__struct_fields__),
    "tools": frozenset(Tool.__struct_fields__),
    "tools.function": frozenset(Function.__struct_fields__),
}
"""Known field names of each object in the body of a generation, by the object's path; the body itself has an empty
path."""
MOST_PARTS = 10_000
"""Maximum number of messages or items in a request, with the parts of their content and their tool calls, and of
members in other lists. The longest sessions of agents have hundreds. The 280,000 parts or 90,000 calls that fit into
8 MiB would hold up the event loop for more than a second."""
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
            range, or there are more than `MOST_PARTS` messages and parts, or tools; UNSUPPORTED_PARAMETER, a
            generation's body sets an unsupported field. The last two name the field.
    """
    document = decode_json(body)
    check_parts(document, "messages")
    check_texts(document, "prompt")
    check_list(document, "tools")
    if issubclass(kind, Sampled) and isinstance(document, dict):
        check_unknown(document, KNOWN, unknown)
    parsed = to_struct(document, kind)
    if issubclass(kind, Sampled):
        _refuse_unsupported(document, kind)
    return parsed


def decode_json(body: bytes) -> Any:
    """Decode a JSON body. Raises ApiError: INVALID_JSON."""
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:  # the last: thousands of digits, broken UTF-8
        raise ApiError(Fault.INVALID_JSON, f"the body is not valid JSON: {error}") from error


def check_parts(document: Any, field: str) -> None:
    """Raise ApiError (INVALID_REQUEST) if the list in a field of a body and the lists in its members' `content` and
    `tool_calls` have more than `MOST_PARTS` members together."""
    members = document.get(field) if isinstance(document, dict) else None
    if not isinstance(members, list):
        return
    dicts = [member for member in members[:MOST_PARTS] if isinstance(member, dict)]
    lists = [member.get(name) for member in dicts for name in ("content", "tool_calls")]
    if len(members) + sum(len(parts) for parts in lists if isinstance(parts, list)) > MOST_PARTS:
        message = f"{field} may have at most {MOST_PARTS} members, parts of their content and tool calls"
        raise invalid_request(message, field)


def check_texts(document: Any, field: str) -> None:
    """Raise ApiError (INVALID_REQUEST) if the list in a field of a body has more than `MOST_PARTS` members, unless all
    are token ids: to convert as many texts or lists as fit into 8 MiB would hold up the event loop for ten seconds."""
    members = document.get(field) if isinstance(document, dict) else None
    if isinstance(members, list) and len(members) > MOST_PARTS and set(map(type, members)) != {int}:
        raise invalid_request(f"{field} may have at most {MOST_PARTS} members that are not token ids", field)


def check_list(document: Any, field: str) -> None:
    """Raise ApiError (INVALID_REQUEST) if the list in a field of a body has more than `MOST_PARTS` members."""
    members = document.get(field) if isinstance(document, dict) else None
    if isinstance(members, list):
        check_count(len(members), field)


def check_count(count: int, field: str) -> None:
    """Raise ApiError (INVALID_REQUEST, naming `field`) if a list has more than `MOST_PARTS` members."""
    if count > MOST_PARTS:
        raise invalid_request(f"{field} has more than {MOST_PARTS} members", field)


def to_struct(document: Any, kind: type[Body]) -> Body:
    """Convert a decoded body to a struct. Raises ApiError: INVALID_REQUEST, naming the field that does not fit."""
    try:
        return msgspec.convert(_with_integers(document), kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise invalid_field(str(error)) from error


def _with_integers(document: Any) -> Any:
    """Return the document with whole floats among its top-level fields replaced by integers, because some clients have
    only one number type. Floats of EXACT or more, in magnitude, stay as they are."""
    if not isinstance(document, dict):
        return document
    floats = {name: value for name, value in document.items() if isinstance(value, float)}
    whole = {name: int(value) for name, value in floats.items() if value.is_integer() and abs(value) < EXACT}
    return {**document, **whole} if whole else document


def _refuse_unsupported(body: Mapping[str, Any], kind: type[Sampled]) -> None:
    """Raise ApiError (UNSUPPORTED_PARAMETER) if a body sets a field that its struct `kind` lacks, and that is listed in
    REFUSED, to a value that would have an effect."""
    for name in filter(body.__contains__, REFUSED):
        value, harmless = body[name], REFUSED[name]
        reads = name in kind.__struct_fields__
        if not reads and not any(type(value) is type(other) and value == other for other in harmless):
            raise unsupported_parameter(name)


def invalid_field(message: str) -> ApiError:
    """Return the ApiError (INVALID_REQUEST) for a validation message of msgspec, such as "Expected `int`, got `str` -
    at `$.max_tokens`". The field's path becomes the error's `param`."""
    match = _PLACE.match(message)
    what, path = (match["what"], (match["path"] or "").removesuffix("[...]")) if match else (message, "")
    if unknown := _UNKNOWN.match(what):
        param = ".".join(filter(None, (path, unknown[1])))
        return invalid_request(f"there is no field {param!r}", param)
    missing = _MISSING.match(what)
    if missing:
        param = ".".join(filter(None, (path, missing[1])))
        return invalid_request(f"{param} is required", param)
    return invalid_request(f"{path}: {what}" if path else what, path or None)
