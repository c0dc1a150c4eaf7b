"""Prometheus metrics that requests do not change: the version, the base models and the goals of their lanes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.metadata import version

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.core.config import LaneGoals
from engine.core.messages.requests import Lane
from gateway.core.lanes import lane_name
from gateway.observe.engine_metrics import GOAL, by_model


class StaticMetrics(Collector):
    """Prometheus collector of the version, the base models and the `goals` of their lanes, which a reload replaces."""

    def __init__(self, goals: Mapping[str, Mapping[Lane, LaneGoals]]) -> None:
        """`goals` has the goals of the lanes by the name of the base model."""
        self.goals = goals

    def collect(self) -> Iterator[Metric]:
        yield from by_model({model: _static_metrics(goals) for model, goals in self.goals.items()})


def _static_metrics(goals: Mapping[Lane, LaneGoals]) -> Iterator[Metric]:
    """Yield the metrics of one base model that requests do not change: version and lane goals. `by_model` adds the
    label with the model's name."""
    build = GaugeMetricFamily(
        "loralane_build_info", "1; the version and the base model are labels.", labels=["version"]
    )
    build.add_metric([version("loralane")], 1)
    share = GaugeMetricFamily(
        "loralane_slo_target", "Share of tokens that should meet the lane's goal.", labels=["lane"]
    )
    seconds = GaugeMetricFamily("loralane_slo_goal_seconds", "Latency goal of a lane.", labels=GOAL)
    for lane, promised in goals.items():
        name = lane_name(lane)
        share.add_metric([name], promised.attainment)
        seconds.add_metric([name, "ttft"], promised.ttft_s)
        seconds.add_metric([name, "itl"], promised.itl_s)
    yield from (build, share, seconds)
