"""What may be limited, for whom, and by how much."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

LimitName = Literal["requests_per_minute", "tokens_per_minute", "concurrent_requests", "tokens_per_day"]
LIMIT_NAMES: tuple[LimitName, ...] = get_args(LimitName)

Policy = Literal["degraded", "closed", "open"]
"""What becomes of a limit while Redis is away: each gateway keeps to its share, nobody is admitted, it is lifted."""
POLICIES: tuple[Policy, ...] = get_args(Policy)

MAX_LIMIT = 10**12
EACH = "*"
"""In place of a key or an adapter: each of the tenant's that has no limits of its own."""

ScopeKind = Literal["tenant", "key", "adapter"]


@dataclass(frozen=True, slots=True)
class Limits:
    """Allowances of one scope; None is no limit."""

    requests_per_minute: int | None = None
    """A bucket that holds one minute's worth, as the next."""
    tokens_per_minute: int | None = None
    concurrent_requests: int | None = None
    tokens_per_day: int | None = None
    """Of a calendar day, in UTC."""
    shadow: tuple[str, ...] = ()
    """Names of limits that only count whom they would refuse."""
    when_redis_is_away: Mapping[LimitName, Policy] = field(default_factory=dict, hash=False)
    """Of limits by their names; the installation decides about the others."""

    def __post_init__(self) -> None:
        for name in LIMIT_NAMES:
            value = self.of(name)
            if value is not None and not 1 <= value <= MAX_LIMIT:
                raise ValueError(f"{name} must be between 1 and {MAX_LIMIT}, or null for no limit; not {value}")
        unknown = [name for name in self.shadow if name not in LIMIT_NAMES]
        if unknown:
            raise ValueError(f"shadow: {unknown[0]!r} is none of {', '.join(LIMIT_NAMES)}")
        for name, policy in self.when_redis_is_away.items():
            if name not in LIMIT_NAMES or policy not in POLICIES:
                wanted = f"one of {', '.join(POLICIES)} for one of {', '.join(LIMIT_NAMES)}"
                raise ValueError(f"when_redis_is_away: must be {wanted}, not {policy!r} for {name!r}")

    def of(self, name: LimitName) -> int | None:
        value: int | None = getattr(self, name)
        return value

    def changed(self, changes: Mapping[str, Any]) -> Limits:
        """With other values for the fields named; None lifts a limit. Raises ValueError."""
        values = self.values()
        unknown = [name for name in changes if name not in values]
        if unknown:
            raise ValueError(f"{unknown[0]} is none of {', '.join(values)}")
        values |= changes
        shadow, away = tuple(values["shadow"] or ()), values["when_redis_is_away"] or {}
        return Limits(**{**values, "shadow": shadow, "when_redis_is_away": away})

    def policies(self, default: Policy) -> frozenset[Policy]:
        """Of the limits that may refuse somebody, while Redis is away."""
        enforced = [name for name in LIMIT_NAMES if self.of(name) is not None and name not in self.shadow]
        return frozenset(self.when_redis_is_away.get(name, default) for name in enforced)

    def alone(self, replicas: int, default: Policy) -> Limits:
        """What one of several gateways keeps to while Redis is away: its share of each limit that is not open."""
        shares: dict[str, int | None] = {
            name: None if self.when_redis_is_away.get(name, default) == "open" else _share(self.of(name), replicas)
            for name in LIMIT_NAMES
        }
        return self.changed(shares)

    def values(self) -> dict[str, Any]:
        """Every field by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def given(self) -> dict[str, Any]:
        """Fields that say something, by name."""
        return {name: value for name, value in self.values().items() if value not in (None, (), {})}


NO_LIMITS = Limits()


def _share(limit: int | None, replicas: int) -> int | None:
    """At least 1."""
    return None if limit is None else max(1, limit // replicas)


@dataclass(frozen=True, slots=True)
class Scope:
    """Whose requests are counted together: all of a tenant's, those of one key, or those for one adapter."""

    tenant: str
    key: str = ""
    """Id of a key, or EACH."""
    adapter: str = ""
    """Name of an adapter or of the base model, or EACH."""

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
        """Inside its tenant: `tenant`, `key:0123abcd`, `adapter:pirate`."""
        return f"{self.kind}:{self.member}" if self.member else "tenant"

    @property
    def each(self) -> Scope | None:
        """Whose limits stand in where this one has none of its own."""
        if self.key:
            return Scope(self.tenant, key=EACH)
        return Scope(self.tenant, adapter=EACH) if self.adapter else None

    @property
    def order(self) -> tuple[int, str]:
        """As lists show them: the tenant, its keys, its adapters."""
        return ("tenant", "key", "adapter").index(self.kind), self.member

    def __str__(self) -> str:
        return self.name if self.member else f"tenant:{self.tenant}"


def scope_named(tenant: str, name: str) -> Scope:
    """The inverse of `Scope.name`."""
    kind, _, member = name.partition(":")
    if kind == "tenant":
        return Scope(tenant)
    return Scope(tenant, key=member) if kind == "key" else Scope(tenant, adapter=member)
