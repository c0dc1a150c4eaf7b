"""Prometheus metrics of batches: their lines, tokens that no tenant pays for, and notices of their ends."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter

OUTCOMES = ("completed", "failed")
WEBHOOK_OUTCOMES = ("delivered", "failed", "given_up")


class BatchCounts:
    """Counts what this process does for batches."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._lines = Counter(
            "loralane_batch_lines", "Batch lines answered, by outcome.", ["outcome"], registry=registry
        )
        for outcome in OUTCOMES:
            self._lines.labels(outcome)
        self._wasted_tokens = Counter(
            "loralane_batch_wasted_tokens",
            "Tokens of runs of batch lines that no tenant is charged for: others count.",
            registry=registry,
        )
        self._webhooks = Counter(
            "loralane_webhook_tries", "Webhook deliveries tried, by outcome.", ["outcome"], registry=registry
        )
        for outcome in WEBHOOK_OUTCOMES:
            self._webhooks.labels(outcome)

    def line(self, outcome: str) -> None:
        """Count an answered line of a batch. `outcome` is one of OUTCOMES."""
        self._lines.labels(outcome).inc()

    def wasted_tokens(self, count: int) -> None:
        """Count tokens of runs of a batch's lines whose answers were dropped, because the lines run again."""
        self._wasted_tokens.inc(count)

    def webhook(self, outcome: str) -> None:
        """Count an attempt to deliver a webhook. `outcome` is one of WEBHOOK_OUTCOMES."""
        self._webhooks.labels(outcome).inc()
