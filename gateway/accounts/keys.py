"""Operators' changes of tenants' API keys, used by all protocols, and keys as operators see them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, replace
from typing import Any

from msgspec import UNSET, UnsetType

from gateway.accounts.record import AccountRecord, KeyOwner
from gateway.accounts.registry import AccountRegistry, IssuedKey
from gateway.api_schema import accounts as api
from gateway.core.errors import invalid_request
from gateway.core.key_rules import KeyRules

RULES = tuple(item.name for item in fields(KeyRules))
MOST_OVERLAP_S = 30 * 86_400.0


class KeyAdmin:
    """Creates, changes and rotates keys. Methods raise ApiError: INVALID_REQUEST, and those of `AccountRegistry`."""

    def __init__(self, accounts: AccountRegistry, clock: Callable[[], float] = time.time) -> None:
        self.accounts = accounts
        self._clock = clock

    async def create(self, tenant: str, fields: Mapping[str, Any]) -> IssuedKey:
        """Create a key of a tenant. `fields` are the label and those of `KeyRules`."""
        owner = self._changed(KeyOwner(tenant), fields)
        return await self.accounts.create_key(tenant, owner.label, owner.rules)

    async def change(self, prefix: str, fields: Mapping[str, Any]) -> AccountRecord:
        """Change the given fields of a key. An empty mapping is refused."""
        if not fields:
            raise invalid_request("there is nothing to change")
        return await self.accounts.amend_key(prefix, lambda owner: self._changed(owner, fields))

    async def rotate(
        self,
        prefix: str,
        *,
        keep: bool = False,
        overlap_s: float = 0.0,
        expires_at: float | UnsetType | None = UNSET,
    ) -> IssuedKey:
        """Replace a key by a new one with its tenant, label and rules, whose limits and use are the same. The old one
        is disabled at once, works for `overlap_s` more seconds, or stays with `keep`. Unless `expires_at` is given, a
        key that had an expiry gets the same lifetime again."""
        if keep and overlap_s:
            raise invalid_request("keep and overlap_s exclude each other", "overlap_s")
        if not 0 <= overlap_s <= MOST_OVERLAP_S:
            raise invalid_request(f"overlap_s must be from 0 to {MOST_OVERLAP_S:.0f}", "overlap_s")
        old, now = self.accounts.key(prefix), self._clock()
        assert old.key is not None, "a key's record"
        owner = old.key
        if expires_at is not UNSET:
            owner = self._changed(owner, {"expires_at": expires_at})
        elif owner.rules.expires_at is not None:
            lifetime = owner.rules.expires_at - old.created
            owner = replace(owner, rules=replace(owner.rules, expires_at=now + max(lifetime, 1.0)))
        return await self.accounts.rotate(prefix, owner, keep=keep, overlap_s=overlap_s)

    async def shown(self, accounts: Iterable[AccountRecord]) -> list[api.Key]:
        """Return keys as operators see them, with the times of their last use."""
        found = list(accounts)
        used = await self.accounts.last_use.read([account.key_id for account in found])
        return [shown_key(account, used.get(account.key_id)) for account in found]

    async def shown_one(self, account: AccountRecord) -> api.Key:
        [key] = await self.shown([account])
        return key

    def _changed(self, owner: KeyOwner, fields: Mapping[str, Any]) -> KeyOwner:
        rules = {name: fields[name] for name in RULES if name in fields}
        for name in ("models", "adapters", "networks"):
            if name in rules:
                rules[name] = tuple(rules[name])
        ends = rules.get("expires_at")
        if ends is not None and ends <= self._clock():
            raise invalid_request("expires_at is in the past; disable or delete the key instead", "expires_at")
        try:
            changed = replace(owner.rules, **rules)
        except ValueError as error:
            raise invalid_request(str(error), str(error).partition(" ")[0].rstrip(":")) from error
        return replace(owner, rules=changed, label=fields.get("label", owner.label))


def shown_key(account: AccountRecord, last_used: float | None = None) -> api.Key:
    """Return an API key's record as operators see it, without its secret."""
    owner = account.key
    assert owner is not None, "a key's record"
    rules = owner.rules
    return api.Key(
        id=account.key_id,
        tenant=owner.tenant,
        label=owner.label,
        counts_as=account.counts_as,
        disabled=account.disabled,
        created=account.created,
        updated=account.updated,
        expires_at=rules.expires_at,
        models=list(rules.models),
        adapters=list(rules.adapters),
        networks=list(rules.networks),
        last_used=last_used,
    )
