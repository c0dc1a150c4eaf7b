"""Gateways: what operators get of each gateway process that shares one Redis, and the operations."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

from gateway.api_schema.common import INVALID
from gateway.api_schema.operation import Operation, admin
from gateway.core.administrators import AdminRole
from gateway.core.errors import Fault

GATEWAYS = "/admin/v1/gateways"


class GatewayOverview(Struct, frozen=True):
    """One gateway process, as it last told of itself, at most a few seconds ago."""

    id: str
    address: str
    """URL of its HTTP port. Gateways of one `serve --gateways N` share it."""
    version: str
    state: Literal["serving", "draining"]
    requests: int
    """Requests of tenants in progress."""
    since: float
    """Unix time at which it began to serve or, while it drains, to drain."""


class GatewayOverviews(Struct):
    gateways: list[GatewayOverview]


KNOWN = INVALID | {Fault.REGISTRY_UNAVAILABLE}
STOP = {"type": "boolean", "default": False, "description": "End the process, too, once nothing runs on it any more."}

LIST = admin("GET", GATEWAYS, "List the gateways that share one Redis.", GatewayOverviews, KNOWN)
DRAIN = admin(
    "POST",
    GATEWAYS + "/{gateway}/drain",
    "Drain a gateway: it is not ready, hands its batches over, and gets no new requests.",
    GatewayOverview,
    KNOWN,
    query={"stop": STOP},
    role=AdminRole.OPERATOR,
)

OPERATIONS: tuple[Operation[Any], ...] = (LIST, DRAIN)
