"""Puts together what a gateway needs for its virtual models."""

from __future__ import annotations

from collections.abc import Mapping

from engine.core.messages.requests import Lane
from gateway.config.routes import home_of
from gateway.config.whole import Config
from gateway.engines.pool import EnginePool
from gateway.observe.metrics import Metrics
from gateway.requests.route_runner import RouteTable
from gateway.requests.upstreams import Upstream
from gateway.virtual_models.policy import MemberState


def route_table(
    config: Config, engines: Mapping[str, EnginePool], upstreams: Mapping[str, Upstream], metrics: Metrics
) -> RouteTable | None:
    """Return the virtual models of the configuration; None means that there are none. `engines` are those of each base
    model. `metrics` counts the outcomes of requests for virtual models, and holds the lanes' current TTFT goals."""
    if not config.routes:
        return None

    def state(member: str) -> MemberState:
        home = home_of(member, config.served)
        assert home is not None, "members are checked, and upstreams have states of their own"
        goals = metrics.static.goals[home]
        return MemberState(engines[home].ready, engines[home].predicted_wait, goals[Lane.INTERACTIVE].ttft_s)

    return RouteTable(config.routes, state, upstreams, config.pricing, metrics.routed)
