"""OpenTelemetry traces: one span per request with child spans for its phases, made from its record after it has ended.

Tracing does nothing while a request runs, and a thread exports the spans. The module needs the extra `otel`, so that it
is imported only if the configuration names a collector.
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

from engine.core.messages.requests import Lane
from gateway.core.lanes import lane_name
from gateway.core.trace_context import TraceContext
from gateway.observe.request_log import clip_name
from gateway.requests.progress import RequestTimes
from gateway.requests.record import RequestRecord

EXPORT_SECONDS = 2.0
"""Timeout in seconds of one export with its retries. Closing exports the remaining spans, in four exports at most."""

OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    **dict.fromkeys(("/v1/embeddings", "/v1/rerank", "/rerank", "/v2/rerank", "/v1/score", "/score"), "embeddings"),
}
"""HTTP route -> operation name of the GenAI conventions. gRPC methods take both chats and texts and are not listed."""

Attribute = str | int | float | tuple[str, ...]


class Tracing:
    """An `Observer` that makes the spans of sampled requests at their end and writes the trace id to the request
    record."""

    def __init__(
        self,
        processor: SpanProcessor,
        ratio: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """`processor`, such as `collector`, receives the ended spans. `ratio` is the share (0 to 1) of traces to sample
        that begin here; for other traces, the caller has decided. `clock` returns seconds on the clock of the records'
        times, `wall_ns` nanoseconds since 1970."""
        resource = Resource.create({"service.name": "loralane", "service.version": version("loralane")})
        sampler = ParentBased(TraceIdRatioBased(ratio))
        self._provider = TracerProvider(sampler=sampler, resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("loralane")
        self._clock = clock
        self._wall_ns = wall_ns

    def inter_token(self, base_model: str, lane: Lane, seconds: float) -> None:
        """Do nothing: traces have no spans for single tokens."""

    def finished(self, record: RequestRecord) -> None:
        offset = self._wall_ns() - round(self._clock() * 1e9)
        span = self._tracer.start_span(
            _name(record),
            context=_context(record.ingress.trace),
            kind=SpanKind.SERVER,
            start_time=_ns(record.times.started, offset),
        )
        if not span.is_recording():
            return
        record.trace_id = format_trace_id(span.get_span_context().trace_id)
        span.set_attributes(dict(_attributes(record)))
        if record.outcome.status >= 500:
            span.set_status(Status(StatusCode.ERROR, record.outcome.error_code))
        self._phases(record.times, set_span_in_context(span), offset)
        span.end(None if record.times.ended is None else _ns(record.times.ended, offset))

    async def close(self) -> None:
        """Export the remaining spans in a thread and wait for it."""
        await asyncio.to_thread(self._provider.shutdown)

    def _phases(self, times: RequestTimes, context: Context, offset: int) -> None:
        self._phase("limiter.reserve", times.reserving, times.reserved, context, offset)
        waiting = self._phase("queue", times.submitted, times.admitted, context, offset)
        if times.submitted is not None and times.adapter_wait and waiting is not None:
            self._phase("adapter.load", times.submitted, times.submitted + times.adapter_wait, waiting, offset)
        self._phase("prefill", times.admitted, times.first_token, context, offset)
        self._phase("decode", times.first_token, times.last_token, context, offset)

    def _phase(
        self, name: str, start: float | None, end: float | None, context: Context, offset: int
    ) -> Context | None:
        """Add the span of a phase, if the request finished it: `start` and `end` are seconds on the records' clock,
        `offset` what to add to them in nanoseconds for Unix time. Returns the context for the span's children, or None
        without a span."""
        if start is None or end is None:
            return None
        span = self._tracer.start_span(name, context=context, start_time=_ns(start, offset))
        span.end(_ns(end, offset))
        return set_span_in_context(span)


def collector(endpoint: str) -> SpanProcessor:
    """Return a processor that sends batches of spans from a thread to the OTLP/HTTP collector with the base URL
    `endpoint`, such as http://127.0.0.1:4318. Spans that the collector does not accept are dropped."""
    return BatchSpanProcessor(OTLPSpanExporter(f"{endpoint.rstrip('/')}/v1/traces", timeout=EXPORT_SECONDS))


def _name(record: RequestRecord) -> str:
    """Return the name of a request's span: the operation and, if the request used an adapter that exists, the adapter's
    name. So there are few different span names."""
    return f"{_operation(record)} {record.served.adapter}" if record.served.adapter else _operation(record)


def _operation(record: RequestRecord) -> str:
    return OPERATIONS.get(record.ingress.route, "generate_content")


def _attributes(record: RequestRecord) -> Iterator[tuple[str, Attribute]]:
    """Yield the known attributes of a request as (name, value). They never contain its text or its key."""
    known: dict[str, Attribute | None] = {
        **_called(record),
        "gen_ai.operation.name": _operation(record),
        "gen_ai.provider.name": "loralane",
        "gen_ai.request.model": clip_name(record.asked.model),
        "gen_ai.response.id": record.id,
        "gen_ai.usage.input_tokens": record.work.prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": record.work.usage.cached,
        "gen_ai.usage.output_tokens": record.work.completion_tokens,
        "gen_ai.response.finish_reasons": (record.outcome.finish,) if record.outcome.status == 200 else None,
        "error.type": record.outcome.error_code,
        "loralane.request_id": record.request_id,
        "loralane.tenant": record.caller.tenant,
        "loralane.lane": None if record.lane is None else lane_name(record.lane),
        "loralane.adapter.name": record.served.adapter,
        "loralane.adapter.version": record.served.adapter_hash,
        "loralane.reserved_tokens": record.bill.reserved_tokens,
        "loralane.refused_by": record.outcome.error_metadata.get("scope"),
    }
    return ((name, value) for name, value in known.items() if value not in (None, ""))


def _called(record: RequestRecord) -> dict[str, Attribute | None]:
    route = record.ingress.route
    if "." in route:  # the full name of a gRPC service has a package
        return {"rpc.system.name": "grpc", "rpc.method": route.removeprefix("/")}
    return {"http.request.method": "POST", "http.route": route, "http.response.status_code": record.outcome.status}


def _context(trace: TraceContext | None) -> Context:
    """Return the parent context of a request's span: that of the caller's span, or an empty one if `trace` is None."""
    if trace is None:
        return Context()
    flags = TraceFlags(TraceFlags.SAMPLED if trace.sampled else TraceFlags.DEFAULT)
    caller = SpanContext(int(trace.trace_id, 16), int(trace.span_id, 16), is_remote=True, trace_flags=flags)
    return set_span_in_context(NonRecordingSpan(caller), Context())


def _ns(seconds: float, offset: int) -> int:
    return round(seconds * 1e9) + offset
