"""Checks of URLs and addresses that a caller named, before the gateway sends a request there.

A server that fetches URLs for its callers can be made to talk to its own network (server-side request forgery), such as
a cloud's metadata service, which returns the machine's credentials. A host may resolve to any address, and to another
one next time. Therefore this module checks the URL and every address that its host resolves to, and the code that
connects (`gateway.batches.webhooks.network`) uses a checked address.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from urllib.parse import SplitResult, urlsplit

Address = IPv4Address | IPv6Address

MAX_URL_CHARS = 2048
AUTHORITY = re.compile(
    r"(?:\[(?P<address>[0-9a-f:.]+)\]|(?P<name>[a-z0-9_][a-z0-9_.-]{0,252}))(?::(?P<port>[0-9]{1,5}))?"
)
"""The host and port of a URL without a user, in lower case. URL parsers are not relied on for this part."""
UNFIT = re.compile(r"[^\x21-\x7e]|[\\\"<>^`{|}]")
"""Characters that are not valid in a URL, or that parsers treat differently."""
NO_PLACE = "the URL's host must be a name of letters, digits, '-' and '.', or an address; its port from 1 to 65535"
MAX_PORT = 65_535
DEFAULT_PORTS = {"https": 443, "http": 80}

INNER = tuple(
    ip_network(text)
    for text in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "127.0.0.0/8", "::1/128", "fc00::/7")
)
"""Networks that are allowed only with `inner`: loopback, which is this machine, and private networks."""
METADATA = frozenset(map(ip_address, ("169.254.169.254", "168.63.129.16", "100.100.100.200", "fd00:ec2::254")))
"""Addresses of cloud metadata services, which return a machine's secrets. Two of them lie in ranges that are otherwise
ordinary addresses."""
UNICAST6 = ip_network("2000::/3")
TUNNELS6 = (ip_network("2001::/32"), ip_network("2002::/16"))
"""Teredo and 6to4. Both are obsolete, and their addresses embed an IPv4 address that a relay may unpack."""
RELAYS4 = ip_network("192.88.99.0/24")
NAT64 = ip_network("64:ff9b::/96")
"""Prefix under which IPv6-only networks map IPv4 addresses."""


class UnsafeUrl(ValueError):
    """A URL or an address that requests must not go to.

    The message gives the reason and includes at most the host of the URL, because the rest may be secret.
    """


@dataclass(frozen=True, slots=True)
class SafeUrl:
    """The parts of a checked http or https URL, so that no other code parses it again with a different result."""

    scheme: str
    host: str
    """Host name in lower case, or an address; an IPv6 address has no brackets."""
    port: int
    target: str
    """Path and query."""

    @property
    def authority(self) -> str:
        """Value of the Host header: the host and, unless it is the default of the scheme, the port."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == DEFAULT_PORTS[self.scheme] else f"{host}:{self.port}"


def parse_url(text: str, *, plain: bool = False) -> SafeUrl:
    """Parse a URL and check its syntax, but not the address of its host. `plain` allows http:// besides https://.
    Raises UnsafeUrl if the URL is malformed, too long, of another scheme, or has a user, a password or a fragment."""
    if len(text) > MAX_URL_CHARS or UNFIT.search(text):
        raise UnsafeUrl(f"a URL has at most {MAX_URL_CHARS} characters, and no spaces or backslashes")
    try:
        parts = urlsplit(text)
    except ValueError:
        raise UnsafeUrl(NO_PLACE) from None
    if parts.scheme != "https" and not (plain and parts.scheme == "http"):
        raise UnsafeUrl(f"the URL must begin with https://{' or http://' if plain else ''}")
    if "@" in parts.netloc or parts.fragment:
        raise UnsafeUrl("a URL has no user, password or fragment here")
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return SafeUrl(parts.scheme, *_place(parts), target)


def check_addresses(host: str, found: Sequence[str], *, inner: bool = False) -> list[Address]:
    """Parse and return the addresses that a host was resolved to, if requests may go to every one of them.

    A single address that is not allowed is enough to refuse the host, because no honest host has such a mixture.

    Args:
        host: name of the host, for error messages.
        found: the resolved addresses, as text.
        inner: also allow this machine and private networks.

    Raises:
        UnsafeUrl: the host has no address, or an address is malformed or not allowed.
    """
    addresses = []
    for text in found:
        address = _parsed(host, text)
        if not is_fit(address, inner=inner):
            raise UnsafeUrl(f"{host} is at {address}, where requests may not go")
        addresses.append(address)
    if not addresses:
        raise UnsafeUrl(f"{host} has no address")
    return addresses


def is_fit(address: Address, *, inner: bool = False) -> bool:
    """Return whether requests may go to an address: a public one or, with `inner`, this machine or a private network.
    Addresses of cloud metadata services are never allowed. IPv4 addresses embedded in IPv6 are checked as IPv4."""
    address = _unwrapped(address)
    if address in METADATA:
        return False
    return (inner and any(address in network for network in INNER)) or _is_public(address)


def is_address(host: str) -> bool:
    """Return whether a host is an IP address rather than a name."""
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def _is_public(address: Address) -> bool:
    if not address.is_global or address.is_multicast or address.is_reserved or address.is_unspecified:
        return False
    if isinstance(address, IPv4Address):
        return address not in RELAYS4
    return address in UNICAST6 and not any(address in tunnel for tunnel in TUNNELS6)


def _unwrapped(address: Address) -> Address:
    """Return the IPv4 address embedded in an IPv4-mapped or NAT64 address; any other address is returned unchanged."""
    if isinstance(address, IPv6Address):
        if address.ipv4_mapped is not None:
            return address.ipv4_mapped
        if address in NAT64:
            return IPv4Address(int(address) & 0xFFFFFFFF)
    return address


def _parsed(host: str, text: str) -> Address:
    if "%" in text:
        raise UnsafeUrl(f"{host} is at {text}, which only this network knows")
    try:
        return ip_address(text)
    except ValueError:
        raise UnsafeUrl(f"{host} is at {text!r}, which is no address") from None


def _place(parts: SplitResult) -> tuple[str, int]:
    """Return a URL's host, in lower case, and port, by default that of its scheme. Raises UnsafeUrl for invalid
    ones."""
    found = AUTHORITY.fullmatch(parts.netloc.lower())
    port = int(found["port"] or DEFAULT_PORTS[parts.scheme]) if found else 0
    if not found or not 0 < port <= MAX_PORT:
        raise UnsafeUrl(NO_PLACE)
    return found["name"] or str(_parsed("the URL", found["address"])), port


ANY = "*"
LOOPBACK = ("http://localhost:*", "http://127.0.0.1:*", "http://[::1]:*")
"""Origin patterns of pages that are served by the caller's own machine, on any port."""
ORIGIN = re.compile(r"https?://(?P<host>[a-z0-9]([a-z0-9.-]*[a-z0-9])?|\[[0-9a-f:]+\])(:(?P<port>\d{1,5}|\*))?")


def check_origin(value: str) -> None:
    """Check one configured CORS origin. Raises ValueError if it is neither `*` nor an origin in the form that browsers
    send, in which the port may be `*`."""
    if value != ANY and not ORIGIN.fullmatch(value):
        raise ValueError(
            f"cors_origins must hold origins such as https://chat.example.com or http://localhost:*, in lower case and "
            f"without a path, or * alone, not {value!r}"
        )


def check_origins(values: Sequence[str]) -> None:
    """Check the configured CORS origins. Raises ValueError if one is not valid, or `*` stands beside others."""
    for value in values:
        check_origin(value)
    if ANY in values and len(values) > 1:
        raise ValueError("cors_origins holds * and other origins: * allows all of them, so leave the others out")


def origin_pattern(values: Sequence[str]) -> str:
    """Return a regular expression whose full match is one of the allowed origins. A port of `*` matches any port or
    none. `*` alone is not a wildcard here: the caller must handle it."""
    return "|".join(_pattern(value) for value in values)


def _pattern(value: str) -> str:
    bare = value.removesuffix(":*")
    return re.escape(value) if bare == value else re.escape(bare) + r"(?::\d{1,5})?"
