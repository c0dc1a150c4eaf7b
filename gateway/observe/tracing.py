"""OpenTelemetry traces: one span a request, with its phases as children, made from its record when it has ended.

Nothing is done while a request runs, and exporting is a thread's business. Needs the extra `otel`, so it is imported
only where the configuration names a collector.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    format_trace_id,
    set_span_in_context,
)

from engine.core.types import Lane
from gateway.core.lanes import lane_name
from gateway.core.trace_context import TraceContext
from gateway.observe.request_log import clipped
from gateway.request_record import RequestRecord

EXPORT_SECONDS = 2.0
"""What one export may take, with its retries. Closing waits for those of the spans that are left, four at most."""

OPERATIONS = {"/v1/chat/completions": "chat", "/v1/completions": "text_completion"}
"""As the GenAI conventions name them; gRPC's methods take chats and texts alike."""

Attribute = str | int | float | tuple[str, ...]


class Tracing:
    """An `Observer`: spans of sampled requests, and a trace id for records of those that began no caller's trace."""

    def __init__(
        self,
        processor: SpanProcessor,
        ratio: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """
        Args:
            ratio: share of traces that begin here and are sampled; for others the caller has decided.
            clock: what records' times are on, in seconds.
            wall_ns: nanoseconds since 1970.
        """
        resource = Resource.create({"service.name": "loralane", "service.version": version("loralane")})
        sampler = ParentBased(TraceIdRatioBased(ratio))
        self._provider = TracerProvider(sampler=sampler, resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("loralane")
        self._clock = clock
        self._wall_ns = wall_ns

    def inter_token(self, lane: Lane, seconds: float) -> None:
        """Not for traces."""

    def finished(self, record: RequestRecord) -> None:
        offset = self._wall_ns() - round(self._clock() * 1e9)
        span = self._tracer.start_span(
            _name(record),
            context=_context(record.ingress.trace),
            kind=SpanKind.SERVER,
            start_time=_ns(record.started, offset),
        )
        if not span.is_recording():
            return
        record.trace_id = format_trace_id(span.get_span_context().trace_id)
        span.set_attributes(dict(_attributes(record)))
        if record.status >= 500:
            span.set_status(Status(StatusCode.ERROR, record.error_code))
        self._phases(record, set_span_in_context(span), offset)
        span.end(None if record.ended is None else _ns(record.ended, offset))

    async def close(self) -> None:
        """Exports what is left."""
        await asyncio.to_thread(self._provider.shutdown)

    def _phases(self, record: RequestRecord, context: Context, offset: int) -> None:
        self._phase("limiter.reserve", record.reserving, record.reserved, context, offset)
        waiting = self._phase("queue", record.submitted, record.admitted, context, offset)
        if record.submitted is not None and record.adapter_wait and waiting is not None:
            self._phase("adapter.load", record.submitted, record.submitted + record.adapter_wait, waiting, offset)
        self._phase("prefill", record.admitted, record.first_token, context, offset)
        self._phase("decode", record.first_token, record.last_token, context, offset)

    def _phase(
        self, name: str, start: float | None, end: float | None, context: Context, offset: int
    ) -> Context | None:
        """Returns what a child of it would be in; None: the request never came to its end."""
        if start is None or end is None:
            return None
        span = self._tracer.start_span(name, context=context, start_time=_ns(start, offset))
        span.end(_ns(end, offset))
        return set_span_in_context(span)


def collector(endpoint: str) -> SpanProcessor:
    """Sends spans to an OTLP/HTTP collector, in batches and from a thread; what it does not take is dropped.

    Args:
        endpoint: its base URL, such as http://127.0.0.1:4318.
    """
    return BatchSpanProcessor(OTLPSpanExporter(f"{endpoint.rstrip('/')}/v1/traces", timeout=EXPORT_SECONDS))


def _name(record: RequestRecord) -> str:
    """Of low cardinality: an adapter's name only where there is such an adapter."""
    return f"{_operation(record)} {record.adapter}" if record.adapter else _operation(record)


def _operation(record: RequestRecord) -> str:
    return OPERATIONS.get(record.ingress.route, "generate_content")


def _attributes(record: RequestRecord) -> Iterator[tuple[str, Attribute]]:
    """What is known of a request. Never what was said in it, nor by which key."""
    known: dict[str, Attribute | None] = {
        **_called(record),
        "gen_ai.operation.name": _operation(record),
        "gen_ai.provider.name": "loralane",
        "gen_ai.request.model": clipped(record.model),
        "gen_ai.response.id": record.id,
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": record.usage.cached,
        "gen_ai.usage.output_tokens": record.completion_tokens,
        "gen_ai.response.finish_reasons": (record.finish,) if record.status == 200 else None,
        "error.type": record.error_code,
        "loralane.request_id": record.request_id,
        "loralane.tenant": record.tenant,
        "loralane.lane": None if record.lane is None else lane_name(record.lane),
        "loralane.adapter.name": record.adapter,
        "loralane.adapter.version": record.adapter_version,
        "loralane.reserved_tokens": record.reserved_tokens,
        "loralane.refused_by": record.error_metadata.get("scope"),
    }
    return ((name, value) for name, value in known.items() if value not in (None, ""))


def _called(record: RequestRecord) -> dict[str, Attribute | None]:
    route = record.ingress.route
    if "." in route:  # a gRPC service's full name has a package
        return {"rpc.system.name": "grpc", "rpc.method": route.removeprefix("/")}
    return {"http.request.method": "POST", "http.route": route, "http.response.status_code": record.status}


def _context(trace: TraceContext | None) -> Context:
    """What a request's span is in: the caller's, or nothing."""
    if trace is None:
        return Context()
    flags = TraceFlags(TraceFlags.SAMPLED if trace.sampled else TraceFlags.DEFAULT)
    caller = SpanContext(int(trace.trace_id, 16), int(trace.span_id, 16), is_remote=True, trace_flags=flags)
    return set_span_in_context(NonRecordingSpan(caller), Context())


def _ns(seconds: float, offset: int) -> int:
    return round(seconds * 1e9) + offset
