"""Ports of a gateway and their sockets: one pair of HTTP and gRPC ports, or two pairs, the second for
administration."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from gateway.config.certificates import Certificate
from gateway.config.sections import TlsConfig
from gateway.config.whole import Config
from gateway.core.part import ApiSurface
from gateway.serve.launch import StartError

SEND_BUFFER_BYTES = 256 * 2**10
"""Bytes of answers that the kernel keeps for a client that does not read them, which doubles this number for its own
bookkeeping. It would let the buffer grow to 4 MiB: 300 such clients without a key cost 1 GiB of memory that no figure
of the process shows, and copying as much kept all others waiting for a second. Over a way of 50 ms, 256 KiB still are
5 MB/s for each connection."""


@dataclass(frozen=True, slots=True)
class Address:
    """Host, port and TLS settings of one listening socket, and the configuration's `section` that they come from."""

    host: str
    port: int
    """0 means any free port."""
    tls: TlsConfig | None
    section: str
    """Section of the configuration that the address comes from, for error messages."""

    def certificate(self) -> Certificate | None:
        """Read the certificate's files; returns None if the port has no TLS. Raises ConfigError for unusable files."""
        return None if self.tls is None else Certificate(self.tls, f"{self.section}.tls")

    def url(self, port: int) -> str:
        """Return the URL at which other machines find the socket, which listens at `port`. A socket for all interfaces
        is named by this machine's name."""
        host = socket.gethostname() if self.host in ("0.0.0.0", "::", "") else self.host
        return f"{'https' if self.tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One HTTP port and one gRPC port that serve the same surface of the API: all, its public or its admin part."""

    surface: ApiSurface
    http: Address
    grpc: Address


@dataclass(frozen=True, slots=True)
class Ports:
    """The numbers of the open ports of one endpoint, never 0."""

    http: int
    grpc: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Listening:
    """Base of the objects that stand for a running gateway or fleet, whose ports are open."""

    ports: tuple[Ports, ...]
    """Ports of the public endpoint, followed by those of the admin endpoint if it has its own."""

    @property
    def http_port(self) -> int:
        """HTTP port of the public endpoint."""
        return self.ports[0].http

    @property
    def grpc_port(self) -> int:
        """gRPC port of the public endpoint."""
        return self.ports[0].grpc


def endpoints(config: Config) -> tuple[Endpoint, ...]:
    """Return the endpoints that a configuration asks for: one with the whole API or, if `config.admin` has ports, a
    public and an admin one."""
    http = Address(config.http.host, config.http.port, config.http.tls, "http")
    grpc = Address(config.grpc.host, config.grpc.port, config.grpc.tls, "grpc")
    admin = config.admin
    if admin.port is None or admin.grpc_port is None:
        return (Endpoint("all", http, grpc),)
    return (
        Endpoint("public", http, grpc),
        Endpoint(
            "admin",
            Address(admin.host, admin.port, admin.tls, "admin"),
            Address(admin.host, admin.grpc_port, admin.tls, "admin"),
        ),
    )


def with_ports(config: Config, ports: Sequence[Ports]) -> Config:
    """Return a copy of `config` with the port numbers `ports` in place of its own, which may be 0. `ports` are those of
    the public endpoint, followed by those of the admin endpoint if there is one."""
    public, *rest = ports
    http, grpc = replace(config.http, port=public.http), replace(config.grpc, port=public.grpc)
    admin = replace(config.admin, port=rest[0].http, grpc_port=rest[0].grpc) if rest else config.admin
    return replace(config, http=http, grpc=grpc, admin=admin)


@contextmanager
def reserve_port(host: str, port: int) -> Iterator[int]:
    """Bind a TCP port, without listening, until the block ends, for processes that will share it; yields its number, a
    free one for port 0. Raises StartError if it cannot be bound, as when another process has it.

    The port is bound without SO_REUSEPORT first, which fails if another server has it: two servers that both share a
    port would each silently get half of the other's connections.
    """
    with bind_socket(host, port) as probe:
        port = probe.getsockname()[1]
    with bind_socket(host, port, shared=True) as kept:
        yield kept.getsockname()[1]


def bind_socket(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """Return a TCP socket that is bound to a host (IPv4, IPv6 or a name) and port, and does not listen yet. `shared`
    sets SO_REUSEPORT. Raises StartError if the address cannot be bound."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)  # its connections inherit it
    if shared:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        what = "port" if error.errno in (errno.EADDRINUSE, errno.EACCES) else "host"
        raise StartError(f"cannot listen on {host}:{port}: {error.strerror}; use another {what}") from error
    return listener
