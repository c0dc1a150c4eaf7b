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
    work, outcome = record.work, record.outcome
    parts = [
        f"{now:%H:%M:%S} {outcome.status}",
        record.caller.tenant or "-",
        printable(clip_name(record.asked.model)) or "-",
        f"{work.prompt_tokens:,} + {work.completion_tokens:,} tokens",
        *(f"{name} {seconds:.2f} s" for name, seconds in times if seconds is not None),
        outcome.error_code or outcome.finish,
    ]
    return "  ".join(parts)


def printable(text: str) -> str:
    """Return a caller's text with `?` for each unprintable character, such as escapes and line ends."""
    return "".join(character if character.isprintable() else "?" for character in text)


def log_fields(record: RequestRecord) -> dict[str, Any]:
    """Return the fields of a request's JSON log line. All fields are always present; None means unknown or never
    reached."""
    times, work, bill, engines, outcome = record.times, record.work, record.bill, record.engines, record.outcome
    accepted, proposed = work.proposed()
    return {
        "id": record.id,
        "request_id": record.request_id,
        "trace_id": record.trace_id or None,
        "route": record.ingress.route or None,
        "tenant": record.caller.tenant or None,
        "key": record.caller.key_id or None,
        "model": clip_name(record.asked.model) or None,
        "member": record.served.member or None,
        "member_reason": record.served.member_reason or None,
        "adapter": record.served.adapter,
        "adapter_version": record.served.adapter_hash or None,
        "lane_asked": _lane(record.asked.lane),
        "lane": _lane(record.lane),
        "limiter_ms": _ms(times.reserve_seconds),
        "queue_ms": _ms(times.queue_seconds),
        "ttft_ms": _ms(times.ttft_seconds),
        "tpot_ms": _ms(record.tpot_seconds),
        "duration_ms": _ms(times.duration_seconds),
        "device_ms": _ms(work.device_seconds),
        "prompt_tokens": work.prompt_tokens,
        "cached_tokens": work.usage.cached,
        "completion_tokens": work.completion_tokens,
        "proposed_tokens": proposed,
        "accepted_tokens": accepted,
        "reserved_tokens": bill.reserved_tokens,
        "actual_tokens": record.used_tokens,
        "engine": engines.last or None,
        "engine_reason": engines.routes[-1] if engines.routes else None,
        "engine_moves": len(engines.moves),
        "finish": outcome.finish,
        "status": outcome.status,
        "error": outcome.error_code or None,
        "refused_by": dict(outcome.error_metadata) or None,
        "shadowed": [f"{scope}:{limit}" for scope, limit in bill.shadowed] or None,
    }


def clip_name(name: str) -> str:
    """Return a name cut to LONGEST_NAME characters and `...`, as callers can send any. No served name is longer."""
    return name if len(name) <= LONGEST_NAME else name[:LONGEST_NAME] + "..."


def _lane(lane: Lane | None) -> str | None:
    return None if lane is None else lane_name(lane)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)
