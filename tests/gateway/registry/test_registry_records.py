"""What a registry does with records that cannot be read, and with sources that were applied before."""

from structlog.testing import capture_logs

from gateway.accounts.record import ACCOUNTS, account_store, tenant_account
from gateway.core.tenants import Tenant
from gateway.registry.log import RegistryLog
from gateway.registry.memory import MemoryRecordStore


class Names:
    """A mirror that knows what it was told."""

    def __init__(self):
        self.generation, self.records = 0, {}

    def apply_change(self, change):
        self.generation = change.generation
        self.records.pop(change.name, None)
        if change.record:
            self.records[change.name] = change.record

    def apply_snapshot(self, snapshot):
        self.generation, self.records = snapshot.generation, dict(snapshot.records)

    def put(self, record):
        self.records[record.name] = record


async def test_a_record_that_cannot_be_read_keeps_no_other_from_being_served(valkey):
    store = account_store(valkey)
    await store.put(tenant_account(Tenant("acme"), 1.0), None)
    for name, text in {"broken": b"2 {", "typed": b'3 {"name": 1}', "bare": b"x"}.items():
        await valkey.hset("loralane:accounts:{all}:records", f"tenant/{name}", text)
    mirror = Names()
    followed = RegistryLog(store, mirror, "account")
    with capture_logs() as logs:
        await followed.start()
        await followed.put(tenant_account(Tenant("globex"), 1.0), None)
        await followed.close()
    assert set(mirror.records) == {"tenant/acme", "tenant/globex"}
    named = {line["name"] for line in logs if line["event"] == "registry_record_unreadable"}
    assert named == {"tenant/broken", "tenant/typed", "tenant/bare"}


async def test_a_seed_that_was_applied_before_changes_nothing_and_is_no_conflict(valkey):
    acme = tenant_account(Tenant("acme"), 1.0)
    for store in (account_store(valkey), MemoryRecordStore(ACCOUNTS)):
        assert await store.put(acme, None, seed="a") > 0
        assert await store.put(acme, None, seed="a") == 0
