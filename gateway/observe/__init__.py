"""Who watches requests, the engine and the event loop: metrics, log, traces (docs/observability.md)."""
