"""The networks that an operator lists, and the address that a request comes from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network


def parse_networks(texts: Iterable[str]) -> tuple[Network, ...]:
    """Return networks that are given as CIDR, such as 10.0.0.0/8, or as single addresses. Raises ValueError, which
    quotes the first that is neither."""
    return tuple(map(_network, texts))


def contains(networks: Sequence[Network], address: Address) -> bool:
    return any(address in network for network in networks)


def parse_address(text: str) -> Address | None:
    """Return an address, perhaps in brackets or with a port as some proxies write it, and an IPv4 address in IPv6's
    form as IPv4. None means that the text is no address."""
    text = text.strip().strip('"')
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        address = ip_address(text.partition("%")[0])
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def caller_address(peer: str, forwarded: str, proxies: Sequence[Network]) -> Address | None:
    """Return the address that a request comes from. None means that it is unknown, as over a Unix socket.

    It is the peer of the connection. If that is one of the operator's `proxies`, it is the last address in `forwarded`,
    the header X-Forwarded-For, that is no proxy's: what stands before it, the caller may have written itself.
    """
    address = parse_address(peer)
    for part in reversed(forwarded.split(",")):
        if address is None or not contains(proxies, address) or not part.strip():
            return address
        address = parse_address(part)
    return address


def _network(text: str) -> Network:
    try:
        return ip_network(text)
    except ValueError:
        raise ValueError(f"{text[:80]!r} is no network: write an address, or CIDR such as 10.0.0.0/8") from None
