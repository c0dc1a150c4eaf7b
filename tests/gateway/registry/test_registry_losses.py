"""Keys of a registry that Redis has evicted: gateways write back what they remember, and configure the rest again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from redis.asyncio import Redis

from gateway.accounts.record import account_store, tenant_account
from gateway.accounts.registry import AccountRegistry, open_accounts
from gateway.adapters.record import adapter_store, new_record
from gateway.core.errors import ApiError, Fault
from gateway.core.tenants import Tenant, hash_key
from gateway.registry.log import RegistryLog
from gateway.registry.record import RegistrySnapshot
from tests.gateway.registry.test_registry_records import Names

SPACE, ACCOUNTS = "loralane:adapters:{tiny}:", "loralane:accounts:{all}:"
POETS = [replace(new_record(name, "/a", 1.0), aliases=(f"{name}-alias",)) for name in ("poet", "bard")]
SECRET = "sk-of-the-configuration"
ACME = Tenant("acme")


@pytest.fixture(autouse=True)
def briefly_quiet(monkeypatch):
    """Followers look for losses after this time without changes, instead of a second."""
    monkeypatch.setattr("gateway.registry.store.QUIET_SECONDS", 0.05)
    monkeypatch.setattr("gateway.registry.log.OTHERS_SECONDS", 0.1)


async def evict(client: Redis, space: str, *names: str) -> None:
    await client.delete(*(f"{space}{name}" for name in names))


async def written(client: Redis) -> RegistryLog:
    """A log that follows the adapters' registry, and has written all POETS to it."""
    log = RegistryLog(adapter_store(client, "tiny"), Names(), "adapter")
    await log.start()
    for record in POETS:
        await log.put(record, None)
    return log


@pytest.mark.parametrize(
    "names",
    [
        ("records",),
        ("aliases",),
        ("generation",),
        ("records", "changes"),
        ("records", "aliases", "seeds"),
        ("records", "aliases", "seeds", "generation", "changes"),
    ],
)
async def test_what_was_evicted_is_restored_from_memory(valkey, names):
    log = await written(valkey)
    await evict(valkey, SPACE, *names)
    store = adapter_store(valkey, "tiny")
    async with asyncio.timeout(30):
        while not (await whole(store) and log._mirror.records == (await store.read()).records):
            await asyncio.sleep(0.02)
    await log.put(replace(POETS[0], pinned=True), log._mirror.records["poet"])
    assert log._mirror.records.keys() == {"poet", "bard"}
    await log.close()


async def whole(store) -> bool:
    found = await store.read()
    return bool(found.generation) and found.records.keys() == {"poet", "bard"} and found.num_aliases == 2


async def test_what_others_changed_before_an_eviction_is_not_undone(valkey):
    slow, quick = await written(valkey), RegistryLog(adapter_store(valkey, "tiny"), Names(), "adapter")
    await quick.start()
    await slow.close()
    await quick.remove(quick._mirror.records["bard"], None)
    await quick.put(new_record("monk", "/a", 1.0), None)
    await quick.close()
    await evict(valkey, SPACE, "records")
    await restarted(valkey, slow)
    assert slow._mirror.records.keys() == {"poet", "monk"}


async def test_a_gateway_that_missed_hundreds_of_changes_applies_all_of_them_before_it_restores(valkey):
    slow, store = await written(valkey), adapter_store(valkey, "tiny")
    await slow.close()
    for number in range(120):
        await store.put(new_record(f"monk-{number}", "/a", 1.0), None)
    await store.remove(slow._mirror.records["bard"], None)
    await evict(valkey, SPACE, "records")
    await restarted(valkey, slow)
    assert slow._mirror.records.keys() == {"poet", *(f"monk-{number}" for number in range(120))}


@pytest.mark.parametrize("is_new", [False, True])
async def test_a_gateway_that_does_not_know_all_changes_lets_one_that_does_restore(valkey, monkeypatch, is_new):
    monkeypatch.setattr("gateway.registry.log.OTHERS_SECONDS", 1.0)
    slow, quick = await behind(valkey)
    if is_new:
        slow = RegistryLog(adapter_store(valkey, "tiny"), Names(), "adapter")
    await evict(valkey, SPACE, "records", "changes")
    late = asyncio.create_task(restarted(valkey, slow))
    await asyncio.sleep(0.2)
    await restarted(valkey, quick)
    await late
    assert slow._mirror.records.keys() == quick._mirror.records.keys() == {"poet"}


async def test_a_gateway_whose_missed_changes_are_gone_restores_what_it_knows_if_none_knows_more(valkey):
    slow, _ = await behind(valkey)
    await evict(valkey, SPACE, "records", "changes")
    await restarted(valkey, slow)
    assert slow._mirror.records.keys() == {"poet", "bard"}
    assert await whole(adapter_store(valkey, "tiny"))


async def test_a_gateway_that_is_behind_adds_nothing_to_records_whose_generation_was_evicted(valkey):
    slow, _ = await behind(valkey)
    await evict(valkey, SPACE, "generation")
    await restarted(valkey, slow)
    assert slow._mirror.records.keys() == {"poet"}


async def behind(client: Redis) -> tuple[RegistryLog, RegistryLog]:
    """Two closed logs, the first of which has missed that the second removed an adapter."""
    slow, quick = await written(client), RegistryLog(adapter_store(client, "tiny"), Names(), "adapter")
    await slow.close()
    await quick.start()
    await quick.remove(quick._mirror.records["bard"], None)
    await quick.close()
    return slow, quick


async def restarted(client: Redis, log: RegistryLog) -> None:
    """Follow the registry again for a moment, from what a closed log knows."""
    again = RegistryLog(adapter_store(client, "tiny"), log._mirror, "adapter")
    await again.start()
    await again.close()


async def test_a_start_after_an_eviction_applies_the_configuration_again(valkey):
    async with configured(valkey):
        pass
    await evict(valkey, ACCOUNTS, "records")
    async with configured(valkey) as registry:
        assert registry.authenticate(SECRET).tenant == ACME


async def test_a_start_without_an_eviction_keeps_what_operators_removed(valkey):
    async with configured(valkey) as registry:
        await registry.delete("acme")
    async with configured(valkey) as registry:
        with pytest.raises(ApiError):
            registry.authenticate(SECRET)


@asynccontextmanager
async def configured(client: Redis) -> AsyncIterator[AccountRegistry]:
    """A gateway's registry with a configured tenant, until the block ends."""
    async with open_accounts(account_store(client), lambda tenants: None, [(ACME, [hash_key(SECRET)])]) as registry:
        yield registry


async def test_a_change_that_a_failover_loses_is_an_error_to_try_again(valkey):
    """The primary took it, but the promoted replica has never got it: the registry is read anew without it."""
    store = account_store(valkey)
    log = RegistryLog(store, Names(), "tenant")
    await log.start()

    async def put_and_fail_over(record, previous, *, seed="", at=None):
        log._mirror.apply_snapshot(RegistrySnapshot(7))
        return 7

    store.put = put_and_fail_over
    with pytest.raises(ApiError) as caught:
        await log.put(tenant_account(ACME, 1.0), None)
    assert caught.value.fault is Fault.REGISTRY_UNAVAILABLE
    await log.close()
