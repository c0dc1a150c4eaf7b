"""One JSON line a request: who, what, how long, how it ended. Never a prompt, never a key."""

from __future__ import annotations

import sys
from typing import Any, TextIO

import structlog

from engine.core.types import Lane
from gateway.core.errors import ApiError
from gateway.core.lanes import lane_name
from gateway.generation import RequestRecord


class RequestLog:
    """An `Observer` that writes to a stream of its own."""

    def __init__(self, stream: TextIO | None = None) -> None:
        """`stream`: standard output unless given."""
        processors: list[Any] = [
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.JSONRenderer(),
        ]
        self._log: Any = structlog.wrap_logger(structlog.WriteLogger(stream or sys.stdout), processors=processors)

    def inter_token(self, lane: Lane, seconds: float) -> None:
        """Not for the log."""

    def finished(self, record: RequestRecord) -> None:
        self._log.msg("request", **describe(record))

    def refused(self, request_id: str, where: str, error: ApiError) -> None:
        """For requests turned away before anybody knew what they want: a bad key, a bad body."""
        self._log.msg("refused", request_id=request_id, where=where, status=error.http_status, error=error.code)


def describe(record: RequestRecord) -> dict[str, Any]:
    return {
        "id": record.id,
        "request_id": record.request_id,
        "tenant": record.tenant,
        "key": record.key_id,
        "model": record.model,
        "adapter": record.adapter,
        "adapter_version": record.adapter_version or None,
        "lane_asked": None if record.lane_asked is None else lane_name(record.lane_asked),
        "lane": lane_name(record.lane),
        "queue_ms": _ms(record.queue_seconds),
        "ttft_ms": _ms(record.ttft_seconds),
        "tpot_ms": _ms(record.tpot_seconds),
        "duration_ms": _ms(record.duration_seconds),
        "device_ms": _ms(record.device_seconds),
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.usage.cached,
        "completion_tokens": record.completion_tokens,
        "reserved_tokens": record.reserved_tokens,
        "actual_tokens": 0 if record.refund else record.used_tokens,
        "finish": record.finish,
        "status": record.status,
        "error": record.error_code or None,
        **({"refused_by": dict(record.error_metadata)} if record.error_metadata else {}),
        **({"shadowed": [f"{scope}:{limit}" for scope, limit in record.shadowed]} if record.shadowed else {}),
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)
