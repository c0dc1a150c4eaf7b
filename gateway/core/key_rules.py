"""What an API key may do of what its tenant may: until when, with which models and adapters, and from where."""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import isfinite

import msgspec

from gateway.core.networks import parse_networks
from gateway.core.patterns import WILD, is_compiled, matches
from gateway.core.tenants import Tenant

MOST_PATTERNS, MOST_PATTERN = 100, 256
"""Maximum number of patterns or networks in a list of a key, and of characters of each."""
MOST_WILD = 8
"""Maximum number of wildcards in a pattern."""
MOST_COMPILED = 8
"""Maximum number of a key's patterns with `?` or `[`: each takes up to 0.3 ms to compile, on the event loop."""
MOST_BYTES = 16 * 1024
"""Maximum size of a key's rules as JSON. Every gateway has the rules of all keys in memory."""


@dataclass(frozen=True, slots=True)
class KeyRules:
    """Restrictions of one API key. Raises ValueError for lists and patterns that are too long or have too many
    wildcards, a network that is none, and an expiry that is no time."""

    expires_at: float | None = None
    """Unix time in seconds from which the key is refused. None means never."""
    models: tuple[str, ...] = ("*",)
    """Shell-style patterns of base models and virtual models that requests may name."""
    adapters: tuple[str, ...] = ("*",)
    """Shell-style patterns of adapters that requests may name, among those that the tenant may use."""
    networks: tuple[str, ...] = ()
    """Networks, as CIDR, that requests may come from. If empty, they may come from anywhere."""

    def __post_init__(self) -> None:
        if self.expires_at is not None and not (isfinite(self.expires_at) and self.expires_at > 0):
            raise ValueError(f"expires_at must be a Unix time in seconds, not {self.expires_at}")
        for name in ("models", "adapters", "networks"):
            items = getattr(self, name)
            if len(items) > MOST_PATTERNS or any(not 0 < len(item) <= MOST_PATTERN for item in items):
                raise ValueError(f"{name} has at most {MOST_PATTERNS} entries of 1 to {MOST_PATTERN} characters")
        try:
            parse_networks(self.networks)
        except ValueError as error:
            raise ValueError(f"networks: {error}") from None
        self._check_size()

    def _check_size(self) -> None:
        """Raise ValueError if the rules take too long to apply or too much memory."""
        for name in ("models", "adapters"):
            if any(sum(map(pattern.count, WILD)) > MOST_WILD for pattern in getattr(self, name)):
                raise ValueError(f"{name}: a pattern has at most {MOST_WILD} of {' '.join(WILD)}")
        if sum(map(is_compiled, (*self.models, *self.adapters))) > MOST_COMPILED:
            name = "models" if any(map(is_compiled, self.models)) else "adapters"
            raise ValueError(f"{name}: at most {MOST_COMPILED} patterns of a key have ? or [; write * instead")
        if (size := len(msgspec.json.encode(self))) > MOST_BYTES:
            name = max(("models", "adapters", "networks"), key=lambda name: sum(map(len, getattr(self, name))))
            raise ValueError(f"{name}: a key's rules have at most {MOST_BYTES} bytes as JSON, and these have {size}")

    @property
    def restrict_names(self) -> bool:
        """True if requests may name less than the tenant may use."""
        return self.models != ("*",) or self.adapters != ("*",)


NO_RULES = KeyRules()


@dataclass(frozen=True, slots=True)
class KeyTenant(Tenant):
    """A tenant as one of its keys may use it. It is never stored."""

    owner: Tenant | None = None
    """The tenant with all that it may use."""
    rules: KeyRules = NO_RULES

    @property
    def whole(self) -> Tenant:
        assert self.owner is not None, "a key's tenant"
        return self.owner

    def may_use(self, adapter: str) -> bool:
        return Tenant.may_use(self, adapter) and _fits(adapter, self.rules.adapters)

    def may_use_base(self, names: tuple[str, ...]) -> bool:
        return any(_fits(name, self.rules.models) for name in names)

    def may_use_virtual(self, name: str) -> bool:
        return Tenant.may_use(self, name) and _fits(name, self.rules.models)


def restricted(tenant: Tenant, rules: KeyRules) -> Tenant:
    """Return a tenant as a key with these rules may use it."""
    if not rules.restrict_names:
        return tenant
    return KeyTenant(**{item.name: getattr(tenant, item.name) for item in fields(Tenant)}, owner=tenant, rules=rules)


def _fits(name: str, patterns: tuple[str, ...]) -> bool:
    return any(matches(name, pattern) for pattern in patterns)
