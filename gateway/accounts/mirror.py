"""A gateway's in-memory copy of the tenants and keys, with which it authenticates callers."""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable, Collection, Sequence

import structlog

from gateway.accounts.record import AccountRecord
from gateway.core.errors import invalid_api_key, key_expired
from gateway.core.key_rules import NO_RULES, KeyRules, restricted
from gateway.core.networks import parse_networks
from gateway.core.tenants import ADMIN_TENANT, ID_DIGITS, KeyLapse, Principal, Tenant, hash_key, key_id
from gateway.registry.record import RecordChange, RegistrySnapshot

log = structlog.get_logger("accounts")


class AccountMirror:
    """`Mirror` of the account registry. A change takes effect for all new requests as soon as it is applied here."""

    def __init__(
        self,
        changed: Callable[[Sequence[Tenant]], None],
        refused: Collection[str] = (),
        clock: Callable[[], float] = time.time,
    ) -> None:
        """
        Args:
            changed: called with all tenants whenever a record changes.
            refused: SHA-256 of keys that are not accepted here, even if another gateway put them into the registry.
            clock: returns the Unix time in seconds.
        """
        self._refused = frozenset(refused)
        self._clock = clock
        self._principals: dict[str, Principal] = {}
        """Callers with tenants' keys by the hashes of these, as far as they were asked for since the last change."""
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

        Raises ApiError: INVALID_API_KEY, the key is absent or unknown, or it or its tenant is disabled; KEY_EXPIRED.
        The message does not repeat the key.
        """
        wanted = hash_key(token or "")
        principal: Principal | None = None
        for known, account in self._keys.get(key_id(wanted), {}).items():
            if hmac.compare_digest(wanted, known) and not account.disabled and known not in self._refused:
                principal = principal or self._valid(known, account)
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
        return self._owner(live) or KeyLapse.TENANT_GONE

    def rules(self, key_id: str) -> KeyRules:
        """Return the rules of the key with this id; an unknown one has none."""
        owners = (account.key for account in self._keys.get(key_id, {}).values() if account.key)
        return next((owner.rules for owner in owners), NO_RULES)

    def counts_as(self, key_id: str) -> str:
        """Return the id under which the limits and use of the key with this id are kept. The id may have more digits of
        the key's hash. An unknown one stays itself."""
        found = self._keys.get(key_id[:ID_DIGITS], {}).items()
        return next((account.counts_as for known, account in found if known.startswith(key_id)), key_id)

    def knows(self, key_id: str) -> bool:
        """Return whether there is a key with this id."""
        return key_id in self._keys

    def _valid(self, key_hash: str, account: AccountRecord) -> Principal | None:
        """Return the caller with a key. None means that its tenant is disabled or gone. Raises ApiError
        (KEY_EXPIRED)."""
        principal = self._principals.get(key_hash) or self._owner(account)
        ends = account.key.rules.expires_at if account.key else None
        if principal is not None and ends is not None and self._clock() >= ends:
            raise key_expired()
        return principal

    def _owner(self, account: AccountRecord) -> Principal | None:
        """Return the caller with a key, expired or not. None means that its tenant is disabled or gone."""
        if account.admin is not None:
            who = account.admin.administrator
            is_known = not who.tenant or self._tenant(who.tenant) is not None
            return Principal(ADMIN_TENANT, account.key_id, who) if is_known else None
        owner = self._tenant(account.key.tenant) if account.key else None
        if account.key is None or owner is None:
            return None
        rules = account.key.rules
        principal = Principal(
            restricted(owner, rules),
            account.key_id,
            counts_as=account.counts_as,
            networks=parse_networks(rules.networks),
        )
        self._principals[account.key_hash] = principal
        return principal

    def _tenant(self, name: str) -> Tenant | None:
        """Return a tenant that is not disabled."""
        record = self.records.get(f"tenant/{name}")
        return None if record is None or record.disabled else record.tenant

    def _put(self, record: AccountRecord) -> None:
        before = self.records.get(record.name)
        if before is not None and before.key_hash != record.key_hash:  # an administrator's key was rotated
            self._remove(record.name)
        self.records[record.name] = record
        if record.is_stripped:
            log.error("account_record_stripped", name=record.name, reason="a gateway of an older release wrote it")
        if record.key_hash:
            self._keys.setdefault(record.key_id, {})[record.key_hash] = record

    def _remove(self, name: str) -> None:
        record = self.records.pop(name, None)
        if record is not None and record.key_hash:
            holders = self._keys[record.key_id]
            if holders.get(record.key_hash) is record:
                del holders[record.key_hash]
            if not holders:
                del self._keys[record.key_id]

    def _tell(self) -> None:
        self._principals.clear()
        self._changed([record.tenant for record in self.records.values() if record.tenant is not None])
