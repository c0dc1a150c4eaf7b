"""Administrators of one gateway's registry: they are made, changed, rotated and removed live, as tenants' keys are."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import structlog

from gateway.accounts.mirror import AccountMirror
from gateway.accounts.record import ADMIN, AccountRecord, AdminKey, admin_account
from gateway.accounts.secrets import GONE, IssuedKey, new_secret
from gateway.core.administrators import Administrator, AdminRole, role_named
from gateway.core.errors import ApiError, Fault, invalid_request, tenant_not_found
from gateway.core.tenants import hash_key
from gateway.registry.log import RegistryLog

log = structlog.get_logger("accounts")


@dataclass(frozen=True, slots=True)
class Administrators:
    """Reads and changes administrators. Changes raise ApiError: INVALID_REQUEST, TENANT_NOT_FOUND, ADMIN_NOT_FOUND,
    ADMIN_EXISTS, ADMIN_CONFLICT and REGISTRY_UNAVAILABLE."""

    log: RegistryLog[AccountRecord]
    mirror: AccountMirror
    clock: Callable[[], float]

    @property
    def records(self) -> Mapping[str, AccountRecord]:
        """The administrators' records by their names, sorted."""
        found = sorted((name, record) for name, record in self.mirror.records.items() if record.admin)
        return {name.removeprefix(f"{ADMIN}/"): record for name, record in found}

    def get(self, name: str) -> AccountRecord:
        record = self.mirror.records.get(f"{ADMIN}/{name}")
        if record is None or record.is_stripped:
            raise ApiError(Fault.ADMIN_NOT_FOUND, f"there is no administrator {name[:80]!r}", "name")
        return record

    async def create(self, name: str, role: str, tenant: str = "") -> IssuedKey:
        """Create an administrator and return the new key: of the whole installation, or of `tenant` alone."""
        try:
            administrator = Administrator(name, role_named(role), tenant)
        except ValueError as error:
            raise invalid_request(str(error), "role" if str(error).startswith("role") else "name") from error
        if tenant and f"tenant/{tenant}" not in self.mirror.records:
            raise tenant_not_found(tenant)
        before = self.mirror.records.get(f"{ADMIN}/{name}")
        if before is not None and not before.is_stripped:
            raise ApiError(Fault.ADMIN_EXISTS, f"there is an administrator {name!r} already", "name")
        secret = new_secret()
        record = admin_account(AdminKey(administrator, hash_key(secret)), self.clock())
        return IssuedKey(secret, await self._put(record, before))

    async def change(self, name: str, role: str, by: str) -> AccountRecord:
        """Give an administrator another role. `by` is the administrator who asks, whose own role stays."""
        before = self.get(name)
        assert before.admin is not None, "an administrator's record"
        try:
            after = Administrator(name, role_named(role), before.admin.administrator.tenant)
        except ValueError as error:
            raise invalid_request(str(error), "role") from error
        if after == before.admin.administrator:
            return before
        at = self._generation_to_lose(before, by, "demote") if before.admin.administrator.is_owner else None
        admin = replace(before.admin, administrator=after)
        return await self._put(replace(before, admin=admin, updated=self.clock()), before, at)

    async def rotate(self, name: str) -> IssuedKey:
        """Return a new key of an administrator. The old one is refused from now on."""
        before = self.get(name)
        assert before.admin is not None, "an administrator's record"
        secret = new_secret()
        admin = replace(before.admin, key_hash=hash_key(secret))
        return IssuedKey(secret, await self._put(replace(before, admin=admin, updated=self.clock()), before))

    async def delete(self, name: str, by: str) -> None:
        """Delete an administrator. `by` is the name of the administrator who asks, which must be another."""
        before = self.get(name)
        at = self._generation_to_lose(before, by, "delete")
        with _as_admin_conflict():
            await self.log.remove(before, None, at=at)

    async def seed(self, seeds: Iterable[tuple[Administrator, str]]) -> None:
        """Create or update the configured administrators, each with the SHA-256 of the key in hex, and delete those
        that only a previous configuration named, unless this one names none: a gateway for tenants alone needs none.
        What operators changed later stands until the configuration changes.

        If Redis is away, the records are served here and written later.
        """
        wanted = {administrator.name: self._seeded(administrator, known) for administrator, known in seeds}
        gone = [record for name, record in self.records.items() if wanted and record.source and name not in wanted]
        for record in gone:
            await self._apply(record, self.log.remove(record, None, seed=GONE))
        for record in wanted.values():
            stripped = self.mirror.records.get(record.name)
            if stripped is not None and stripped.is_stripped:  # its seed still says that it has been applied
                await self._apply(stripped, self.log.remove(stripped, None, seed=GONE))
            before = self.mirror.records.get(record.name)
            if not await self._apply(record, self.log.put(record, before, seed=record.source)):
                self.log.keep(record)

    async def _apply(self, record: AccountRecord, change: Awaitable[object]) -> bool:
        """Make a change of the configuration. Return False if Redis is away. That another gateway's change came before
        it is only logged."""
        try:
            await change
        except ApiError as error:
            if error.fault is not Fault.TENANT_CONFLICT:
                return False
            log.info("configuration_overruled", administrator=record.name, reason=error.message)
        return True

    def _seeded(self, administrator: Administrator, key_hash: str) -> AccountRecord:
        said = {"key": key_hash, "role": administrator.role, "tenant": administrator.tenant}
        record = admin_account(AdminKey(administrator, key_hash), self.clock(), json.dumps(said, sort_keys=True))
        before = self.mirror.records.get(record.name)
        return record if before is None else replace(record, created=before.created)

    def _generation_to_lose(self, record: AccountRecord, by: str, verb: str) -> int | None:
        """Return the generation at which the registry must still be when an owner is lost; None for another
        administrator. Raises ApiError (ADMIN_CONFLICT): it is the caller, or the last owner."""
        assert record.admin is not None, "an administrator's record"
        name = record.admin.administrator.name
        if name == by:
            raise _conflict(f"administrators cannot {verb} themselves: let another owner {verb} {name}")
        if not record.admin.administrator.is_owner:
            return None
        generation = self.mirror.generation
        owners = [one for one in self.records.values() if one.admin and one.admin.administrator.is_owner]
        if len(owners) == 1:
            raise _conflict(f"{name} is the last {AdminRole.OWNER}; make another administrator {AdminRole.OWNER} first")
        return generation

    async def _put(self, record: AccountRecord, before: AccountRecord | None, at: int | None = None) -> AccountRecord:
        with _as_admin_conflict():
            await self.log.put(record, before, at=at)
        return self.mirror.records[record.name]


def _conflict(message: str) -> ApiError:
    return ApiError(Fault.ADMIN_CONFLICT, message, "name")


@contextmanager
def _as_admin_conflict() -> Iterator[None]:
    """Raise the conflicts of the registry, which are a tenant's, as an administrator's."""
    try:
        yield
    except ApiError as error:
        if error.fault is Fault.TENANT_CONFLICT:
            raise _conflict(
                "another administrator changed the accounts meanwhile; look again, and try again"
            ) from error
        raise
