"""Request log: tenant, model, times, tokens and outcome, one line per request. It has no prompts and no API keys."""

from __future__ import annotations

import sys
from datetime import datetime
from typing import Any, TextIO

import structlog

from engine.core.messages.requests import Lane
from engine.process.lossy_log import LossyStream, lossy_loggers
from gateway.core.lanes import lane_name
from gateway.requests.record import RequestRecord

LONGEST_NAME = 200
"""Maximum length, in characters, of a model name in logs and spans."""


class RequestLog:
    """An `Observer` that queues a line for each ended request to a stream: JSON or, on a terminal, a short readable
    line."""

    def __init__(self, stream: TextIO | None = None) -> None:
        """`stream`: None means standard output."""
        stream = stream or sys.stdout
        self._terminal = LossyStream(stream) if stream.isatty() else None
        processors: list[Any] = [
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.JSONRenderer(),
        ]
        # The wrapper that a program configures may drop these lines, as that of `loralane plan --measure` does.
        self._log: Any = structlog.wrap_logger(
            lossy_loggers(stream)(), processors=processors, wrapper_class=structlog.BoundLogger, context_class=dict
        )

    def inter_token(self, base_model: str, lane: Lane, seconds: float) -> None:
        """Do nothing: the log has no line for single tokens."""

    def finished(self, record: RequestRecord) -> None:
        if self._terminal is None:
            self._log.msg("request", **log_fields(record))
        else:
            self._terminal.write(access_line(record, datetime.now()) + "\n")


def access_line(record: RequestRecord, now: datetime) -> str:
    """Return the line about an ended request for an operator's terminal, about 80 columns wide. `now` is local time."""
    times = [("first token", record.times.ttft_seconds), ("in all", record.times.duration_seconds)]
    parts = [
        f"{now:%H:%M:%S} {record.status}",
        record.tenant or "-",
        printable(clip_name(record.model)) or "-",
        f"{record.prompt_tokens:,} + {record.completion_tokens:,} tokens",
        *(f"{name} {seconds:.2f} s" for name, seconds in times if seconds is not None),
        record.error_code or record.finish,
    ]
    return "  ".join(parts)


def printable(text: str) -> str:
    """Return a caller's text with `?` for each unprintable character, such as escapes and line ends."""
    return "".join(character if character.isprintable() else "?" for character in text)


def log_fields(record: RequestRecord) -> dict[str, Any]:
    """Return the fields of a request's JSON log line. All fields are always present; None means unknown or never
    reached."""
    accepted, proposed = record.proposed()
    return {
        "id": record.id,
        "request_id": record.request_id,
        "trace_id": record.trace_id or None,
        "route": record.ingress.route or None,
        "tenant": record.tenant or None,
        "key": record.key_id or None,
        "model": clip_name(record.model) or None,
        "member": record.member or None,
        "member_reason": record.member_reason or None,
        "adapter": record.adapter,
        "adapter_version": record.adapter_hash or None,
        "lane_asked": _lane(record.lane_asked),
        "lane": _lane(record.lane),
        "limiter_ms": _ms(record.times.reserve_seconds),
        "queue_ms": _ms(record.times.queue_seconds),
        "ttft_ms": _ms(record.times.ttft_seconds),
        "tpot_ms": _ms(record.tpot_seconds),
        "duration_ms": _ms(record.times.duration_seconds),
        "device_ms": _ms(record.device_seconds),
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.usage.cached,
        "completion_tokens": record.completion_tokens,
        "proposed_tokens": proposed,
        "accepted_tokens": accepted,
        "reserved_tokens": record.reserved_tokens,
        "actual_tokens": record.used_tokens,
        "engine": record.engine or None,
        "engine_reason": record.routes[-1] if record.routes else None,
        "engine_moves": len(record.moves),
        "finish": record.finish,
        "status": record.status,
        "error": record.error_code or None,
        "refused_by": dict(record.error_metadata) or None,
        "shadowed": [f"{scope}:{limit}" for scope, limit in record.shadowed] or None,
    }


def clip_name(name: str) -> str:
    """Return a name cut to LONGEST_NAME characters and `...`, as callers can send any. No served name is longer."""
    return name if len(name) <= LONGEST_NAME else name[:LONGEST_NAME] + "..."


def _lane(lane: Lane | None) -> str | None:
    return None if lane is None else lane_name(lane)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)
