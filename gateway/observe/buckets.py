"""Histograms of an engine as Prometheus has them."""

from __future__ import annotations

from itertools import accumulate

from prometheus_client.utils import floatToGoString

from engine.pb import engine_pb2 as pb


def spread(buckets: pb.Buckets) -> tuple[list[tuple[str, float]], float]:
    """Return an engine's histogram as `add_metric` takes it: pairs of upper bound and cumulative count, and the sum of
    the observed values."""
    bounds = [*map(floatToGoString, buckets.bounds), "+Inf"]
    return list(zip(bounds, accumulate(buckets.counts or [0]), strict=True)), buckets.sum
