"""Rate limits and quotas, and the scopes (tenant, key, adapter) that they apply to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

LimitName = Literal["requests_per_minute", "tokens_per_minute", "concurrent_requests", "tokens_per_day"]
LIMIT_NAMES: tuple[LimitName, ...] = get_args(LimitName)

Policy = Literal["degraded", "closed", "open"]
"""Handling of a limit while Redis is unavailable. `degraded`: each gateway enforces its share of the limit. `closed`:
no request is admitted. `open`: the limit is lifted."""
POLICIES: tuple[Policy, ...] = get_args(Policy)

MAX_LIMIT = 10**12
EACH = "*"
"""Placeholder for a key or an adapter in a scope: every key or adapter of the tenant without limits of its own."""

ScopeKind = Literal["tenant", "key", "adapter"]


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one scope; None means no limit. Raises ValueError for a limit that is not from 1 to MAX_LIMIT, and for
    an unknown limit name (in `shadow` or `when_redis_is_away`) or policy."""

    requests_per_minute: int | None = None
    """Refill rate and capacity of a token bucket: a burst of one minute's requests is allowed."""
    tokens_per_minute: int | None = None
    """Refill rate and capacity of a token bucket: a burst of one minute's tokens is allowed."""
    concurrent_requests: int | None = None
    tokens_per_day: int | None = None
    """Maximum tokens in a calendar day, in UTC."""
    shadow: tuple[str, ...] = ()
    """Names of limits in shadow, which only count the requests that they would refuse."""
    when_redis_is_away: Mapping[LimitName, Policy] = field(default_factory=dict, hash=False)
    """Policies by limit name. Limits that are not named here follow the installation's default."""

    def __post_init__(self) -> None:
        for name in LIMIT_NAMES:
            value = self.value(name)
            if value is not None and not 1 <= value <= MAX_LIMIT:
                raise ValueError(f"{name} must be between 1 and {MAX_LIMIT}, or null for no limit; not {value}")
        unknown = [name for name in self.shadow if name not in LIMIT_NAMES]
        if unknown:
            raise ValueError(f"shadow: {unknown[0]!r} is none of {', '.join(LIMIT_NAMES)}")
        for name, policy in self.when_redis_is_away.items():
            if name not in LIMIT_NAMES or policy not in POLICIES:
                wanted = f"one of {', '.join(POLICIES)} for one of {', '.join(LIMIT_NAMES)}"
                raise ValueError(f"when_redis_is_away: must be {wanted}, not {policy[:80]!r} for {name[:80]!r}")

    def value(self, name: LimitName) -> int | None:
        value: int | None = getattr(self, name)
        return value

    def changed(self, changes: Mapping[str, Any]) -> Limits:
        """Return a copy in which the fields named by the keys of `changes` have the new values. None lifts a limit.
        Raises ValueError for an unknown field or an invalid value."""
        values = self.values()
        unknown = [name for name in changes if name not in values]
        if unknown:
            raise ValueError(f"{unknown[0]} is none of {', '.join(values)}")
        values |= changes
        shadow, away = tuple(values["shadow"] or ()), values["when_redis_is_away"] or {}
        return Limits(**{**values, "shadow": shadow, "when_redis_is_away": away})

    def policies(self, default: Policy) -> frozenset[Policy]:
        """Return the policies that the enforced limits (set and not in shadow) follow while Redis is unavailable.
        Limits without a policy of their own follow `default`."""
        enforced = [name for name in LIMIT_NAMES if self.value(name) is not None and name not in self.shadow]
        return frozenset(self.when_redis_is_away.get(name, default) for name in enforced)

    def replica_share(self, replicas: int, default: Policy) -> Limits:
        """Return the limits that each of `replicas` gateways enforces while Redis is unavailable: its share of every
        limit, but at least 1, and no limit where the policy is `open`. Limits without a policy follow `default`."""
        shares: dict[str, int | None] = {
            name: None if self.when_redis_is_away.get(name, default) == "open" else _share(self.value(name), replicas)
            for name in LIMIT_NAMES
        }
        return self.changed(shares)

    def values(self) -> dict[str, Any]:
        """Return the values of all fields by field name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def set_values(self) -> dict[str, Any]:
        """Return the values of the fields that are neither None nor empty, by field name."""
        return {name: value for name, value in self.values().items() if value not in (None, (), {})}


NO_LIMITS = Limits()


def _share(limit: int | None, replicas: int) -> int | None:
    """Return one replica's share of a limit: the quotient, rounded down, but at least 1. None stays None."""
    return None if limit is None else max(1, limit // replicas)


@dataclass(frozen=True, slots=True)
class Scope:
    """A set of requests that are counted together: all of a tenant, those with one key, or those for one adapter or the
    base model. EACH as key or adapter means every one. Raises ValueError if both are given."""

    tenant: str
    key: str = ""
    """Id of a key, or EACH; empty if the scope is not a key."""
    adapter: str = ""
    """Name of an adapter or of the base model, or EACH; empty if the scope is not an adapter."""

    def __post_init__(self) -> None:
        if self.key and self.adapter:
            raise ValueError("a scope is a key or an adapter, not both")

    @property
    def kind(self) -> ScopeKind:
        return "key" if self.key else "adapter" if self.adapter else "tenant"

    @property
    def member(self) -> str:
        return self.key or self.adapter

    @property
    def name(self) -> str:
        """The scope's name, unique inside its tenant: `tenant`, `key:0123abcd`, `adapter:pirate`."""
        return f"{self.kind}:{self.member}" if self.member else "tenant"

    @property
    def each(self) -> Scope | None:
        """Scope of each key or each adapter of the tenant, whose limits apply if this scope has none of its own. None
        for a tenant's own scope."""
        if self.key:
            return Scope(self.tenant, key=EACH)
        return Scope(self.tenant, adapter=EACH) if self.adapter else None

    @property
    def order(self) -> tuple[int, str]:
        """Sort key for lists of scopes: the tenant first, then its keys, then its adapters."""
        return ("tenant", "key", "adapter").index(self.kind), self.member

    def __str__(self) -> str:
        return self.name if self.member else f"tenant:{self.tenant}"


def scope_named(tenant: str, name: str) -> Scope:
    """Return the scope of a tenant that has this `Scope.name`: `tenant`, `key:ID` or `adapter:NAME`."""
    kind, _, member = name.partition(":")
    if kind == "tenant":
        return Scope(tenant)
    return Scope(tenant, key=member) if kind == "key" else Scope(tenant, adapter=member)
