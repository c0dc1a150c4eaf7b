"""A gateway's in-memory copy of the tenants and keys, with which it authenticates callers."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Collection, Sequence

from gateway.accounts.record import AccountRecord
from gateway.core.errors import invalid_api_key
from gateway.core.tenants import ADMIN_TENANT, KeyLapse, Principal, Tenant, hash_key, key_id
from gateway.registry.record import RecordChange, RegistrySnapshot


class AccountMirror:
    """`Mirror` of the account registry. A change takes effect for all new requests as soon as it is applied here."""

    def __init__(self, changed: Callable[[Sequence[Tenant]], None], refused: Collection[str] = ()) -> None:
        """`changed` is called with all tenants whenever a record changes. `refused` has the SHA-256 of keys that are
        not accepted here, even if another gateway put them into the registry."""
        self._refused = frozenset(refused)
        self.generation = 0
        self.records: dict[str, AccountRecord] = {}
        self._changed = changed
        self._keys: dict[str, dict[str, AccountRecord]] = {}
        """Records of keys and administrators by key id, then by hash. Ids are not secret: they appear in logs."""

    def apply_change(self, change: RecordChange[AccountRecord]) -> None:
        self.generation = max(self.generation, change.generation)
        if change.record is None:
            self._remove(change.name)
        else:
            self._put(change.record)
        self._tell()

    def apply_snapshot(self, snapshot: RegistrySnapshot[AccountRecord]) -> None:
        for name in self.records.keys() - snapshot.records.keys():
            self._remove(name)
        for record in snapshot.records.values():
            self._put(record)
        self.generation = snapshot.generation
        self._tell()

    def put(self, record: AccountRecord) -> None:
        self._put(record)
        self._tell()

    def authenticate(self, token: str | None) -> Principal:
        """Return the tenant or administrator that the API key `token` belongs to. The key is looked up by its id, which
        is not secret, and its hash is compared in constant time.

        Raises ApiError (INVALID_API_KEY) if the key is absent or unknown, or if it or its tenant is disabled. The
        message does not repeat the key.
        """
        wanted = hash_key(token or "")
        principal: Principal | None = None
        for known, account in self._keys.get(key_id(wanted), {}).items():
            if hmac.compare_digest(wanted, known) and not account.disabled and known not in self._refused:
                principal = principal or self._owner(account)
        if principal is None:
            raise invalid_api_key()
        return principal

    def holder(self, tenant: str, key_id: str) -> Principal | KeyLapse:
        owner = self.records.get(f"tenant/{tenant}")
        if owner is None or owner.tenant is None:
            return KeyLapse.TENANT_GONE
        if owner.disabled:
            return KeyLapse.TENANT_SUSPENDED
        keys = [
            account for account in self._keys.get(key_id, {}).values() if account.key and account.key.tenant == tenant
        ]
        if all(key.disabled for key in keys):
            return KeyLapse.KEY_DISABLED if keys else KeyLapse.KEY_GONE
        live = next(key for key in keys if not key.disabled)
        return Principal(owner.tenant, key_id, counts_as=live.counts_as)

    def counts_as(self, key_id: str) -> str:
        """Return the id under which the limits and use of the key with this id are kept; an unknown id stays itself."""
        return next((account.counts_as for account in self._keys.get(key_id, {}).values()), key_id)

    def _owner(self, account: AccountRecord) -> Principal | None:
        if account.admin is not None:
            who = account.admin.administrator
            is_known = not who.tenant or self._tenant(who.tenant) is not None
            return Principal(ADMIN_TENANT, account.key_id, who) if is_known else None
        owner = self._tenant(account.key.tenant) if account.key else None
        return None if owner is None else Principal(owner, account.key_id, counts_as=account.counts_as)

    def _tenant(self, name: str) -> Tenant | None:
        """Return a tenant that is not disabled."""
        record = self.records.get(f"tenant/{name}")
        return None if record is None or record.disabled else record.tenant

    def _put(self, record: AccountRecord) -> None:
        before = self.records.get(record.name)
        if before is not None and before.key_hash != record.key_hash:  # an administrator's key was rotated
            self._remove(record.name)
        self.records[record.name] = record
        if record.key_hash:
            self._keys.setdefault(record.key_id, {})[record.key_hash] = record

    def _remove(self, name: str) -> None:
        record = self.records.pop(name, None)
        if record is not None and record.key_hash:
            holders = self._keys[record.key_id]
            if holders.get(record.key_hash) is record:
                del holders[record.key_hash]

    def _tell(self) -> None:
        self._changed([record.tenant for record in self.records.values() if record.tenant is not None])
