"""Tenants and keys: who may come in, and as whom. Every gateway of one Redis agrees."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import msgspec
import structlog

from gateway.accounts.mirror import AccountMirror
from gateway.accounts.record import KEY, TENANT, Account, KeyOwner, key_account, tenant_account
from gateway.core.errors import ApiError, Fault, invalid_request, tenant_not_found
from gateway.core.tenants import ADMIN_TENANT, Lapse, Principal, Tenant, hash_key
from gateway.registry.log import RegistryLog
from gateway.registry.store import RecordStore, StoreAway

KEY_BYTES = 32
MIN_PREFIX = 6
"""Characters of a key's hash that may stand for it."""
MAX_LABEL = 128
GONE = "-"
"""In place of what a configuration says of a key, once it says nothing any more."""

log = structlog.get_logger("accounts")


@dataclass(frozen=True, slots=True)
class NewKey:
    """The only place a key itself is in, on its way to whoever asked for it."""

    secret: str
    account: Account

    def __repr__(self) -> str:
        return f"NewKey({self.account.key_id})"


class AccountRegistry:
    """Changes raise ApiError: TENANT_NOT_FOUND, KEY_NOT_FOUND, TENANT_EXISTS, TENANT_CONFLICT, REGISTRY_UNAVAILABLE.

    A change binds here when it returns, and on other gateways as soon as they have heard of it.
    """

    def __init__(
        self,
        store: RecordStore[Account],
        admins: Mapping[str, Principal],
        changed: Callable[[Sequence[Tenant]], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`admins`: by SHA-256 of their keys. `changed`: told of all tenants when one changes. `clock`: Unix time."""
        self._store = store
        self._admins = frozenset(admins)
        self._mirror = AccountMirror(admins, changed)
        self._log = RegistryLog(store, self._mirror, "tenant")
        self._clock = clock

    @property
    def records(self) -> Mapping[str, Account]:
        return MappingProxyType(self._mirror.records)

    def authenticate(self, token: str | None) -> Principal:
        """Raises ApiError: INVALID_API_KEY."""
        return self._mirror.authenticate(token)

    def holder(self, tenant: str, key_id: str) -> Principal | Lapse:
        """Who work is done for that was asked for with a key, as it is now."""
        return self._mirror.holder(tenant, key_id)

    async def start(self) -> None:
        await self._log.start()

    async def close(self) -> None:
        await self._log.close()

    async def seed(self, tenant: Tenant, key_hashes: Iterable[str]) -> None:
        """Takes up what the configuration says, unless it has said the same before: operators' changes stand.

        Keys that it named when it last spoke, and names no more, are gone.
        """
        hashes = sorted(key_hashes)
        said = json.dumps({"tenant": _said_of(tenant), "keys": hashes}, sort_keys=True)
        wanted = [
            self._seeded(key_account(known, KeyOwner(tenant.name), self._clock(), tenant.name)) for known in hashes
        ]
        wanted += [self._seeded(tenant_account(tenant, self._clock(), said))]
        try:
            before = await self._store.seed(f"{TENANT}/{tenant.name}")
            if before != said:
                await self._take_up(wanted, set(json.loads(before)["keys"] if before else ()) - set(hashes))
        except (StoreAway, ApiError) as error:
            if isinstance(error, ApiError) and error.fault is Fault.TENANT_CONFLICT:
                log.info("configuration_overruled", tenant=tenant.name, reason=error.message)
                return
            for record in wanted:
                self._log.keep(record)

    def tenants(self) -> list[Account]:
        """In order of names."""
        return [self._mirror.records[name] for name in sorted(self.records) if name.startswith(f"{TENANT}/")]

    def tenant(self, name: str) -> Account:
        record = self.records.get(f"{TENANT}/{name}")
        if record is None:
            raise tenant_not_found(name)
        return record

    async def create(self, tenant: Tenant) -> Account:
        if tenant.name == ADMIN_TENANT.name:
            raise invalid_request("this name belongs to administrators", "name")
        if f"{TENANT}/{tenant.name}" in self.records:
            raise ApiError(Fault.TENANT_EXISTS, f"there is a tenant {tenant.name!r} already", "name")
        for key in self.keys(tenant.name):  # of one deleted before, by a gateway that died before it was done
            await self._remove(key.name)
        return await self._write(tenant_account(tenant, self._clock()), None)

    async def amend(self, name: str, change: Callable[[Tenant], Tenant]) -> Account:
        before = self.tenant(name)
        assert before.tenant is not None, "a tenant's record"
        return await self._write(replace(before, tenant=change(before.tenant)), before)

    async def disable(self, name: str, disabled: bool) -> Account:
        """Its requests are refused from now on; those under way go on."""
        before = self.tenant(name)
        return await self._write(replace(before, disabled=disabled), before)

    async def delete(self, name: str) -> int:
        """With all its keys; returns how many."""
        await self._log.remove(self.tenant(name), None)
        keys = self.keys(name)
        for key in keys:
            await self._remove(key.name)
        return len(keys)

    def keys(self, tenant: str = "") -> list[Account]:
        """Of one tenant, or of all, in order of tenants and age."""
        found = [record for record in self.records.values() if record.key and tenant in ("", record.key.tenant)]
        return sorted(found, key=lambda record: (record.key.tenant if record.key else "", record.created, record.name))

    def key(self, prefix: str) -> Account:
        """By its id, or any beginning of its hash that is long enough and no other's."""
        found = [key for key in self.keys() if key.key_hash.startswith(prefix)] if len(prefix) >= MIN_PREFIX else []
        if len(found) != 1:
            why = "is no key's" if not found else "is the beginning of several keys"
            raise ApiError(Fault.KEY_NOT_FOUND, f"{prefix!r} {why}", "key")
        return found[0]

    async def create_key(self, tenant: str, label: str = "") -> NewKey:
        self.tenant(tenant)
        if len(label) > MAX_LABEL or not label.isprintable():
            raise invalid_request(f"label must be at most {MAX_LABEL} printable characters", "label")
        secret = f"sk-{secrets.token_urlsafe(KEY_BYTES)}"
        record = key_account(hash_key(secret), KeyOwner(tenant, label), self._clock())
        return NewKey(secret, await self._write(record, None))

    async def rotate(self, prefix: str, *, keep: bool = False) -> NewKey:
        """A new key in place of one; the old one is refused from then on, unless it is to be kept for a while."""
        old = self.key(prefix)
        assert old.key is not None, "a key's record"
        new = await self.create_key(old.key.tenant, old.key.label)
        if not keep:
            await self._write(replace(old, disabled=True), old)
        return new

    async def disable_key(self, prefix: str, disabled: bool) -> Account:
        before = self.key(prefix)
        return await self._write(replace(before, disabled=disabled), before)

    async def delete_key(self, prefix: str) -> None:
        await self._log.remove(self.key(prefix), None)

    def _seeded(self, record: Account) -> Account:
        """What the configuration says of a name; that an operator disabled it, no configuration takes back."""
        before = self.records.get(record.name, record)
        return replace(before, tenant=record.tenant, key=record.key, source=record.source, updated=record.updated)

    async def _take_up(self, wanted: Sequence[Account], gone: Iterable[str]) -> None:
        """The tenant comes last: its seed says that all of this has been done."""
        for key_hash in gone:
            await self._remove(f"{KEY}/{key_hash}", seed=GONE)
        for record in wanted:
            await self._log.put(record, self.records.get(record.name), seed=record.source)

    async def _write(self, record: Account, before: Account | None) -> Account:
        if before is not None and record == before:
            return before
        await self._log.put(replace(record, updated=self._clock()), before)
        return self.records[record.name]

    async def _remove(self, name: str, seed: str = "") -> None:
        if name in self.records:
            await self._log.remove(self.records[name], None, seed=seed)


@asynccontextmanager
async def open_accounts(
    store: RecordStore[Account],
    admins: Mapping[str, Principal],
    changed: Callable[[Sequence[Tenant]], None],
    seeds: Iterable[tuple[Tenant, Iterable[str]]],
) -> AsyncIterator[AccountRegistry]:
    """Followed until this is left. `seeds`: configured tenants, and the SHA-256 of each one's keys."""
    accounts = AccountRegistry(store, admins, changed)
    await accounts.start()
    try:
        for tenant, key_hashes in seeds:
            await accounts.seed(tenant, key_hashes)
        yield accounts
    finally:
        await accounts.close()


def _said_of(tenant: Tenant) -> dict[str, Any]:
    """Return a tenant's fields. One that is younger than seeds in Redis is left out while it has its default: otherwise
    an upgrade would take the configuration up again, over operators' changes."""
    said = dict(msgspec.to_builtins(tenant))
    if tenant.unknown_fields == "ignore":
        del said["unknown_fields"]
    return said
