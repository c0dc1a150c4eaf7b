"""Tenants, authenticated callers, and what they may use."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Literal, Protocol, get_args

from msgspec import Struct

from engine.core.messages.requests import Lane
from gateway.core.administrators import Administrator, AdminRole
from gateway.core.errors import forbidden, invalid_request
from gateway.core.limits import NO_LIMITS, Limits
from gateway.core.names import TENANT_NAME
from gateway.core.networks import Network

MIN_WEIGHT, MAX_WEIGHT = 0.001, 1000.0
"""Bounds of a tenant's weight. Within them, sums and quotients of weights stay exact enough to compare."""
UnknownFields = Literal["ignore", "refuse"]
MAX_CLASSES = 8
"""Maximum number of a tenant's classes. Each may have one request waiting when the engine's queue is full."""
MAX_GOAL_S = 86_400.0
MAX_LABEL = 128
"""Maximum number of characters of a key's label."""


@dataclass(frozen=True, slots=True)
class RequestClass:
    """How requests of one class are served among the others of their tenant. A request chooses a class by its name.
    Raises ValueError for a value out of bounds."""

    weight: float = 1.0
    """Part of the tenant's share of a lane, relative to its other classes that have requests there, from MIN_WEIGHT to
    MAX_WEIGHT."""
    priority: int = 0
    """Priority of requests that name none; a lower value is served sooner inside the class."""
    ttft_s: float | None = None
    """TTFT goal in seconds of requests that set none. None means the lane's."""
    itl_s: float | None = None
    """ITL goal in seconds of requests that set none. None means the lane's."""

    def __post_init__(self) -> None:
        if not MIN_WEIGHT <= self.weight <= MAX_WEIGHT:
            raise ValueError(f"weight must be from {MIN_WEIGHT:g} to {MAX_WEIGHT:g}, not {self.weight}")
        if not -(2**31) <= self.priority < 2**31:
            raise ValueError(f"priority must fit 32 bits, not {self.priority}")
        for name, goal in (("ttft_s", self.ttft_s), ("itl_s", self.itl_s)):
            if goal is not None and not 0 < goal <= MAX_GOAL_S:
                raise ValueError(f"{name} must be positive and at most {MAX_GOAL_S:g}, not {goal}")


NO_CLASS = RequestClass()
"""Class of requests that name none."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """Settings of one customer of this installation. Raises ValueError for an invalid name, weight or `unknown_fields`,
    and for a default lane above the highest."""

    name: str
    default_lane: Lane = Lane.INTERACTIVE
    """Lane of requests that ask for none."""
    highest_lane: Lane = Lane.INTERACTIVE
    """Highest lane that the tenant may use. A request that asks for a higher lane is served in this one."""
    adapters: tuple[str, ...] = ("*",)
    """Shell-style patterns of adapter names that the tenant may use. Every tenant may use the base model."""
    limits: Limits = NO_LIMITS
    """Limits of the tenant as a whole."""
    key_limits: Limits = NO_LIMITS
    """Limits of each of the tenant's keys, within `limits`."""
    adapter_limits: Limits = NO_LIMITS
    """Limits of the tenant's use of each adapter, and of the base model, within `limits`."""
    weight: float = 1.0
    """Relative share of the machine against other tenants in the same lane, from MIN_WEIGHT to MAX_WEIGHT."""
    upstreams: tuple[str, ...] = ()
    """Shell-style patterns of upstreams that the tenant's data may be sent to, as members of virtual models."""
    unknown_fields: UnknownFields = "ignore"
    """Handling of request fields that the gateway does not know. Misspelled known fields are refused in any case."""
    classes: Mapping[str, RequestClass] = field(default_factory=dict)
    """Classes by name, which divide the tenant's share of a lane. Requests that name none are a class of weight 1."""

    def __post_init__(self) -> None:
        if not TENANT_NAME.fits(self.name):
            raise ValueError(f"tenant name {self.name[:80]!r} must be {TENANT_NAME.words}")
        if self.default_lane < self.highest_lane:
            raise ValueError(f"default_lane {self.default_lane.name.lower()} is above highest_lane")
        if not MIN_WEIGHT <= self.weight <= MAX_WEIGHT:
            raise ValueError(f"weight must be from {MIN_WEIGHT:g} to {MAX_WEIGHT:g}, not {self.weight}")
        if self.unknown_fields not in (choices := get_args(UnknownFields)):
            raise ValueError(f"unknown_fields must be one of {', '.join(choices)}, not {self.unknown_fields[:80]!r}")
        if len(self.classes) > MAX_CLASSES:
            raise ValueError(f"classes: a tenant has at most {MAX_CLASSES}, not {len(self.classes)}")
        for name in self.classes:
            if not TENANT_NAME.fits(name):
                raise ValueError(f"classes: the name {name[:80]!r} must be {TENANT_NAME.words}")

    def may_use(self, adapter: str) -> bool:
        return any(fnmatchcase(adapter, pattern) for pattern in self.adapters)

    def may_use_base(self, names: tuple[str, ...]) -> bool:
        """Return whether requests may name the base model that has these names: always, unless their key restricts
        it."""
        return True

    def may_use_virtual(self, name: str) -> bool:
        """Return whether requests may name a virtual model."""
        return self.may_use(name)

    @property
    def whole(self) -> Tenant:
        """The tenant with all that it may use, whatever the key of a request may name."""
        return self

    def may_leave_to(self, upstream: str) -> bool:
        """Return whether the tenant permits that its requests are sent to an upstream."""
        return any(fnmatchcase(upstream, pattern) for pattern in self.upstreams)

    def class_of(self, name: str) -> RequestClass:
        """Return the class of that name; the empty name means none. Raises ApiError: INVALID_REQUEST, unknown."""
        if name and name not in self.classes:
            known = (
                f"the tenant's classes are {', '.join(self.classes)}" if self.classes else "the tenant has no classes"
            )
            raise invalid_request(f"request_class {name!r} is unknown: {known}", "request_class")
        return self.classes.get(name, NO_CLASS)

    def effective_lane(self, asked: Lane | None) -> Lane:
        """Return the lane that serves a request of this tenant: `asked` or, if None, `default_lane`; but `highest_lane`
        if that lane is higher than the tenant may use."""
        return max(self.default_lane if asked is None else asked, self.highest_lane)


ADMIN_TENANT = Tenant("admin")
"""Pseudo-tenant that administrators' keys belong to. It makes no requests that are limited or billed."""
COPIES_TENANT = Tenant("virtual-model-copy", default_lane=Lane.BATCH, highest_lane=Lane.BATCH)
"""Pseudo-tenant of shadow requests: copies of requests for a virtual model that a second member answers, too. They run
in the batch lane."""
RESERVED_NAMES: Mapping[str, str] = MappingProxyType(
    {ADMIN_TENANT.name: "administrators", COPIES_TENANT.name: "copies of requests for virtual models"}
)
"""Names of pseudo-tenants, which no tenant may have, and what each is for, as error messages say it. A tenant with such
a name could share cached prefixes with the pseudo-tenant."""


class Principal(Struct, frozen=True):
    """An authenticated caller: the tenant and the id of the API key with which a request came."""

    tenant: Tenant
    key_id: str
    """First 12 hex digits of the key's hash. They are safe to log and enough to tell keys apart."""
    administrator: Administrator | None = None
    """The administrator whose key it is. None means that the caller is a tenant."""
    counts_as: str = ""
    """Id of the key under which this key's limits and use are kept; empty means its own. Keys made by rotating one
    another share it."""
    networks: tuple[Network, ...] = ()
    """Networks that requests with this key may come from. If empty, they may come from anywhere."""

    @property
    def is_admin(self) -> bool:
        return self.administrator is not None

    @property
    def limits_key(self) -> str:
        return self.counts_as or self.key_id

    def as_tenant(self) -> Principal:
        """Return this caller if it is a tenant. Raises ApiError: FORBIDDEN, for an administrator, because generation
        always counts against a tenant's limits."""
        if self.is_admin:
            raise forbidden("an administrator's key administers; this needs a tenant's key")
        return self

    def as_admin(self, needed: AdminRole) -> Principal:
        """Return this caller if it is an administrator whose role includes the needed one. Raises ApiError: FORBIDDEN,
        for a tenant; PERMISSION_DENIED, for another role."""
        if self.administrator is None:
            raise forbidden("this needs an administrator's key")
        self.administrator.check(needed)
        return self


ID_DIGITS = 12
"""Hex digits of a key's id, the first of its hash."""


def hash_key(key: str) -> str:
    """Return the SHA-256 of a key in hex. Keys are long random strings, so a slow password hash would add nothing."""
    return hashlib.sha256(key.encode()).hexdigest()


def key_id(key_hash: str) -> str:
    return key_hash[:ID_DIGITS]


class KeyLapse(Enum):
    """Reason why work that was requested earlier with a key is stopped. A value is a pair of error code and message."""

    TENANT_GONE = ("tenant_gone", "the tenant that asked for this is no more")
    TENANT_SUSPENDED = ("tenant_suspended", "the tenant that asked for this is suspended")
    KEY_GONE = ("key_revoked", "the API key that asked for this is no more")
    KEY_DISABLED = ("key_revoked", "the API key that asked for this was revoked")

    @property
    def is_certain(self) -> bool:
        """True if the tenant was suspended or the key was disabled. In the other cases this gateway may just not have
        learned of the tenant or the key yet."""
        return self in (KeyLapse.TENANT_SUSPENDED, KeyLapse.KEY_DISABLED)


class KeyHolders(Protocol):
    """Looks up the current caller that a key id stands for, for work such as batch jobs that outlives its request."""

    def holder(self, tenant: str, key_id: str) -> Principal | KeyLapse:
        """Return the caller with the tenant's present settings or, if the tenant or the key is missing or disabled, the
        reason why work requested with this key must stop."""


class Authenticator(Protocol):
    """Identifies callers by their API keys."""

    def authenticate(self, token: str | None) -> Principal:
        """Return the caller that the API key `token` belongs to; None means that the request has no key. Raises
        ApiError: INVALID_API_KEY, without repeating the key, if it is missing or not valid; KEY_EXPIRED."""

    def check_address(self, principal: Principal, peer: str, forwarded: str) -> None:
        """Raise ApiError (ADDRESS_NOT_ALLOWED) if a request must not come from where it does, for a caller with
        `networks`. `peer` is the address of the connection, `forwarded` the header X-Forwarded-For."""
