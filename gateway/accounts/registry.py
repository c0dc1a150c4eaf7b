"""Registry of tenants and API keys, which all gateways of one Redis share. It decides which callers are accepted."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from math import inf
from types import MappingProxyType
from typing import Any

import msgspec
import structlog

from gateway.accounts.administrators import Administrators
from gateway.accounts.last_use import LastUse
from gateway.accounts.mirror import AccountMirror
from gateway.accounts.record import KEY, TENANT, AccountRecord, KeyOwner, key_account, tenant_account
from gateway.accounts.secrets import GONE, IssuedKey, new_secret
from gateway.core.administrators import Administrator
from gateway.core.errors import ApiError, Fault, address_not_allowed, invalid_request, tenant_not_found
from gateway.core.key_rules import NO_RULES, KeyRules
from gateway.core.networks import Network, caller_address, contains
from gateway.core.tenants import MAX_LABEL, RESERVED_NAMES, KeyLapse, Principal, Tenant, hash_key
from gateway.registry.log import RegistryLog, Seeded, untold
from gateway.registry.store import RecordStore, StoreAway

MIN_PREFIX = 6
"""Minimum number of hex digits of a key's hash with which an operator may name the key."""
MOST_KEYS = 1_000
"""Maximum number of keys of a tenant. Configured keys count, too, but are never refused."""

Seed = tuple[Tenant, Iterable[str]] | tuple[Tenant, Iterable[str], Mapping[str, KeyOwner]]
"""A configured tenant, the SHA-256 of its keys in hex, and perhaps what the configuration says of some of them."""
NOT_DESCRIBED: Mapping[str, KeyOwner] = MappingProxyType({})

log = structlog.get_logger("accounts")


class AccountRegistry:
    """Reads and changes tenants and API keys, and authenticates callers. Each gateway process has one registry object.

    Changes raise ApiError: INVALID_REQUEST (for the tenant name `admin` or a bad key label), TENANT_NOT_FOUND,
    KEY_NOT_FOUND, TENANT_EXISTS, TENANT_CONFLICT, REGISTRY_UNAVAILABLE. A change is in effect here when the call
    returns, and on other gateways as soon as they have received it.
    """

    def __init__(
        self,
        store: RecordStore[AccountRecord],
        changed: Callable[[Sequence[Tenant]], None],
        clock: Callable[[], float] = time.time,
        *,
        seeded: Seeded[AccountRecord] = untold,
        refused: Collection[str] = (),
        last_use: LastUse | None = None,
        proxies: Sequence[Network] = (),
    ) -> None:
        """
        Args:
            store: where the registry is stored.
            changed: called with all tenants whenever a tenant or key changes.
            clock: returns the Unix time in seconds.
            seeded: called after each change that the configuration made.
            refused: SHA-256 of keys that are not accepted here, even if another gateway's configuration has them.
            last_use: notes which keys are used; None means in this process alone.
            proxies: networks of the operator's proxies, which say in X-Forwarded-For where requests come from.
        """
        self._store = store
        self._mirror = AccountMirror(changed, refused, clock)
        self.last_use = last_use or LastUse(clock=clock)
        self._proxies = tuple(proxies)
        self._log = RegistryLog(store, self._mirror, "tenant", seeded)
        self._clock = clock
        self.administrators = Administrators(self._log, self._mirror, clock)

    @property
    def records(self) -> Mapping[str, AccountRecord]:
        return MappingProxyType(self._mirror.records)

    def authenticate(self, token: str | None) -> Principal:
        """Return the tenant or administrator that the API key `token` belongs to. Raises ApiError: INVALID_API_KEY, the
        key is absent, unknown or disabled, or its tenant is disabled; KEY_EXPIRED."""
        principal = self._mirror.authenticate(token)
        if not (principal.is_admin or principal.networks):  # those with networks are used if `check_address` passes
            self.last_use.note(principal.key_id)
        return principal

    def check_address(self, principal: Principal, peer: str, forwarded: str) -> None:
        """Raise ApiError (ADDRESS_NOT_ALLOWED) if a caller whose key has networks calls from elsewhere. `peer` is the
        address of the connection, `forwarded` the header X-Forwarded-For."""
        address = caller_address(peer, forwarded, self._proxies)
        if address is None or not contains(principal.networks, address):
            raise address_not_allowed(address)
        if not principal.is_admin:
            self.last_use.note(principal.key_id)

    def holder(self, tenant: str, key_id: str) -> Principal | KeyLapse:
        """Return the principal (the tenant with its present settings, and the key) on whose behalf work that was
        accepted earlier, such as a batch, continues. If the tenant or key is deleted or disabled, return the reason why
        that work must stop. It does not stop when the key expires: it was accepted before."""
        return self._mirror.holder(tenant, key_id)

    def rules(self, key_id: str) -> KeyRules:
        """Return the rules of the key with this id; an unknown one has none."""
        return self._mirror.rules(key_id)

    def counts_as(self, key_id: str) -> str:
        """Return the id under which the limits and use of the key with this id are kept; an unknown id stays itself."""
        return self._mirror.counts_as(key_id)

    async def start(self) -> None:
        await self._log.start()
        self.last_use.start(self._mirror.knows)

    async def close(self) -> None:
        await self.last_use.close()
        await self._log.close()

    async def seed(
        self, tenant: Tenant, key_hashes: Iterable[str], described: Mapping[str, KeyOwner] = NOT_DESCRIBED
    ) -> None:
        """Create or update a configured tenant and its keys (SHA-256 in hex), and delete keys that only the previous
        configuration named. Does nothing if the same configuration was applied before: operators' later changes then
        stand. `described` has labels and rules of keys, by their hashes; other keys keep those that they have.

        If Redis is away, the records are served here and written later. A TENANT_CONFLICT is only logged.
        """
        hashes = sorted(key_hashes)
        said = json.dumps(_said_of_all(tenant, hashes, described), sort_keys=True)
        wanted = [
            self._seeded(
                key_account(known, described.get(known, KeyOwner(tenant.name)), self._clock(), source),
                is_described=known in described,
            )
            for known, source in ((known, _key_source(tenant.name, described.get(known))) for known in hashes)
        ]
        wanted += [self._seeded(tenant_account(tenant, self._clock(), said))]
        try:
            before = await self._store.seed(f"{TENANT}/{tenant.name}")
            if before != said:
                await self._apply_config(wanted, set(json.loads(before)["keys"] if before else ()) - set(hashes))
        except (StoreAway, ApiError) as error:
            if isinstance(error, ApiError) and error.fault is Fault.TENANT_CONFLICT:
                log.info("configuration_overruled", tenant=tenant.name, reason=error.message)
                return
            for record in wanted:
                self._log.keep(record)

    def tenants(self) -> list[AccountRecord]:
        """Return the records of all tenants, disabled ones included, sorted by name."""
        return [self._mirror.records[name] for name in sorted(self.records) if name.startswith(f"{TENANT}/")]

    def tenant(self, name: str) -> AccountRecord:
        record = self.records.get(f"{TENANT}/{name}")
        if record is None:
            raise tenant_not_found(name)
        return record

    async def create(self, tenant: Tenant) -> AccountRecord:
        if tenant.name in RESERVED_NAMES:
            raise invalid_request(f"this name belongs to {RESERVED_NAMES[tenant.name]}", "name")
        if f"{TENANT}/{tenant.name}" in self.records:
            raise ApiError(Fault.TENANT_EXISTS, f"there is a tenant {tenant.name[:80]!r} already", "name")
        # Left by a gateway that died while it deleted a tenant of this name:
        for record in (*self.keys(tenant.name), *self._administrators_of(tenant.name)):
            await self._remove(record.name)
        return await self._write(tenant_account(tenant, self._clock()), None)

    async def amend(self, name: str, change: Callable[[Tenant], Tenant]) -> AccountRecord:
        before = self.tenant(name)
        assert before.tenant is not None, "a tenant's record"
        return await self._write(replace(before, tenant=change(before.tenant)), before)

    async def disable(self, name: str, disabled: bool) -> AccountRecord:
        """Disable or enable a tenant and return its record. While disabled, new requests and lines of batches are
        refused; running ones continue."""
        before = self.tenant(name)
        return await self._write(replace(before, disabled=disabled), before)

    async def delete(self, name: str) -> int:
        """Delete a tenant with all its keys and its own administrators. Return the number of keys deleted."""
        await self._log.remove(self.tenant(name), None)
        keys = self.keys(name)
        for record in (*keys, *self._administrators_of(name)):
            await self._remove(record.name)
        await self.last_use.forget([key.key_id for key in keys])
        return len(keys)

    def _administrators_of(self, tenant: str) -> list[AccountRecord]:
        found = self.administrators.records.values()
        return [record for record in found if record.admin and record.admin.administrator.tenant == tenant]

    def keys(self, tenant: str = "") -> list[AccountRecord]:
        """Return the records of a tenant's keys, or of all keys if `tenant` is empty, sorted by tenant, then oldest
        first."""
        records = [record for record in self.records.values() if record.key and tenant in ("", record.key.tenant)]
        return sorted(
            records, key=lambda record: (record.key.tenant if record.key else "", record.created, record.name)
        )

    def key(self, prefix: str) -> AccountRecord:
        """Return the record of the only key whose hash begins with `prefix`. Raises ApiError (KEY_NOT_FOUND) if no key
        or several keys match, or `prefix` has less than MIN_PREFIX hex digits."""
        matches = [key for key in self.keys() if key.key_hash.startswith(prefix)] if len(prefix) >= MIN_PREFIX else []
        if len(matches) != 1:
            why = "is no key's" if not matches else "is the beginning of several keys"
            raise ApiError(Fault.KEY_NOT_FOUND, f"{prefix[:80]!r} {why}", "key")
        return matches[0]

    async def create_key(self, tenant: str, label: str = "", rules: KeyRules = NO_RULES) -> IssuedKey:
        self.tenant(tenant)
        _check_label(label)
        return await self._issue(KeyOwner(tenant, label, rules=rules))

    async def amend_key(self, prefix: str, change: Callable[[KeyOwner], KeyOwner]) -> AccountRecord:
        """Change the label or the rules of the key that `prefix` names (see `key`), and return its record."""
        before = self.key(prefix)
        assert before.key is not None, "a key's record"
        owner = change(before.key)
        _check_label(owner.label)
        return await self._write(replace(before, key=owner), before)

    async def rotate(
        self, prefix: str, owner: KeyOwner | None = None, *, keep: bool = False, overlap_s: float = 0.0
    ) -> IssuedKey:
        """Create and return a new key of `owner` (None: of what the old one has) in place of the key that `prefix`
        names (see `key`). That is disabled at once, expires after `overlap_s` seconds, or, with `keep`, stays as it is.
        Both count as one in limits and usage."""
        old = self.key(prefix)
        assert old.key is not None, "a key's record"
        self.tenant(old.key.tenant)
        new = await self._issue(replace(owner or old.key, counts_as=old.counts_as))
        try:
            if not keep:
                await self._retire(old, overlap_s)
        except ApiError:
            with suppress(ApiError):
                await self._log.remove(new.account, None)  # no caller gets its secret
            raise
        return new

    async def _retire(self, old: AccountRecord, overlap_s: float) -> None:
        """Disable a key that was replaced or, if `overlap_s` is not 0, let it expire after so many seconds."""
        assert old.key is not None, "a key's record"
        if not overlap_s:
            await self._write(replace(old, disabled=True), old)
            return
        ends = min(self._clock() + overlap_s, old.key.rules.expires_at or inf)
        await self._write(replace(old, key=replace(old.key, rules=replace(old.key.rules, expires_at=ends))), old)

    async def disable_key(self, prefix: str, disabled: bool) -> AccountRecord:
        before = self.key(prefix)
        return await self._write(replace(before, disabled=disabled), before)

    async def delete_key(self, prefix: str) -> None:
        key = self.key(prefix)
        await self._log.remove(key, None)
        await self.last_use.forget([key.key_id])

    def _seeded(self, record: AccountRecord, *, is_described: bool = False) -> AccountRecord:
        """Return the record to write for a configured tenant or key: the present record of this name, if any, updated
        with what the configuration says. `disabled` and what a key continues stay as operators set them, and so do its
        label and rules unless the configuration describes it."""
        before = self.records.get(record.name, record)
        key = record.key
        if before.key and record.key and before.key.tenant == record.key.tenant:
            key = replace(record.key, counts_as=before.key.counts_as) if is_described else before.key
        return replace(before, tenant=record.tenant, key=key, source=record.source, updated=record.updated)

    async def _apply_config(self, wanted: Sequence[AccountRecord], gone: Iterable[str]) -> None:
        """Remove the keys with the hashes `gone`, then write the `wanted` records, each with its source as seed. The
        tenant is last, because its seed states that the rest has been applied."""
        for key_hash in gone:
            await self._remove(f"{KEY}/{key_hash}", seed=GONE)
        for record in wanted:
            await self._log.put(record, self.records.get(record.name), seed=record.source)

    async def _issue(self, owner: KeyOwner) -> IssuedKey:
        """Create a key. Raises ApiError (TENANT_CONFLICT) if its tenant has MOST_KEYS."""
        if len(self.keys(owner.tenant)) >= MOST_KEYS:
            message = f"tenant {owner.tenant} has {MOST_KEYS} keys, the maximum; delete keys that are no longer used"
            raise ApiError(Fault.TENANT_CONFLICT, message, "tenant")
        secret = new_secret()
        return IssuedKey(secret, await self._write(key_account(hash_key(secret), owner, self._clock()), None))

    async def _write(self, record: AccountRecord, before: AccountRecord | None) -> AccountRecord:
        if before is not None and record == before:
            return before
        await self._log.put(replace(record, updated=self._clock()), before)
        return self.records[record.name]

    async def _remove(self, name: str, seed: str = "") -> None:
        if name in self.records:
            await self._log.remove(self.records[name], None, seed=seed)


@asynccontextmanager
async def open_accounts(
    store: RecordStore[AccountRecord],
    changed: Callable[[Sequence[Tenant]], None],
    seeds: Iterable[Seed],
    admins: Iterable[tuple[Administrator, str]] = (),
    **more: Any,
) -> AsyncIterator[AccountRegistry]:
    """Yield a registry that follows the store until the context is left. Before, apply the configured tenants in
    `seeds`, and administrators, each with the SHA-256 of the key. `changed` and what follows are those of
    `AccountRegistry`."""
    accounts = AccountRegistry(store, changed, **more)
    await accounts.start()
    try:
        for seed in seeds:
            await accounts.seed(*seed)
        await accounts.administrators.seed(admins)
        yield accounts
    finally:
        await accounts.close()


NEWER: Mapping[str, Any] = {"unknown_fields": "ignore", "upstreams": (), "classes": {}}
"""Tenant fields, with their defaults, that are newer than some of the seeds (applied configurations) stored in
Redis."""


def _said_of_all(tenant: Tenant, hashes: Sequence[str], described: Mapping[str, KeyOwner]) -> dict[str, Any]:
    """Return what a configured tenant's seed consists of, with its keys. Descriptions of keys, which older seeds lack,
    are left out if there are none."""
    said = {"tenant": _said_of(tenant), "keys": hashes}
    if described:
        said["described"] = msgspec.to_builtins(dict(described))
    return said


def _key_source(tenant: str, described: KeyOwner | None) -> str:
    """Return the source of a configured key's record: its tenant's name, and what the configuration says of it."""
    return tenant if described is None else f"{tenant} {msgspec.json.encode(described).decode()}"


def _check_label(label: str) -> None:
    if len(label) > MAX_LABEL or not label.isprintable():
        raise invalid_request(f"label must be at most {MAX_LABEL} printable characters", "label")


def _said_of(tenant: Tenant) -> dict[str, Any]:
    """Return the fields of a configured tenant that its seed consists of, by which the registry recognises a
    configuration that it has applied already. Fields that older seeds lack are left out while they have their defaults:
    otherwise an upgrade would apply the configuration again, over operators' changes."""
    said = dict(msgspec.to_builtins(tenant))
    return {name: value for name, value in said.items() if name not in NEWER or value != NEWER[name]}
