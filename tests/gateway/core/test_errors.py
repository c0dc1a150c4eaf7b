"""Every error of the wire contract, as HTTP and gRPC clients will see it."""

from __future__ import annotations

import grpc
import pytest

from engine.core.messages.requests import ErrorCode
from gateway.core import errors
from gateway.core.errors import ApiError, Fault

CONTRACT = [
    ("INVALID_REQUEST", 400, "INVALID_ARGUMENT", "invalid_request_error", None, None),
    ("CONTEXT_LENGTH_EXCEEDED", 400, "INVALID_ARGUMENT", "invalid_request_error", "context_length_exceeded", None),
    ("INVALID_JSON", 400, "INVALID_ARGUMENT", "invalid_request_error", "invalid_json", None),
    ("UNSUPPORTED_PARAMETER", 400, "INVALID_ARGUMENT", "invalid_request_error", "unsupported_parameter", None),
    (
        "PREVIOUS_RESPONSE_NOT_FOUND",
        400,
        "FAILED_PRECONDITION",
        "invalid_request_error",
        "previous_response_not_found",
        None,
    ),
    ("INVALID_API_KEY", 401, "UNAUTHENTICATED", "authentication_error", "invalid_api_key", None),
    ("KEY_EXPIRED", 401, "UNAUTHENTICATED", "authentication_error", "key_expired", None),
    ("FORBIDDEN", 403, "PERMISSION_DENIED", "permission_error", "forbidden", None),
    ("ADDRESS_NOT_ALLOWED", 403, "PERMISSION_DENIED", "permission_error", "address_not_allowed", None),
    ("PERMISSION_DENIED", 403, "PERMISSION_DENIED", "permission_error", "permission_denied", None),
    ("MODEL_NOT_FOUND", 404, "NOT_FOUND", "not_found_error", "model_not_found", None),
    ("TENANT_NOT_FOUND", 404, "NOT_FOUND", "not_found_error", "tenant_not_found", None),
    ("KEY_NOT_FOUND", 404, "NOT_FOUND", "not_found_error", "key_not_found", None),
    ("REQUEST_NOT_FOUND", 404, "NOT_FOUND", "not_found_error", "request_not_found", None),
    ("FILE_NOT_FOUND", 404, "NOT_FOUND", "not_found_error", "file_not_found", None),
    ("BATCH_NOT_FOUND", 404, "NOT_FOUND", "not_found_error", "batch_not_found", None),
    ("RESPONSE_NOT_FOUND", 404, "NOT_FOUND", "not_found_error", "response_not_found", None),
    ("ADMIN_NOT_FOUND", 404, "NOT_FOUND", "not_found_error", "admin_not_found", None),
    ("ROUTE_NOT_FOUND", 404, "UNIMPLEMENTED", "not_found_error", None, None),
    ("METHOD_NOT_ALLOWED", 405, "UNIMPLEMENTED", "invalid_request_error", None, None),
    ("ADAPTER_EXISTS", 409, "ALREADY_EXISTS", "conflict_error", "adapter_conflict", False),
    ("ADAPTER_CONFLICT", 409, "FAILED_PRECONDITION", "conflict_error", "adapter_conflict", False),
    ("ADAPTER_UNLOADED", 409, "ABORTED", "conflict_error", "adapter_unloaded", False),
    ("TENANT_EXISTS", 409, "ALREADY_EXISTS", "conflict_error", "tenant_conflict", False),
    ("TENANT_CONFLICT", 409, "FAILED_PRECONDITION", "conflict_error", "tenant_conflict", False),
    ("FILE_IN_USE", 409, "FAILED_PRECONDITION", "conflict_error", "file_in_use", False),
    ("BATCH_CONFLICT", 409, "FAILED_PRECONDITION", "conflict_error", "batch_conflict", False),
    ("ENGINE_CONFLICT", 409, "ALREADY_EXISTS", "conflict_error", "engine_conflict", False),
    ("ADMIN_EXISTS", 409, "ALREADY_EXISTS", "conflict_error", "admin_conflict", False),
    ("ADMIN_CONFLICT", 409, "FAILED_PRECONDITION", "conflict_error", "admin_conflict", False),
    ("REQUEST_TOO_LARGE", 413, "INVALID_ARGUMENT", "invalid_request_error", "request_too_large", None),
    ("UNSUPPORTED_CODING", 415, "INVALID_ARGUMENT", "invalid_request_error", "unsupported_coding", None),
    ("RATE_LIMIT_EXCEEDED", 429, "RESOURCE_EXHAUSTED", "requests", "rate_limit_exceeded", None),
    ("INSUFFICIENT_QUOTA", 429, "RESOURCE_EXHAUSTED", "insufficient_quota", "insufficient_quota", False),
    ("INTERNAL", 500, "INTERNAL", "server_error", "internal_error", None),
    ("ENGINE_CRASHED", 500, "INTERNAL", "server_error", "engine_crashed", False),
    ("MODEL_OUTPUT_INVALID", 500, "INTERNAL", "server_error", "model_output_invalid", False),
    ("LANE_QUEUE_FULL", 503, "UNAVAILABLE", "service_unavailable", "lane_queue_full", None),
    ("QUEUE_TIMEOUT", 503, "UNAVAILABLE", "service_unavailable", "queue_timeout", None),
    ("PREEMPTED", 503, "UNAVAILABLE", "service_unavailable", "preempted", None),
    ("CANCELLED", 503, "ABORTED", "service_unavailable", "preempted", False),
    ("ADAPTER_UNAVAILABLE", 503, "UNAVAILABLE", "service_unavailable", "adapter_unavailable", None),
    ("LIMITER_UNAVAILABLE", 503, "UNAVAILABLE", "service_unavailable", "limiter_unavailable", None),
    ("REGISTRY_UNAVAILABLE", 503, "UNAVAILABLE", "service_unavailable", "registry_unavailable", None),
    ("STORAGE_UNAVAILABLE", 503, "UNAVAILABLE", "service_unavailable", "storage_unavailable", True),
    ("ENGINE_UNAVAILABLE", 503, "UNAVAILABLE", "service_unavailable", "engine_unavailable", None),
    ("UPSTREAM_UNAVAILABLE", 503, "UNAVAILABLE", "service_unavailable", "upstream_unavailable", None),
    ("AUDIT_UNAVAILABLE", 503, "UNAVAILABLE", "service_unavailable", "audit_unavailable", None),
    ("OVERLOADED", 503, "UNAVAILABLE", "service_unavailable", "overloaded", None),
    ("DEADLINE_EXCEEDED", 504, "DEADLINE_EXCEEDED", "server_error", "deadline_exceeded", None),
    ("INSUFFICIENT_STORAGE", 507, "RESOURCE_EXHAUSTED", "server_error", "insufficient_storage", False),
]


@pytest.mark.parametrize("row", CONTRACT, ids=lambda row: row[0])
def test_the_table_is_the_contract(row):
    name, *expected = row
    error = ApiError(Fault[name], "why")
    assert [error.http_status, error.grpc_status, error.type, error.code, error.should_retry] == expected
    assert hasattr(grpc.StatusCode, error.grpc_status)


def test_the_table_has_no_other_rows():
    assert [fault.name for fault in Fault] == [row[0] for row in CONTRACT]


def test_the_table_knows_whatever_an_engine_refuses_for():
    table = [code for code in ErrorCode if code is not ErrorCode.INVALID_GRAMMAR]  # an INVALID_REQUEST with a field
    for code in table:
        assert Fault[code.name].row.code in (code.value, None)
    full = {code for code in table if Fault[code.name].row.http_status == 503}
    assert full == {
        ErrorCode.LANE_QUEUE_FULL,
        ErrorCode.QUEUE_TIMEOUT,
        ErrorCode.ADAPTER_UNAVAILABLE,
        ErrorCode.CANCELLED,
    }


def test_the_body_always_has_all_four_fields():
    assert errors.model_not_found("nope").body() == {
        "error": {
            "message": "the model 'nope' does not exist or you do not have access to it",
            "type": "not_found_error",
            "param": "model",
            "code": "model_not_found",
        }
    }
    assert errors.invalid_request("bad").body()["error"] == {
        "message": "bad",
        "type": "invalid_request_error",
        "param": None,
        "code": None,
    }


def test_what_a_caller_sent_is_quoted_up_to_a_length():
    error = errors.invalid_request("bad role: " + "x" * 1_000_000, "y" * 1_000_000)
    assert (len(error.message), error.message[:12], error.message[-4:]) == (errors.MAX_MESSAGE, "bad role: xx", "x...")
    assert error.param is not None
    assert len(error.param) == errors.MAX_QUOTED


@pytest.mark.parametrize("kind", ["requests", "tokens"])
def test_a_rate_limit_says_which_allowance_ran_out(kind):
    assert ApiError(Fault.RATE_LIMIT_EXCEEDED, "slow down", limit_kind=kind).body()["error"]["type"] == kind


@pytest.mark.parametrize(
    ("wait", "seconds", "milliseconds"),
    [(0.0, "1", "1"), (0.0101, "1", "11"), (1.0, "1", "1000"), (11.9871, "12", "11988")],
)
def test_waits_are_rounded_up(wait, seconds, milliseconds):
    headers = errors.unavailable(Fault.QUEUE_TIMEOUT, "busy", wait).headers()
    assert headers == {"retry-after": seconds, "retry-after-ms": milliseconds}


def test_clients_are_told_not_to_retry_a_conflict():
    assert ApiError(Fault.ADAPTER_EXISTS, "loaded already").headers() == {"x-should-retry": "false"}
    assert ApiError(Fault.INVALID_REQUEST, "bad").headers() == {}


def test_an_error_is_an_exception_with_a_message_and_a_traceback():
    with pytest.raises(ApiError, match="1024 bytes") as caught:
        raise errors.request_too_large(1024)
    assert caught.value.__traceback__ is not None


def test_constructors_fill_in_what_clients_look_for():
    assert errors.unsupported_parameter("logit_bias").param == "logit_bias"
    too_long = errors.context_length_exceeded(9000, 8192).message
    assert too_long.startswith("This model's maximum context length is 8192 tokens")
    assert "9000" in too_long
    assert errors.method_not_allowed("GET", "/v1/completions", "POST").headers() == {"allow": "POST"}
    assert errors.invalid_api_key().headers() == {"www-authenticate": "Bearer"}
    assert errors.internal("req-1").message == "internal error; request id req-1"
