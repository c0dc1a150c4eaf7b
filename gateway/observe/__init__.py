"""Observability of requests, the engine and the event loop: metrics, logs and traces (docs/observability.md)."""
