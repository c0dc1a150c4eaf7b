"""The section `upstreams` of the configuration: servers elsewhere that may be members of virtual models."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from fnmatch import fnmatchcase
from urllib.parse import urlsplit

from engine.core.messages.requests import Lane
from engine.rpc.target import is_loopback
from gateway.config.file import ConfigError, Problems
from gateway.config.models import check_entry
from gateway.core.billing import Price
from gateway.core.lanes import LaneName, lane_name
from gateway.core.tenants import Tenant


@dataclass(frozen=True, slots=True)
class UpstreamPrice:
    """What an upstream charges for a million tokens, in the currency of `billing`."""

    prompt: Decimal
    completion: Decimal
    cached: Decimal | None = None
    """Price of prompt tokens that the upstream found in its cache. None means that of `prompt`."""

    def for_usage(self, name: str) -> Price:
        """Return the entry of the price list for the usage of the upstream with this name."""
        return Price(self.prompt, self.completion, self.cached, adapter=name)


@dataclass(frozen=True, slots=True)
class UpstreamConfig:
    """A server with OpenAI's API for chats, completions or embeddings. Raises ValueError for a URL that is not https or
    on this machine, and for a number out of range."""

    url: str
    """Base URL, such as https://api.example.com/v1, to which paths like /chat/completions are added."""
    model: str
    """Name of the model there."""
    key: str = field(default="", repr=False)
    """API key, sent as a bearer token. Empty means that none is sent."""
    tenants: tuple[str, ...] = ("*",)
    """Patterns of the tenants that may use it, among those whose own `upstreams` permit it."""
    lanes: tuple[LaneName, ...] = ("interactive", "batch")
    """Lanes whose requests may use it."""
    price: UpstreamPrice | None = None
    max_requests: int = 64
    """Maximum number of requests in progress, in each gateway process. Beyond it, tenants have the requests of their
    shares of it by weight."""
    connect_timeout_s: float = 5.0
    first_token_timeout_s: float = 30.0
    """Maximum time from sending a request to the first piece of its answer."""
    idle_timeout_s: float = 30.0
    """Maximum time between two pieces of an answer."""
    retries: int = 1
    """How often a request that failed before the first piece of its answer is sent again."""
    failures: int = 5
    """Failures in a row after which no requests are sent for `pause_s`."""
    pause_s: float = 30.0
    max_response_bytes: int = 8 * 2**20
    """Maximum size of an answer as it is sent, with all its events."""

    def __post_init__(self) -> None:
        self._check_url()
        if not self.model:
            raise ValueError("model must not be empty")
        if not self.key.isascii() or not self.key.isprintable() or " " in self.key:
            raise ValueError("key must consist of printable ASCII characters without spaces")
        least = {"max_requests": 1, "retries": 0, "failures": 1, "max_response_bytes": 1024}
        for name, minimum in least.items():
            if getattr(self, name) < minimum:
                raise ValueError(f"{name} must be at least {minimum}, not {getattr(self, name)}")
        for name in ("connect_timeout_s", "first_token_timeout_s", "idle_timeout_s", "pause_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}")

    def endpoint(self, path: str) -> str:
        return f"{self.url.rstrip('/')}/{path}"

    def permits(self, name: str, tenant: Tenant, lane: Lane) -> bool:
        """Return whether requests of a tenant in a lane may be sent to this upstream, whose name is `name`: both its
        own settings and the tenant's must permit it."""
        is_listed = any(fnmatchcase(tenant.name, pattern) for pattern in self.tenants)
        return is_listed and lane_name(lane) in self.lanes and tenant.may_leave_to(name)

    def _check_url(self) -> None:
        try:
            parts = urlsplit(self.url)
            host = parts.hostname or ""
            parts.port  # noqa: B018 - raises
        except ValueError:
            raise ValueError("url is malformed") from None
        if not host or parts.username or parts.password or parts.query or parts.fragment:
            raise ValueError("url must be like https://api.example.com/v1, without credentials or a query")
        if parts.scheme != "https" and not (parts.scheme == "http" and is_loopback(host)):
            raise ValueError("url must begin with https://, unless it is on this machine")


def check_upstreams(upstreams: Mapping[str, UpstreamConfig], taken: Collection[str], *, has_prices: bool) -> None:
    """Raise ConfigError, with all problems, if an upstream has a malformed name or one of the names `taken` by models
    and adapters, or a price although there is no price list (`has_prices`)."""
    problems = Problems()
    for name, upstream in upstreams.items():
        with problems.noting():
            check_entry("upstreams", name)
            if name in taken:
                raise ConfigError(f"upstreams.{name}: is also the name of a base model or an adapter")
            if upstream.price is not None and not has_prices:
                raise ConfigError(f"upstreams.{name}.price: needs billing.prices, which price everything else")
    problems.raise_all()
