"""Where an engine listens, and the TLS files with which a gateway and an engine on different machines identify
themselves. It imports nothing of gRPC, so that commands that only read a configuration start quickly."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from pathlib import Path

UNIX = "unix:"
AUTHORITY = re.compile(r"(?:\[(?P<address>[0-9A-Fa-f:.]+)\]|(?P<name>[A-Za-z0-9_.-]+)):(?P<port>[0-9]{1,5})")
MAX_PORT = 65_535


@dataclass(frozen=True, slots=True)
class EngineTls:
    """Paths of the PEM files for mutual TLS between gateways and engines. All three are required: an engine serves
    only gateways that show a certificate of its authority, and a gateway connects only to such engines."""

    ca: Path
    """Certificates of the authorities that the other side's certificate must come from."""
    certificate: Path
    """Certificate chain that this side shows: its own certificate first, then the intermediate ones."""
    key: Path
    """Private key of the first certificate in `certificate`, without a password."""
    server_name: str = ""
    """Name that the certificates of engines are made out to. Empty means the host of each engine's address, which does
    not fit engines that Ray or Kubernetes starts on a machine of its choice."""


@dataclass(frozen=True, slots=True)
class EngineTarget:
    """Address of one engine, and the files with which a gateway connects to it.

    Raises ValueError if the address is neither `unix:PATH` nor `HOST:PORT`, or if it can be reached from other machines
    and there are no TLS files.
    """

    address: str
    """`unix:/path/to/socket`, or `host:port`, where an IPv6 address is in brackets."""
    tls: EngineTls | None = None
    """None means a connection without TLS, which is allowed on a Unix socket and on loopback only. A Unix socket never
    uses TLS."""

    def __post_init__(self) -> None:
        check_address(self.address)
        if self.tls is None and not is_local(self.address):
            raise ValueError(f"the engine at {self.address} is not on this machine, so it needs tls")

    @property
    def is_secure(self) -> bool:
        """True if the connection uses TLS."""
        return self.tls is not None and not self.address.startswith(UNIX)


def check_address(address: str, *, any_port: bool = False) -> None:
    """Raise ValueError unless `address` is `unix:PATH` or `HOST:PORT`. Port 0, which lets the system choose one, is
    allowed with `any_port` only."""
    if address.startswith(UNIX) and address != UNIX:
        return
    found = AUTHORITY.fullmatch(address)
    if found is None:
        raise ValueError(f"an engine's address is like host:7001, or unix:/path/to/socket, not {address!r}")
    if not (0 if any_port else 1) <= int(found["port"]) <= MAX_PORT:
        raise ValueError(f"the port of {address} must be from 1 to {MAX_PORT}")


def kv_address(given: str, address: str) -> str:
    """Return the address at which other engines fetch KV pages from an engine.

    Args:
        given: the `kv_address` of its description. One without a host (`:PORT`) is on the host of `address`.
        address: where gateways reach the engine.
    """
    if not given.startswith(":"):
        return given
    return ("127.0.0.1" if address.startswith(UNIX) else address.rpartition(":")[0]) + given


def is_local(address: str) -> bool:
    """Return whether only this machine can reach an engine's `address`: a Unix socket, or a port of loopback."""
    return address.startswith(UNIX) or is_loopback(address.rpartition(":")[0].strip("[]"))


def is_loopback(host: str) -> bool:
    """Return whether `host`, a name or an IP address without brackets, is this machine's loopback interface."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
