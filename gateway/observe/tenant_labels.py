"""The label `tenant` of metrics: which tenants have one of their own, and metrics without it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from prometheus_client.core import Metric

TENANT = "tenant"
MAX_TENANTS = 100
"""Maximum number of tenants with a label of their own: those seen first. The others share `other`."""


class TenantLabels:
    """Gives the first MAX_TENANTS tenants labels of their own."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def label(self, name: str) -> str:
        if len(self._seen) < MAX_TENANTS:
            self._seen.add(name)
        return name if name in self._seen else "other"


def without_tenants(families: Iterable[Metric]) -> Iterator[Metric]:
    """Drop the label `tenant`: counters and histograms are summed over tenants, gauges by tenant are left out."""
    for family in families:
        if not any(TENANT in sample.labels for sample in family.samples):
            yield family
        elif family.type != "gauge":
            yield _summed(family)


def _summed(family: Metric) -> Metric:
    sums: defaultdict[tuple[str, tuple[tuple[str, str], ...]], float] = defaultdict(float)
    for sample in family.samples:
        labels = tuple((name, value) for name, value in sample.labels.items() if name != TENANT)
        sums[sample.name, labels] += sample.value
    total = Metric(family.name, family.documentation, family.type)
    for (name, labels), value in sums.items():
        total.add_sample(name, dict(labels), value)
    return total
