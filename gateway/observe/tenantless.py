"""Removes tenants from metrics, for readers that are not allowed to see them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from prometheus_client.core import Metric

TENANT = "tenant"


def without_tenants(families: Iterable[Metric]) -> Iterator[Metric]:
    """Drop the label `tenant`. Counters and histograms are summed over tenants; gauges by tenant are left out."""
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
