"""Opens the observers that the configuration section `observability` asks for: traces and the request log."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from gateway.config.file import ConfigError
from gateway.config.sections import ObservabilityConfig
from gateway.observe.request_log import RequestLog
from gateway.requests.backend import Observer


@asynccontextmanager
async def open_observers(config: ObservabilityConfig) -> AsyncIterator[tuple[Observer, ...]]:
    """On enter, yield the observers that `config` asks for: traces, then the request log, which includes the ids of
    traces. On exit, export the remaining spans. Raises ConfigError if traces are configured without the extra `otel`
    installed."""
    log = (RequestLog(),) if config.request_log else ()
    if not config.traces.endpoint:
        yield log
        return
    try:
        from gateway.observe.tracing import Tracing, collector  # imported only if traces are configured
    except ImportError as error:
        raise ConfigError("observability.traces: needs pip install 'loralane[otel]'") from error
    tracing = Tracing(collector(config.traces.endpoint), config.traces.ratio)
    try:
        yield (tracing, *log)
    finally:
        await tracing.close()
