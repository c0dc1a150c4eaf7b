"""What operations of several kinds have in common: small answers, faults and query parameters."""

from __future__ import annotations

from msgspec import Struct

from gateway.core.errors import Fault


class Deleted(Struct):
    deleted: bool


INVALID = frozenset({Fault.INVALID_REQUEST})
ACCOUNTS = INVALID | {
    Fault.TENANT_NOT_FOUND,
    Fault.KEY_NOT_FOUND,
    Fault.TENANT_EXISTS,
    Fault.TENANT_CONFLICT,
    Fault.LIMITER_UNAVAILABLE,
    Fault.REGISTRY_UNAVAILABLE,
}
"""Errors of the operations on tenants, their keys and their limits."""
MODEL = frozenset({Fault.MODEL_NOT_FOUND})
GENERATION = MODEL | {
    Fault.CONTEXT_LENGTH_EXCEEDED,
    Fault.UNSUPPORTED_PARAMETER,
    Fault.RATE_LIMIT_EXCEEDED,
    Fault.INSUFFICIENT_QUOTA,
    Fault.LANE_QUEUE_FULL,
    Fault.QUEUE_TIMEOUT,
    Fault.PREEMPTED,
    Fault.CANCELLED,
    Fault.ADAPTER_UNAVAILABLE,
    Fault.LIMITER_UNAVAILABLE,
    Fault.ENGINE_UNAVAILABLE,
    Fault.UPSTREAM_UNAVAILABLE,
    Fault.DEADLINE_EXCEEDED,
}
"""Errors of every request for a generation."""
OF_TENANT = {"tenant": {"type": "string"}}
ONE_MODEL = {"model": {"type": "string", "description": "Name of a base model."}}
