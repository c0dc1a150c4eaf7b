"""What may be limited, for whom, and by how much."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

LimitName = Literal["requests_per_minute", "tokens_per_minute", "concurrent_requests", "tokens_per_day"]
LIMIT_NAMES: tuple[LimitName, ...] = get_args(LimitName)

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

    def __post_init__(self) -> None:
        for name in LIMIT_NAMES:
            value = self.of(name)
            if value is not None and not 1 <= value <= MAX_LIMIT:
                raise ValueError(f"{name} must be between 1 and {MAX_LIMIT}, or null for no limit; not {value}")
        unknown = [name for name in self.shadow if name not in LIMIT_NAMES]
        if unknown:
            raise ValueError(f"shadow: {unknown[0]!r} is none of {', '.join(LIMIT_NAMES)}")

    def of(self, name: LimitName) -> int | None:
        value: int | None = getattr(self, name)
        return value

    def changed(self, changes: Mapping[str, Any]) -> Limits:
        """With other values for the fields named; None lifts a limit. Raises ValueError."""
        values = {**self.values(), **changes}
        return Limits(**{**values, "shadow": tuple(values["shadow"] or ())})

    def divided(self, replicas: int) -> Limits:
        """One replica's share, at least 1 of each."""
        return self.changed({name: _share(self.of(name), replicas) for name in LIMIT_NAMES})

    def values(self) -> dict[str, Any]:
        """Every field by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def given(self) -> dict[str, Any]:
        """Fields that say something, by name."""
        return {name: value for name, value in self.values().items() if value not in (None, ())}


NO_LIMITS = Limits()


def _share(limit: int | None, replicas: int) -> int | None:
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
