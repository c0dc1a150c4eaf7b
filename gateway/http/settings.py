"""What the operator can set of one HTTP port, and limits that hold at every port."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from gateway.core.part import ApiSurface

MAX_BODY_BYTES = 8 * 2**20
MAX_CONTROL_BYTES = 512 * 1024
"""Maximum size of a body that asks for a batch or administers something. Such bodies are parsed on the event loop,
which takes 15 ms at worst; one that names 10,000 tenants has 200 kB."""
PING_SECONDS = 10.0

MetricsAccess = bool | Literal["no_tenants"]


@dataclass(frozen=True, slots=True)
class GrpcAddress:
    """The gRPC port that is served alongside an HTTP port."""

    port: int
    tls: bool


GrpcAddressOf = Callable[[], GrpcAddress | None]
"""Function that returns the gRPC address. None means that gRPC is not served, or not yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PortSettings:
    """The settings of one HTTP port."""

    surface: ApiSurface = "all"
    """The part of the API that the port serves: all, public (all but administration) or admin."""
    max_body_bytes: int = MAX_BODY_BYTES
    """Maximum size of a request body, except for file uploads."""
    ping_seconds: float = PING_SECONDS
    """Interval of the pings in an event stream."""
    metrics_keys: Collection[str] = ()
    """SHA-256 of the keys that may read /metrics, besides administrators' keys."""
    open_metrics: MetricsAccess = False
    """What a request without a key may read of /metrics: everything (True: keys are not checked at all), nothing
    (False), or all but tenants' metrics ("no_tenants")."""
    cors_origins: Sequence[str] = ()
    """Origins whose pages may call everything but administration."""
    grpc: GrpcAddressOf = lambda: None
    """Returns the address of the gRPC server, for `GET /`."""

    @property
    def max_control_bytes(self) -> int:
        """Return the maximum size of a body that asks for a batch or administers something."""
        return min(self.max_body_bytes, MAX_CONTROL_BYTES)
