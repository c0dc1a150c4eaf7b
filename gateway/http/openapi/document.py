"""Generates the OpenAPI 3.1 document from the structs that validate requests and from the error table."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from importlib.metadata import version
from typing import Any

import msgspec
from msgspec import Struct

from gateway.anthropic.errors import OVERLOADED, error_status, is_messages_path
from gateway.api_schema.chats import Extended
from gateway.api_schema.operation import PLACEHOLDER, Operation
from gateway.core.errors import Fault
from gateway.core.lifecycle import DRAINING_HEADER
from gateway.http.openapi.answers import Error, MessageError
from gateway.http.openapi.operations import OPERATIONS
from gateway.http.time_limits import TIME_LIMIT_HEADERS
from gateway.openai.culprits import CODES
from gateway.openai.refused_fields import REFUSED

Json = dict[str, Any]

EVENTS = "text/event-stream"
EVENT_DATA = "x-event-data"
"""Extension field that holds the schema of each event's data, except for the last event, which is [DONE]. OpenAPI has a
standard field for this only from 3.2 on."""
RATE_HEADERS = [f"x-ratelimit-{what}-{of}" for what in ("limit", "remaining", "reset") for of in ("requests", "tokens")]
HEADERS = {
    "x-request-id": "Id of the request: the caller's own if it sent a valid one, otherwise a new one.",
    "x-loralane-lane": "The lane that served the request.",
    "x-loralane-model": "The member that answered for a virtual model.",
    "x-loralane-reason": "Why that member answered, in one word.",
    "x-loralane-limiter": "degraded, open or closed: how limits were enforced while Redis was unavailable.",
    DRAINING_HEADER: "true: the gateway drains, and another one would serve the request.",
    "retry-after": "Seconds, rounded up, after which the same request can succeed.",
    "retry-after-ms": "Milliseconds, rounded up, after which the same request can succeed.",
    "x-should-retry": "true if a retry can succeed, false if it cannot.",
    **dict.fromkeys(RATE_HEADERS, "Value of the tightest limit when the request was admitted or refused."),
}


def document(operations: Sequence[Operation] = OPERATIONS) -> Json:
    """Return the OpenAPI document that describes these operations, as a dict that can be encoded as JSON."""
    paths: dict[str, Json] = defaultdict(dict)
    for operation in operations:
        paths[PLACEHOLDER.sub(r"{\1}", operation.path)][operation.method.lower()] = _operation(operation)
    headers = {name: {"description": text, "schema": {"type": "string"}} for name, text in HEADERS.items()}
    return {
        "openapi": "3.1.0",
        "info": {"title": "loralane", "version": version("loralane")},
        "paths": dict(paths),
        "components": {
            "schemas": _schemas(operations),
            "headers": headers,
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _operation(operation: Operation) -> Json:
    name = PLACEHOLDER.sub(lambda match: _named(match[1], operation), operation.path)
    return {
        "operationId": "_".join([operation.method.lower(), *re.findall(r"\w+", name)]),
        "summary": operation.summary,
        **({"description": _needed_role(operation)} if operation.who == "admin" else {}),
        "parameters": [
            *_path_parameters(operation.path),
            *_query_parameters(operation),
            *_header_parameters(operation),
        ],
        "responses": _responses(operation),
        "security": [] if operation.who == "anyone" else [{"key": []}, {"x-api-key": []}],
        **({"requestBody": _body(operation, operation.body)} if operation.body else {}),
    }


def _needed_role(operation: Operation) -> str:
    scope = " Administrators of one tenant may call it for that tenant." if operation.of_tenant else ""
    return f"Needs an administrator with the role {operation.role}.{scope}"


def _named(placeholder: str, operation: Operation) -> str:
    """Return the word that stands for a path parameter in the operation's id: `file` for `file_id`, otherwise `adapter`
    in operations of administrators and `model` in all others."""
    if placeholder.endswith("_id"):
        return placeholder.removesuffix("_id")
    return "adapter" if operation.who == "admin" else "model"


def _body(operation: Operation, kind: type[Struct]) -> Json:
    return {"required": True, "content": {operation.body_type: {"schema": _reference(kind)}}}


def _path_parameters(path: str) -> list[Json]:
    schema = {"type": "string", "minLength": 1}
    return [
        {"name": match[1], "in": "path", "required": True, "schema": schema} for match in PLACEHOLDER.finditer(path)
    ]


def _query_parameters(operation: Operation) -> list[Json]:
    return [{"name": name, "in": "query", "schema": schema} for name, schema in operation.query.items()]


def _header_parameters(operation: Operation) -> list[Json]:
    """Return the OpenAPI parameters for the time limit headers; empty for an operation to which the tenant's limits do
    not apply."""
    schema = {"type": "number", "exclusiveMinimum": 0, "maximum": 86_400}
    named = TIME_LIMIT_HEADERS.items() if operation.is_limited else ()
    return [{"name": name, "in": "header", "description": text, "schema": schema} for name, text in named]


def _responses(operation: Operation) -> Json:
    status = operation.status
    responses = {status: _response("Success.", _content(operation), _headers(status, operation))}
    for status, kind in operation.other.items():
        responses[status] = _response("Not ready.", _json(kind), _headers(status, operation))
    error = MessageError if is_messages_path(operation.path) else Error
    for status, faults in _by_status(operation):
        responses[status] = _response(_codes(faults), _json(error), _headers(status, operation))
    return {str(status): responses[status] for status in sorted(responses)}


def _response(description: str, content: Json, headers: Iterable[str]) -> Json:
    references = {name: {"$ref": f"#/components/headers/{name}"} for name in headers}
    return {"description": description, "content": content, "headers": references}


def _headers(status: int, operation: Operation) -> Iterable[str]:
    yield "x-request-id"
    if status in (429, 503, OVERLOADED) and status not in operation.other:
        yield from ("retry-after", "retry-after-ms")
    if operation.who == "tenant" and status == 503:
        yield DRAINING_HEADER
    faults = dict(_by_status(operation)).get(status, ())
    if any(fault.row.should_retry is not None for fault in faults):
        yield "x-should-retry"
    if operation.is_limited and status == 200:
        yield from ("x-loralane-lane", "x-loralane-model", "x-loralane-reason")
    if operation.is_limited and status in (200, 429):
        yield from RATE_HEADERS
    if operation.is_limited and status in (200, 429, 503, OVERLOADED):
        yield "x-loralane-limiter"


def _content(operation: Operation) -> Json:
    if isinstance(operation.answer, str):
        return {operation.answer: {"schema": {"type": "string"}}}
    if operation.events is None:
        text = {operation.text: {"schema": {"type": "string"}}} if operation.text else {}
        return {**_json(operation.answer), **text}
    return {**_json(operation.answer), EVENTS: {EVENT_DATA: _reference(operation.events)}}


def _json(kind: type[Struct]) -> Json:
    return {"application/json": {"schema": _reference(kind)}}


def _reference(kind: type[Struct]) -> Json:
    return {"$ref": f"#/components/schemas/{kind.__name__}"}


def _by_status(operation: Operation) -> list[tuple[int, list[Fault]]]:
    found: dict[int, list[Fault]] = defaultdict(list)
    for fault in sorted(operation.all_faults, key=lambda fault: fault.name):
        found[_status(operation, fault)].append(fault)
    return sorted(found.items())


def _status(operation: Operation, fault: Fault) -> int:
    return error_status(fault) if is_messages_path(operation.path) else fault.row.http_status


def _codes(faults: Collection[Fault]) -> str:
    names = sorted({fault.row.code or "null" for fault in faults})
    if Fault.INVALID_REQUEST in faults:
        names += sorted({code for _, code in CODES})
    return f"Error with one of these codes: {', '.join(names)}"


def _schemas(operations: Iterable[Operation]) -> Json:
    kinds: set[type[Struct]] = {Error, MessageError}
    for operation in operations:
        named = (operation.answer, operation.body, operation.events, *operation.other.values())
        kinds |= {kind for kind in named if isinstance(kind, type)}
    ordered = sorted(kinds, key=lambda kind: kind.__name__)
    _, schemas = msgspec.json.schema_components(ordered, ref_template="#/components/schemas/{name}")
    for kind in ordered:
        if issubclass(kind, Extended):
            refused = ", ".join(name for name in sorted(REFUSED) if name not in kind.__struct_fields__)
            schemas[kind.__name__]["description"] += f" Fields refused unless they have no effect: {refused}."
    return schemas
