"""Addresses of Redis: one server, some nodes of a cluster, or some Sentinels that know which server is the primary."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

SENTINEL = "+sentinel"
SCHEMES = ("redis", "rediss", f"redis{SENTINEL}", f"rediss{SENTINEL}", "unix")
ESCAPED = "what a password has of /, ?, # and @ is written as %2F, %3F, %23 and %40"
DEFAULT_PORT, SENTINEL_PORT = 6379, 26379
_URL = re.compile(r"(?P<scheme>[a-z+]+)://(?:(?P<user>[^/?#]*)@)?(?P<hosts>[^/?#]*)(?P<path>[^?#]*)(?P<rest>.*)")


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """Where Redis is, as `redis.url` says it."""

    nodes: tuple[tuple[str, int], ...]
    """Host and port of the server, of nodes of the cluster, or of Sentinels. Empty for a Unix socket."""
    server: str
    """URL of one server, as redis-py understands it, with the user, the database and all options of the address. Its
    host is that of the first node."""
    service: str = ""
    """Name of the primary that the Sentinels watch. Empty means that the nodes are no Sentinels."""


def store_address(url: str) -> StoreAddress:
    """Parse `url`: a URL of redis-py, of which the host may be several with commas between them, or
    `redis+sentinel://[USER:PASSWORD@]SENTINEL[:PORT],.../SERVICE[/DATABASE]`. Raises ValueError, whose message does not
    repeat the URL."""
    match = _URL.fullmatch(url)
    if match is None or match["scheme"] not in SCHEMES:
        raise ValueError(f"url must begin with one of {', '.join(f'{scheme}://' for scheme in SCHEMES)}")
    scheme = match["scheme"]
    if scheme == "unix":
        return StoreAddress((), url)
    if "@" in match["path"] + match["rest"]:  # otherwise a part of the password would be taken for a path, and shown
        raise ValueError(f"url has @ behind its hosts; {ESCAPED}")
    plain, has_sentinels, _ = scheme.partition(SENTINEL)
    nodes = tuple(_node(host, SENTINEL_PORT if has_sentinels else DEFAULT_PORT) for host in match["hosts"].split(","))
    path, service = match["path"], ""
    if has_sentinels:
        service, _, database = path.lstrip("/").partition("/")
        path = f"/{database}"
        if not service:
            raise ValueError(f"url must name the primary that Sentinel watches: {scheme}://HOST:26379/NAME")
    user = "" if match["user"] is None else f"{match['user']}@"
    server = f"{plain}://{user}{match['hosts'].split(',')[0]}{path}{match['rest']}"
    return StoreAddress(nodes, server, unquote(service))


def without_secrets(url: str) -> str:
    """Return a valid URL without its user and its options, both of which may hold a password."""
    match = _URL.fullmatch(url)
    return f"{match['scheme']}://{match['hosts']}{match['path']}" if match else ""


def _node(text: str, port: int) -> tuple[str, int]:
    """Return the host and port that `text` names; `port` is the default."""
    try:
        parts = urlsplit(f"//{text}")
        return parts.hostname or "localhost", parts.port or port
    except ValueError:
        raise ValueError(f"url has no valid port, or hosts without commas between them; {ESCAPED}") from None
