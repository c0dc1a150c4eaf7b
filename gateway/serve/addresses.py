"""The ports of a gateway: everything at one pair, or administration at a pair of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gateway.config.tls import TlsConfig
from gateway.config.whole import Config
from gateway.core.part import Part
from gateway.tls import Certificate


@dataclass(frozen=True, slots=True)
class Address:
    """Where one port listens, and how."""

    host: str
    port: int
    """0: any free one."""
    tls: TlsConfig | None
    section: str
    """Of the configuration, for messages."""

    def certificate(self) -> Certificate | None:
        """Raises ConfigError."""
        return None if self.tls is None else Certificate(self.tls, f"{self.section}.tls")


@dataclass(frozen=True, slots=True)
class Front:
    """A port of each protocol, with the same part of the API."""

    part: Part
    http: Address
    grpc: Address


@dataclass(frozen=True, slots=True)
class Ports:
    """The numbers of one front's ports."""

    http: int
    grpc: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Listening:
    """What has its ports open."""

    ports: tuple[Ports, ...]
    """Of callers, and of administrators where they have their own."""

    @property
    def http_port(self) -> int:
        """For callers."""
        return self.ports[0].http

    @property
    def grpc_port(self) -> int:
        """For callers."""
        return self.ports[0].grpc


def fronts(config: Config) -> tuple[Front, ...]:
    """The first is for callers."""
    http = Address(config.http.host, config.http.port, config.http.tls, "http")
    grpc = Address(config.grpc.host, config.grpc.port, config.grpc.tls, "grpc")
    admin = config.admin
    if admin.port is None or admin.grpc_port is None:
        return (Front("all", http, grpc),)
    return (
        Front("public", http, grpc),
        Front(
            "admin",
            Address(admin.host, admin.port, admin.tls, "admin"),
            Address(admin.host, admin.grpc_port, admin.tls, "admin"),
        ),
    )


def with_ports(config: Config, ports: Sequence[Ports]) -> Config:
    """`config` with the ports that its fronts have got."""
    public, *rest = ports
    http, grpc = replace(config.http, port=public.http), replace(config.grpc, port=public.grpc)
    admin = replace(config.admin, port=rest[0].http, grpc_port=rest[0].grpc) if rest else config.admin
    return replace(config, http=http, grpc=grpc, admin=admin)
