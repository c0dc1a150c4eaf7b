"""Prometheus metrics of the limiter's decisions."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

from gateway.observe.tenant_labels import TenantLabels
from gateway.requests.record import RequestRecord

CALL = (0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25)
"""Bounds of the histogram of the limiter's times, in seconds."""
DECISIONS = ("admitted", "rate_limit_exceeded", "insufficient_quota", "limiter_unavailable")


class LimiterMetrics:
    """Counts what the limiter decided about requests that have ended, and how long it took."""

    def __init__(self, tenants: TenantLabels, registry: CollectorRegistry) -> None:
        def counter(name: str, help: str, *labels: str) -> Counter:
            return Counter(f"loralane_limiter_{name}", help, labels, registry=registry)

        self._tenants = tenants
        self._decisions = counter("decisions", "Reservations requested of the limiter, by decision.", "decision")
        for decision in DECISIONS:
            self._decisions.labels(decision)
        self._refusals = counter(
            "refusals",
            "Requests refused by a limit, counted at the scope with the least headroom.",
            *("tenant", "scope", "limit"),
        )
        self._shadowed = counter(
            "shadow_refusals", "Requests admitted that a shadow limit would have refused.", "scope", "limit"
        )
        self._reserve = Histogram(
            "loralane_limiter_reserve_seconds", "Time the limiter takes to decide.", buckets=CALL, registry=registry
        )

    def finished(self, record: RequestRecord) -> None:
        if record.times.reserve_seconds is not None:
            self._reserve.observe(record.times.reserve_seconds)
        for scope, limit in record.bill.shadowed:
            self._shadowed.labels(scope, limit).inc()
        if record.times.reserving is None:
            return
        if record.times.submitted is not None:
            self._decisions.labels("admitted").inc()
        elif record.outcome.error_code in DECISIONS:
            self._decisions.labels(record.outcome.error_code).inc()
            self._count_refusal(record)

    def _count_refusal(self, record: RequestRecord) -> None:
        details = record.outcome.error_metadata
        if "limit" in details:
            kind, tenant = details["scope"].partition(":")[0], self._tenants.label(record.caller.tenant)
            self._refusals.labels(tenant, kind, details["limit"]).inc()
