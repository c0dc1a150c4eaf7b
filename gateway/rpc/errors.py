"""Converts ApiErrors to gRPC statuses with the standard details of google.rpc."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from gateway.core.errors import ApiError, clip
from gateway.pb import generation_pb2

DOMAIN = "loralane"
MAX_MESSAGE = 300
"""Maximum characters of an error message. Messages quote the caller's input, and peers drop calls whose trailing
metadata exceed 8 KiB."""

FIELDS = {
    **{name: f"chat.{name}" for name in ("messages", "tools", "tool_choice")},
    "lora_name": "name",
    "lora_path": "path",
    **{name: f"sampling.{name}" for name in generation_pb2.SamplingParams.DESCRIPTOR.fields_by_name},
}
"""Paths of fields in the messages of `loralane.v1`, by the field's name in the HTTP API, where the two differ."""


def status_of(error: ApiError, request_id: str, field_of: Callable[[str], str]) -> grpc.Status:
    """Return the gRPC status of an error: code, message cut to MAX_MESSAGE, ErrorInfo and RequestInfo, and RetryInfo,
    QuotaFailure for a 429 or BadRequest where they apply. `field_of` renames fields of the HTTP API."""
    message = clip(error.message, MAX_MESSAGE)
    status = status_pb2.Status(code=code_pb2.Code.Value(error.grpc_status), message=message)
    for detail in _details(error, message, request_id, field_of):
        status.details.add().Pack(detail)
    return rpc_status.to_status(status)


def _details(error: ApiError, message: str, request_id: str, field_of: Callable[[str], str]) -> list[Message]:
    reason = (error.code or error.fault.name).upper()
    details: list[Message] = [
        error_details_pb2.ErrorInfo(reason=reason, domain=DOMAIN, metadata=error.metadata),
        error_details_pb2.RequestInfo(request_id=request_id),
    ]
    if error.retry_after is not None:
        details.append(error_details_pb2.RetryInfo(retry_delay=_duration(error.retry_after)))
    if error.http_status == 429:
        subject = error.metadata.get("scope", "")
        violation = error_details_pb2.QuotaFailure.Violation(subject=subject, description=message)
        details.append(error_details_pb2.QuotaFailure(violations=[violation]))
    if error.param is not None:
        blame = error_details_pb2.BadRequest.FieldViolation(field=field_of(error.param), description=message)
        details.append(error_details_pb2.BadRequest(field_violations=[blame]))
    return details


def field_path(param: str) -> str:
    """Return the path in the gRPC request message of the field that the HTTP API calls `param`: messages[0].role ->
    chat.messages[0].role. `.function` is left out, because a function is no message of its own in `loralane.v1`."""
    first, rest = re.fullmatch(r"(\w*)(.*)", param, re.DOTALL).groups()  # type: ignore[union-attr]
    return FIELDS.get(first, first) + rest.replace(".function", "")


def _duration(seconds: float) -> Duration:
    """Return seconds as a protobuf Duration, rounded up to whole milliseconds so that a client that waits this long
    waits long enough."""
    duration = Duration()
    duration.FromMilliseconds(math.ceil(seconds * 1000))
    return duration
