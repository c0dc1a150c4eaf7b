"""Names of lanes: OpenAI's service tiers over HTTP, the lanes' own names elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from engine.core.messages.requests import Lane
from gateway.core.errors import invalid_request

LaneName = Literal["interactive", "batch"]
LANE_NAMES: Mapping[Lane, LaneName] = MappingProxyType({Lane.INTERACTIVE: "interactive", Lane.BATCH: "batch"})

LANE_OF_TIER: Mapping[str | None, Lane | None] = MappingProxyType(
    {"priority": Lane.INTERACTIVE, "flex": Lane.BATCH, "auto": None, "default": None, "scale": None, None: None}
)

TIER_OF_LANE: Mapping[Lane, str] = MappingProxyType({Lane.INTERACTIVE: "priority", Lane.BATCH: "flex"})

DEFAULT_TIER = "default"
"""Value of `service_tier` in an answer whose request asked for no lane."""


def answer_tier(asked: Lane | None, effective: Lane) -> str:
    """Return the value of an answer's `service_tier`: DEFAULT_TIER if the request asked for no lane (`asked` is None),
    otherwise the tier of `effective`, the lane that served the request."""
    return DEFAULT_TIER if asked is None else TIER_OF_LANE[effective]


def requested_lane(service_tier: str | None) -> Lane | None:
    """Return the lane that a request's `service_tier` asks for. None, for the tiers auto, default and scale and for no
    tier, means the tenant's default lane. Raises ApiError: INVALID_REQUEST, for an unknown tier."""
    if service_tier not in LANE_OF_TIER:
        names, asked = ", ".join(sorted(tier for tier in LANE_OF_TIER if tier)), str(service_tier)[:80]
        raise invalid_request(f"service_tier must be one of {names}, not {asked!r}", "service_tier", "invalid_value")
    return LANE_OF_TIER[service_tier]


def lane_name(lane: Lane) -> LaneName:
    """Return the lane's name as it appears in answers, headers, metrics and logs."""
    return LANE_NAMES[lane]
