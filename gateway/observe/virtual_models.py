"""Prometheus metrics of virtual models: which members answer, what they compute, and what that costs."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter

from gateway.requests.route_outcome import RouteOutcome

NAME = "virtual_model"


class VirtualModelMetrics:
    """Counts the outcomes of requests for virtual models."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, help: str, *labels: str) -> Counter:
            return Counter(f"loralane_virtual_model_{name}", help, [NAME, *labels], registry=registry)

        self._requests = counter(
            "requests", "Requests for virtual models and copies for shadows, by answering member.", "member", "reason"
        )
        self._tokens = counter(
            "tokens", "Tokens that members computed, also for discarded answers and copies.", "member", "direction"
        )
        self._cost = counter(
            "cost",
            "Price of all members' tokens, and of the answers if the dearest member gave them all.",
            "kind",
        )

    def routed(self, outcome: RouteOutcome) -> None:
        self._requests.labels(outcome.model, outcome.member, outcome.reason).inc()
        for run in outcome.runs:
            self._tokens.labels(outcome.model, run.member, "prompt").inc(run.prompt)
            self._tokens.labels(outcome.model, run.member, "completion").inc(run.completion)
        if outcome.costs is not None:
            self._cost.labels(outcome.model, "actual").inc(float(outcome.costs.actual))
            self._cost.labels(outcome.model, "dearest").inc(float(outcome.costs.dearest))
