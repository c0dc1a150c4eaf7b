"""The adapter registry on a real Valkey: shared, lasting, honest about conflicts and about a store that is away."""

from __future__ import annotations

import asyncio
import shutil
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest
from fakes import FakeEngine, write_adapter
from grpc_app import until
from patient_valkey import PatientValkey
from redis.asyncio import Redis

from engine.pb import engine_pb2 as pb
from gateway.adapters import mirror, waiting
from gateway.adapters.record import MAX_ALIASES, AdapterRecord, adapter_store, decode_record, encode_record
from gateway.adapters.registry import AdapterRegistry
from gateway.adapters.sources import LocalSources
from gateway.core.errors import ApiError, Fault, invalid_request
from gateway.redis.connect import connect_server
from gateway.registry.store import RedisRecordStore, StoreAway

BASE = "tiny"


class RegistryCluster:
    """The adapter registries of several gateways, each with its own engine, over one store and one folder."""

    def __init__(self, stack: AsyncExitStack, root, client: Redis) -> None:
        self.stack, self.root, self.client = stack, root, client

    async def open(self, engine: FakeEngine | None = None, **options) -> AdapterRegistry:
        store, sources = adapter_store(self.client, BASE), LocalSources([self.root])
        registry = AdapterRegistry(engine or FakeEngine(), store, sources, base_names=(BASE,), **options)
        self.stack.push_async_callback(registry.close)
        await registry.start()
        await registry.restore()
        return registry


@pytest.fixture
async def cluster(tmp_path, valkey):
    for name in ("pirate", "poet"):
        write_adapter(tmp_path, name)
    async with AsyncExitStack() as stack:
        yield RegistryCluster(stack, tmp_path, valkey)


def engine_of(registry: AdapterRegistry) -> FakeEngine:
    return registry._statuses._engine


async def refusal(work) -> ApiError:
    with pytest.raises(ApiError) as caught:
        await work
    return caught.value


def refused_pick(registry, name) -> ApiError:
    with pytest.raises(ApiError) as caught:
        registry.pick(name)
    return caught.value


def serves(registry, name, version) -> bool:
    hold = registry._mirror.served.get(name)
    return hold is not None and hold.adapter_hash == version


# What gateways share


async def test_a_change_on_one_gateway_binds_on_the_other(cluster):
    here, there = await cluster.open(), await cluster.open()
    first = await here.load("poet", "poet", tenants=["acme"])
    await until(lambda: serves(there, "poet", first.version))
    assert there.records == here.records
    assert set(engine_of(there).paths) == {first.version}

    await there.alias("poet", "bard")
    await until(lambda: here.aliases == {"bard": "poet"})
    await there.pin("poet", True)
    await until(lambda: engine_of(here).pinned == {first.version})
    assert (here.records["poet"].tenants, here.tenants) == (("acme",), {"poet": ("acme",)})

    write_adapter(cluster.root, "poet", "better weights")
    assert await here.reload("poet")
    second = here.records["poet"].version
    await until(lambda: serves(there, "poet", second) and engine_of(there).unloaded == [first.version])
    assert (there.records["poet"].aliases, engine_of(there).pinned) == (("bard",), {second})

    await there.unload("poet")
    await until(lambda: not here.records and not engine_of(here).paths)
    assert (here.aliases, here.tenants) == ({}, {})


async def test_one_of_two_simultaneous_changes_loses(cluster):
    here, there = await cluster.open(), await cluster.open()
    results = await asyncio.gather(here.load("poet", "poet"), there.load("poet", "pirate"), return_exceptions=True)
    [lost] = [result for result in results if isinstance(result, ApiError)]
    assert (lost.http_status, lost.code, lost.should_retry) == (409, "adapter_conflict", False)
    [won] = [result for result in results if isinstance(result, AdapterRecord)]
    for registry in (here, there):
        await until(lambda registry=registry: serves(registry, "poet", won.version))
        assert set(engine_of(registry).paths) == {won.version}, "what lost is not left in its engine"


async def test_a_gateway_that_was_behind_loses_too(cluster):
    here, there = await cluster.open(), await cluster.open()
    await here.load("poet", "poet")
    await until(lambda: "poet" in there.records)
    stale = here.records["poet"]
    await there.pin("poet", True)
    await until(lambda: here.records["poet"].pinned)
    lost = await refusal(here._log.put(replace(stale, tenants=("acme",)), stale))
    assert lost.code == "adapter_conflict"
    assert here.records["poet"].tenants == ()


async def test_two_changes_of_one_name_on_one_gateway_conflict(cluster):
    here = await cluster.open()
    results = await asyncio.gather(here.load("a", "poet"), here.load("a", "poet"), return_exceptions=True)
    assert [isinstance(result, ApiError) for result in results] == [False, True]
    assert serves(here, "a", results[0].version)


async def test_missed_changes_are_noticed(cluster):
    """More of them than the log keeps."""
    here, there = await cluster.open(), await cluster.open()
    await here.load("poet", "poet")
    await until(lambda: "poet" in there.records)
    await there._log.close()
    store = adapter_store(cluster.client, BASE)
    for number in range(1100):
        record = replace(here.records["poet"], name=f"a{number}")
        await store.put(record, None)
    await store.remove(replace((await store.read()).records["a7"]), None)
    there._log._closing = False
    await there.start()
    await until(lambda: len(there.records) == 1100)
    await until(lambda: len(here.records) == 1100)
    assert "a7" not in there.records
    assert here.records == there.records


async def test_a_gateway_goes_on_with_the_old_version_until_it_has_the_new(cluster):
    here, there = await cluster.open(), await cluster.open()
    old = (await here.load("poet", "poet")).version
    await until(lambda: serves(there, "poet", old))
    engine_of(there).rejected = "the disk is slow"
    write_adapter(cluster.root, "poet", "better weights")
    await here.reload("poet")
    await until(lambda: "poet" in there._mirror.errors)
    assert there.pick("poet").version == old
    [status] = await there.statuses()
    assert (status.version, status.served_version) == (here.records["poet"].version, old)
    assert "the disk is slow" in status.error
    engine_of(there).rejected = ""
    await until(lambda: serves(there, "poet", here.records["poet"].version))
    assert (await there.statuses())[0].error == ""


async def test_other_files_than_the_registry_names_are_not_served(cluster):
    here = await cluster.open()
    await here.load("poet", "poet")
    store = adapter_store(cluster.client, BASE)
    await store.put(replace(here.records["poet"], name="twin", version="0" * 32), None)
    await until(lambda: "twin" in here._mirror.errors)
    assert "reload it" in (await here.status("twin")).error
    assert refused_pick(here, "twin").http_status == 503
    await here.reload("twin")
    assert here.pick("twin").version == here.records["poet"].version


# What lasts


async def test_the_registry_outlives_its_gateways(cluster):
    here = await cluster.open()
    await here.load("poet", "poet", tenants=["acme"])
    await here.alias("poet", "bard")
    await here.pin("poet", True)
    await here.close()
    later = await cluster.open()
    assert later.records == here.records
    assert later.aliases == {"bard": "poet"}
    await until(lambda: engine_of(later).pinned == {later.pick("poet").version})


async def test_a_restarted_engine_gets_its_adapters_back(cluster):
    here = await cluster.open()
    for name in ("pirate", "poet"):
        await here.load(name, name)
    await here.pin("pirate", True)
    engine = engine_of(here)
    engine.paths.clear()
    engine.pinned.clear()
    write_adapter(cluster.root, "poet", "changed on disk")
    await here.restore()
    assert set(engine.paths) == {here.pick(name).version for name in ("pirate", "poet")}
    assert {record.version for record in here.records.values()} == set(engine.paths)
    await until(lambda: engine.pinned == {here.pick("pirate").version})


class Remote(LocalSources):
    """`remote://NAME` is fetched into a folder of its own; what is fetched is counted."""

    def __init__(self, root) -> None:
        super().__init__([root])
        self.root, self.fetched, self.is_up = root, [], True

    async def fetch(self, source):
        name = source.removeprefix("remote://")
        if name == source:
            return await super().fetch(source)
        if not self.is_up:
            raise invalid_request(f"{source} is away", "lora_path")
        self.fetched.append(source)
        return write_adapter(self.root, f"cache-{name}", "weights")


async def test_what_was_fetched_is_not_fetched_again_for_a_new_engine(cluster):
    sources = Remote(cluster.root)
    here = AdapterRegistry(FakeEngine(), adapter_store(cluster.client, BASE), sources, base_names=(BASE,))
    cluster.stack.push_async_callback(here.close)
    await here.start()
    await here.restore()
    await here.load("poet", "remote://poet")
    await here.load("bard", "remote://bard")
    sources.is_up = False
    shutil.rmtree(cluster.root / "cache-bard")
    await here.restore()
    assert here.pick("poet").version
    assert refused_pick(here, "bard") and "is away" in (await here.status("bard")).error
    sources.is_up = True
    await until(lambda: "bard" in here._mirror.served)
    assert sources.fetched == ["remote://poet", "remote://bard", "remote://bard"]


async def test_restoring_goes_on_after_an_adapter_that_is_lost(cluster):
    here = await cluster.open()
    for name in ("pirate", "poet"):
        await here.load(name, name)
    (cluster.root / "pirate").rename(cluster.root / "elsewhere")
    await here.restore()
    assert here.pick("poet").version
    assert refused_pick(here, "pirate").code == "engine_unavailable"
    assert "not a folder" in (await here.status("pirate")).error
    (cluster.root / "elsewhere").rename(cluster.root / "pirate")
    await until(lambda: "pirate" in here._mirror.served)


async def test_restoring_does_not_bring_back_what_was_unloaded_meanwhile(cluster, monkeypatch):
    here = await cluster.open()
    await here.load("poet", "poet")
    load_adapter = engine_of(here).load_adapter

    async def load_while_an_operator_unloads(path):
        info = await load_adapter(path)
        await here.unload("poet")
        return info

    engine_of(here).paths.clear()
    monkeypatch.setattr(engine_of(here), "load_adapter", load_while_an_operator_unloads)
    await here.restore()
    assert (dict(here.records), engine_of(here).paths) == ({}, {})


async def test_a_flushed_store_is_written_back(cluster):
    here, there = await cluster.open(), await cluster.open()
    await here.load("poet", "poet")
    await here.alias("poet", "bard")
    await until(lambda: there.aliases == {"bard": "poet"})
    generation = here._mirror.generation
    await cluster.client.flushall()
    await until(lambda: here._mirror.generation > generation and there._mirror.generation > generation)
    assert (await refusal(there.load("bard", "pirate"))).code == "adapter_conflict"
    assert (await adapter_store(cluster.client, BASE).read()).records == here.records == there.records
    assert engine_of(here).unloaded == []


def test_a_record_survives_its_encoding(cluster):
    record = AdapterRecord("n", "s", "/p", "v", 8, ("q_proj",), 3, 5, 1.5, 2.5, ("acme",), ("a",), True, 0, ("told",))
    assert decode_record(encode_record(record), 7) == replace(record, generation=7)
    newer = encode_record(record)[:-1] + b',"colour":"red"}'
    assert decode_record(newer, 0) == record


# What the configuration says


async def test_an_operators_change_wins_until_the_configuration_changes(cluster):
    first = await cluster.open()
    await first.seed("poet", "poet")
    await first.seed("gone", "poet")
    await first.load("poet", "pirate", replace=True)
    await first.unload("gone")
    await first.close()
    second = await cluster.open()
    await second.seed("poet", "poet")
    await second.seed("gone", "poet")
    assert {name: record.source for name, record in second.records.items()} == {"poet": "pirate"}
    write_adapter(cluster.root, "bard")
    await second.seed("poet", "bard")
    await second.seed("gone", "bard")
    assert {record.source for record in second.records.values()} == {"bard"}
    assert len(second.records) == 2


async def test_gateways_that_start_together_seed_once(cluster):
    here, there = await cluster.open(), await cluster.open()
    await asyncio.gather(here.seed("poet", "poet"), there.seed("poet", "poet"))
    await until(lambda: "poet" in here._mirror.served and "poet" in there._mirror.served)
    assert here.records == there.records


async def test_a_gateway_that_seeds_just_after_another_waits_for_its_own_engine(cluster, monkeypatch):
    """The other's record arrives while this engine lets go of what the seed had loaded."""
    first, engine, news = await cluster.open(), FakeEngine(), asyncio.Event()
    changes, load, unload = RedisRecordStore.changes, engine.load_adapter, engine.unload_adapter
    second = AdapterRegistry(
        engine, adapter_store(cluster.client, BASE), LocalSources([cluster.root]), base_names=(BASE,)
    )

    async def late_changes(store, after: int):
        if store is second._store:
            await news.wait()
        return await changes(store, after)

    async def load_after_the_other(path: str):
        engine.load_adapter = load
        await first.seed("poet", "poet")
        return await load(path)

    async def unload_beside_the_change(adapter: str, drain_seconds: float) -> int:
        news.set()
        await until(lambda: "poet" in second.records)
        return await unload(adapter, drain_seconds)

    monkeypatch.setattr(RedisRecordStore, "changes", late_changes)
    engine.load_adapter, engine.unload_adapter = load_after_the_other, unload_beside_the_change
    cluster.stack.push_async_callback(second.close)
    await second.start()
    await second.restore()
    await second.seed("poet", "poet")
    assert serves(second, "poet", first.records["poet"].version)


async def test_what_is_configured_has_to_be_there(cluster):
    here = await cluster.open()
    assert "not a folder" in await here.seed("x", "missing")
    assert await here.seed("poet", "poet") == ""
    (cluster.root / "poet").rename(cluster.root / "elsewhere")
    again = await cluster.open()
    assert "not a folder" in await again.seed("poet", "poet")
    assert "not a folder" in (await again.status("poet")).error


async def test_a_configured_adapter_that_is_broken_is_listed_with_its_error_and_tried_again(cluster, monkeypatch):
    monkeypatch.setattr(waiting, "FIRST_RETRY_SECONDS", 0.01)
    here = await cluster.open()
    assert "not a folder" in await here.seed("x", "x")
    assert here.catalog.knows("x") and (await here.status("x")).served_version == ""
    assert "not a folder" in (await here.status("x")).error
    refused = refused_pick(here, "x")
    assert refused.fault is Fault.ENGINE_UNAVAILABLE
    assert "not a folder" in (await refusal(here.reload("x"))).message
    write_adapter(cluster.root, "x")
    await until(lambda: "x" in here._mirror.served)
    await until(lambda: not here._waiting.records)
    assert (await here.status("x")).error == "" and here.pick("x").version


async def test_a_broken_adapter_that_is_configured_yields_to_operators_and_to_the_configuration(cluster):
    here = await cluster.open()
    for name in ("x", "y", "z", "w"):
        await here.seed(name, "missing")
    assert await here.unload("x") == 0
    await here.load("y", "poet")
    here.configure({"w": "missing"})
    assert sorted(here.records) == ["w", "y"]
    write_adapter(cluster.root, "missing")
    assert await here.reload("w") and (await here.status("w")).error == ""
    await here.seed("y", "missing")
    assert (await here.status("y")).source == "poet", "an operator had loaded it meanwhile"
    await here.seed("y", "pirate")
    assert (await here.status("y")).source == "pirate", "the configuration wins where it changes"


async def test_an_operators_adapter_is_not_replaced_by_the_retries_of_a_configured_one(cluster, monkeypatch):
    monkeypatch.setattr(waiting, "FIRST_RETRY_SECONDS", 0.01)
    here, there = await cluster.open(), await cluster.open()
    for registry in (here, there):
        assert "not a folder" in await registry.seed("x", "conf")
    version = (await here.load("x", "poet")).version
    await until(lambda: serves(there, "x", version))
    assert (await there.status("x")).error == ""
    write_adapter(cluster.root, "conf", "others")
    await until(lambda: here._waiting._task.done() and there._waiting._task.done())
    assert await there.reload("x") is False
    assert [registry.records["x"].source for registry in (here, there)] == ["poet", "poet"]


async def test_a_pin_does_not_end_the_retries_of_a_new_configured_source(cluster, monkeypatch):
    monkeypatch.setattr(waiting, "FIRST_RETRY_SECONDS", 0.01)
    here = await cluster.open()
    await here.seed("x", "poet")
    await here.seed("x", "conf")
    await here.pin("x", True)
    write_adapter(cluster.root, "conf", "others")
    await until(lambda: here.records["x"].source == "conf")


async def test_a_new_engine_does_not_end_the_retries_of_a_new_configured_source(cluster):
    here = await cluster.open()
    await here.seed("x", "poet")
    await here.seed("x", "conf")
    write_adapter(cluster.root, "poet", "changed on disk")
    engine_of(here).paths.clear()
    await here.restore()
    assert here.pick("x").version and "not a folder" in (await here.status("x")).error


async def test_an_unload_of_a_waiting_adapter_holds_on_all_gateways(cluster, monkeypatch):
    monkeypatch.setattr(waiting, "FIRST_RETRY_SECONDS", 0.01)
    here, there = await cluster.open(), await cluster.open()
    for registry in (here, there):
        await registry.seed("x", "conf")
    assert await here.unload("x") == 0
    await until(lambda: not there.records)
    write_adapter(cluster.root, "conf")
    await until(lambda: here._waiting._task.done() and there._waiting._task.done())
    assert await there.seed("x", "conf") == "" and not there.records and not here.records
    write_adapter(cluster.root, "conf2")
    assert await there.seed("x", "conf2") == "" and there.records["x"].source == "conf2"


class SlowSources(LocalSources):
    """From the second fetch of `conf` on, it waits until `go` is set. It fails while `is_there` is off."""

    def __init__(self, root) -> None:
        super().__init__([root])
        self.fetching, self.go, self.is_there = asyncio.Event(), asyncio.Event(), False

    async def fetch(self, source):
        if source != "conf":
            return await super().fetch(source)
        if self.is_there:
            self.fetching.set()
            await self.go.wait()
        return await super().fetch("pirate" if self.is_there else "conf")


@pytest.fixture
async def retrying(cluster, monkeypatch):
    """A gateway that fetches the configured adapter `x` for the second time, and its sources."""
    monkeypatch.setattr(waiting, "FIRST_RETRY_SECONDS", 0.01)
    sources = SlowSources(cluster.root)
    here = AdapterRegistry(FakeEngine(), adapter_store(cluster.client, BASE), sources, base_names=(BASE,))
    cluster.stack.push_async_callback(here.close)
    await here.start()
    await here.restore()
    assert "not a folder" in await here.seed("x", "conf")
    sources.is_there = True
    await until(sources.fetching.is_set)
    return here, sources


async def unload_x(registry: AdapterRegistry) -> None:
    assert await registry.unload("x") == 0


async def forget_x(registry: AdapterRegistry) -> None:
    registry.configure({})


@pytest.mark.parametrize("is_there", [True, False], ids=["found", "missing"])
@pytest.mark.parametrize("give_up", [unload_x, forget_x])
async def test_an_adapter_given_up_during_a_retry_stays_away(give_up, is_there, retrying):
    here, sources = retrying
    await give_up(here)
    sources.is_there = is_there
    sources.go.set()
    await until(lambda: here._waiting._task.done())
    assert (dict(here.records), engine_of(here).paths) == ({}, {})


async def test_an_adapter_given_up_while_the_engine_loads_it_stays_away(retrying, monkeypatch):
    here, sources = retrying
    load_adapter = engine_of(here).load_adapter

    async def load_while_given_up(path):
        here.configure({})
        return await load_adapter(path)

    monkeypatch.setattr(engine_of(here), "load_adapter", load_while_given_up)
    sources.go.set()
    await until(lambda: here._waiting._task.done())
    assert (dict(here.records), engine_of(here).paths) == ({}, {})


async def test_an_operator_loads_another_adapter_while_a_retry_fetches(retrying):
    here, sources = retrying
    version = (await here.load("x", "poet")).version
    sources.go.set()
    await until(lambda: here._waiting._task.done())
    assert here.records["x"].source == "poet" and serves(here, "x", version)


async def test_a_gateway_with_another_configuration_does_not_end_a_retry(retrying, cluster):
    here, sources = retrying
    there = await cluster.open()
    assert await there.seed("x", "poet") == ""
    await until(lambda: "x" in here.records)
    sources.go.set()
    await until(lambda: {gateway.records["x"].source for gateway in (here, there)} == {"conf"})
    assert await here.seed("x", "conf") == "" and await here._store.seed("x") == "conf"


async def test_a_seed_that_another_gateway_removes_is_applied_anew(retrying, cluster):
    """The other gateway's operator knows nothing of the new source."""
    here, sources = retrying
    there = await cluster.open()
    await there.load("x", "poet")
    await until(lambda: "x" in here.records)
    await there.unload("x")
    await until(lambda: "x" not in here.records)
    sources.go.set()
    await until(lambda: "x" in there.records)
    assert there.records["x"].source == here.records["x"].source == "conf"


async def test_a_newly_configured_source_wins_over_a_retry_of_the_former_one(retrying):
    here, sources = retrying
    assert await here.seed("x", "poet") == ""
    sources.go.set()
    await until(lambda: here._waiting._task.done())
    assert here.records["x"].source == "poet"


@pytest.mark.parametrize("configured", [True, False])
async def test_a_bug_in_one_retry_does_not_end_the_retries(configured, cluster, monkeypatch):
    for module in (waiting, mirror):
        monkeypatch.setattr(module, "FIRST_RETRY_SECONDS", 0.01)
    here, there = await cluster.open(), await cluster.open()
    calls, fetch = [], there._loader.sources.fetch
    if configured:
        await there.seed("x", "x")
    write_adapter(cluster.root, "x")

    async def failing_once(source):
        calls.append(source)
        if len(calls) == 1:
            raise RuntimeError("a bug")
        return await fetch(source)

    monkeypatch.setattr(there._loader.sources, "fetch", failing_once)
    if not configured:
        await here.load("x", "x")
    await until(lambda: "x" in there._mirror.served)
    assert len(calls) > 1 and (await there.status("x")).error == ""


async def seeded_again(cluster, *seeds: str) -> str:
    """Return the source of the adapter `x` after a gateway has started, whose configuration had each of `seeds`."""
    later = await cluster.open()
    for source in seeds:
        assert await later.seed("x", source) == ""
    return later.records["x"].source if "x" in later.records else ""


@pytest.mark.parametrize("content", ["pirate", "poet"], ids=["another", "the same as before"])
async def test_what_an_operator_loads_over_a_waiting_adapter_outlasts_a_restart(content, cluster):
    here = await cluster.open()
    await here.seed("x", "poet")
    assert "not a folder" in await here.seed("x", "conf")
    await here.load("x", content, replace=True)
    await here.close()
    write_adapter(cluster.root, "conf")
    assert await seeded_again(cluster, "conf") == content
    assert await seeded_again(cluster, "poet") == "poet", "the configuration wins where it changes"


@pytest.mark.parametrize("change", ["load", "unload"])
async def test_what_an_operator_does_while_a_configured_adapter_is_first_fetched_outlasts_a_restart(change, cluster):
    sources = SlowSources(cluster.root)
    here = AdapterRegistry(FakeEngine(), adapter_store(cluster.client, BASE), sources, base_names=(BASE,))
    cluster.stack.push_async_callback(here.close)
    await here.start()
    await here.restore()
    await here.seed("x", "pirate")
    sources.is_there = True
    seeding = asyncio.create_task(here.seed("x", "conf"))
    await until(sources.fetching.is_set)
    await (here.load("x", "poet", replace=True) if change == "load" else here.unload("x"))
    sources.go.set()
    assert await seeding == ""
    write_adapter(cluster.root, "conf")
    assert await seeded_again(cluster, "conf") == ("poet" if change == "load" else "")


async def test_a_gateway_that_does_not_apply_a_new_configuration_itself_counts_it_as_applied_by_a_load(cluster):
    """Only the first of the gateway processes that read a configuration again applies it."""
    first, other = await cluster.open(), await cluster.open()
    for registry in (first, other):
        await registry.seed("x", "missing")
        registry.configure({"x": "conf"})
    await first.seed("x", "conf")
    assert other.records["x"].source == "conf", "what it tries again is the new source"
    await other.load("x", "poet")
    write_adapter(cluster.root, "conf")
    assert await seeded_again(cluster, "conf") == "poet"


async def test_a_load_does_not_count_what_another_configuration_has_replaced_as_applied(cluster):
    old, new = await cluster.open(), await cluster.open()
    await old.seed("x", "poet")
    await until(lambda: "x" in new.records)
    await new.seed("x", "pirate")
    write_adapter(cluster.root, "bard")
    await until(lambda: old.records["x"].source == "pirate")
    await old.load("x", "bard", replace=True)
    assert await seeded_again(cluster, "pirate") == "bard"


async def test_a_load_that_loses_against_the_configuration_is_a_conflict(cluster, monkeypatch):
    here, there = await cluster.open(), await cluster.open()
    await here.seed("x", "conf")
    write_adapter(cluster.root, "conf")
    put = here._store.put

    async def put_after_the_other(*args, **options):
        await there.seed("x", "conf")
        return await put(*args, **options)

    monkeypatch.setattr(here._store, "put", put_after_the_other)
    assert (await refusal(here.load("x", "poet"))).code == "adapter_conflict"
    await until(lambda: here.records["x"].source == "conf" and "x" in here._mirror.served)


async def test_a_configured_adapter_of_another_models_name_is_refused(cluster):
    here = await cluster.open()
    assert (await refusal(here.seed(BASE, "poet"))).param == "lora_name"
    assert (await refusal(here.seed("a/../b", "poet"))).param == "lora_name"
    assert not here.records


# Redis away


@pytest.fixture
async def mortal(tmp_path):
    """A Valkey of this test's own that can be stopped and started."""
    path = tmp_path / "v.sock"
    server = PatientValkey(port=0, data_dir=tmp_path, unix_socket_path=path, appendonly="yes", appendfsync="always")
    server.start()
    for name in ("pirate", "poet"):
        write_adapter(tmp_path, name)
    async with AsyncExitStack() as stack, connect_server(f"unix://{path}") as client:
        yield server, RegistryCluster(stack, tmp_path, client)
    if server.is_running():
        server.stop()


async def test_while_redis_is_away_reads_go_on_and_changes_are_refused(mortal):
    server, cluster = mortal
    here, there = await cluster.open(), await cluster.open()
    await here.load("poet", "poet")
    await here.alias("poet", "bard")
    await until(lambda: there.aliases == {"bard": "poet"})
    server.terminate()

    assert (here.pick("poet").version, there.aliases) == (here.records["poet"].version, {"bard": "poet"})
    changes = [
        here.load("pirate", "pirate"),
        here.unload("poet"),
        here.pin("poet", True),
        here.alias("poet", "b"),
        here.allow("poet", ["acme"]),
    ]
    for change in changes:
        error = await refusal(change)
        assert (error.http_status, error.code) == (503, "registry_unavailable")
    assert set(engine_of(here).paths) == {here.records["poet"].version}
    assert list(here.records) == ["poet"]
    await there.restore()  # an engine may restart meanwhile
    assert there.pick("poet")

    server.start()
    assert await here.reload("poet") is False
    while not await is_possible(lambda: here.load("pirate", "pirate")):
        await asyncio.sleep(0.05)
    await until(lambda: "pirate" in there._mirror.served)
    assert there.aliases == {"bard": "poet"}


async def is_possible(change) -> bool:
    try:
        await change()
    except ApiError as error:
        if error.code != "registry_unavailable":
            raise
        return False
    return True


async def test_a_gateway_that_starts_without_redis_serves_what_is_configured(mortal):
    server, cluster = mortal
    before = await cluster.open()
    await before.seed("poet", "poet")
    await before.unload("poet")
    await before.close()
    server.terminate()
    here = await cluster.open()
    await here.seed("poet", "poet")
    await here.seed("pirate", "pirate")
    assert here.pick("poet").version
    server.start()
    await until(lambda: here._mirror.generation > 0)
    assert list(here.records) == ["pirate"], "an operator had unloaded the other"
    assert (await adapter_store(cluster.client, BASE).read()).records == here.records
    await until(lambda: len(engine_of(here).unloaded) == 1)


async def test_what_was_kept_just_as_the_registry_came_back_is_registered(cluster):
    """Its loading took longer than the outage: by now the registry is only followed, not read."""
    here, there = await cluster.open(), await cluster.open()
    record = await there.load("poet", "poet")
    await until(lambda: "poet" in here.records)
    here._log.keep(replace(record, name="pirate", generation=0))
    await here.load("other", "poet")
    await until(lambda: "pirate" in there.records and here.records["pirate"].generation > 0)
    assert await here.unload("pirate") == 0


# Names


async def test_what_operators_should_know_of_an_adapter_is_in_its_record(cluster):
    engine = FakeEngine()
    engine.warnings = ("'x' is 1: PEFT does not know this field, so it has no effect",)
    here = await cluster.open(engine, compare=lambda folder, template: (f"{folder.name} has another chat template",))
    there = await cluster.open()
    await here.load("pirate", "pirate")
    for registry in (here, there):
        await until(lambda registry=registry: "pirate" in registry.records)
        assert (await registry.status("pirate")).warnings == (*engine.warnings, "pirate has another chat template")


async def test_an_alias_is_one_adapters_alone(cluster):
    here = await cluster.open()
    for name in ("pirate", "poet"):
        await here.load(name, name)
    await here.alias("pirate", "captain")
    await here.alias("pirate", "captain")  # said twice is said once
    assert here.records["pirate"].aliases == ("captain",)
    for taken in (here.alias("poet", "captain"), here.alias("poet", "pirate"), here.load("captain", "poet")):
        assert (await refusal(taken)).code == "adapter_conflict"
    assert (await refusal(here.alias("poet", BASE))).param == "alias"
    assert (await refusal(here.alias("poet", "a:b"))).param == "alias"
    assert (await refusal(here.alias("unknown", "n"))).code == "model_not_found"
    assert (await refusal(here.alias("poet", "captain", remove=True))).code == "model_not_found"
    await here.unload("pirate")
    await here.alias("poet", "captain")
    assert here.aliases == {"captain": "poet"}
    await here.alias("poet", "captain", remove=True)
    assert here.aliases == {}


async def test_aliases_are_bounded(cluster):
    here = await cluster.open()
    record = await here.load("poet", "poet")
    await here._log.put(replace(record, aliases=tuple(f"a{number}" for number in range(MAX_ALIASES))), record)
    assert (await refusal(here.alias("poet", "more"))).param == "alias"


async def test_tenants_have_names(cluster):
    here = await cluster.open()
    assert (await refusal(here.load("poet", "poet", tenants=["a b"]))).param == "tenants"
    await here.load("poet", "poet")
    assert (await refusal(here.allow("poet", ["*"]))).param == "tenants"
    assert (await here.allow("poet", ["b", "a", "b"])).tenants == ("a", "b")


# Versions


async def test_reloading_what_has_not_changed_does_nothing(cluster):
    here = await cluster.open()
    record = await here.load("poet", "poet")
    assert await here.reload("poet") is False
    assert here.records["poet"] == record
    assert engine_of(here).unloaded == []


async def test_a_version_stays_until_its_last_request_has_ended(cluster):
    here = await cluster.open()
    old = (await here.load("poet", "poet")).version
    write_adapter(cluster.root, "poet", "better weights")
    with here.using(here.pick("poet").version):
        with here.using(old):
            assert await here.reload("poet")
            new = here.pick("poet").version
            assert new != old
        await asyncio.sleep(0)
        assert set(engine_of(here).paths) == {old, new}
        assert here.names == {new: ["poet"], old: ["poet"]}
    await here.wait_until_released()
    assert engine_of(here).unloaded == [old]
    assert here.names == {new: ["poet"]}


async def test_an_unload_waits_for_requests_no_longer_than_it_was_told(cluster):
    here = await cluster.open(drain_seconds=600.0)
    version = (await here.load("poet", "poet")).version
    with here.using(version):
        assert await here.unload("poet", 0.01) == 2, "what the engine says it has aborted"
    assert (await refusal(here.unload("poet"))).code == "model_not_found"


async def test_a_version_given_up_twice_has_the_longer_time(cluster):
    """The second time it is held for a moment only, as by a load that is refused."""
    here = await cluster.open(drain_seconds=600.0)
    version = (await here.load("poet", "poet")).version
    with here.using(version):
        unload = asyncio.create_task(here.unload("poet"))
        await until(lambda: "poet" not in here.records)
        async with here._versions.loaded(cluster.root / "poet"):
            pass
        await asyncio.sleep(0.05)
        assert not engine_of(here).unloaded
    assert await unload in (0, 2)
    await here.wait_until_released()


async def test_an_unload_asked_for_again_waits_for_the_same_end(cluster):
    here = await cluster.open()
    version = (await here.load("poet", "poet")).version
    with here.using(version):
        first = asyncio.create_task(here.unload("poet"))
        await until(lambda: "poet" not in here.records)
        again = asyncio.create_task(here.unload("poet"))
        await asyncio.sleep(0)
        assert not first.done()
        assert not again.done()
    assert (await first, await again) == (2, 2)
    assert engine_of(here).unloaded == [version]


async def test_others_drain_as_long_as_the_operator_said(cluster):
    here, there = await cluster.open(), await cluster.open(drain_seconds=600.0)
    version = (await here.load("poet", "poet")).version
    await until(lambda: serves(there, "poet", version))
    with there.using(version):
        await here.unload("poet", 0.01)
        await until(lambda: engine_of(there).unloaded == [version])


async def test_one_version_under_two_names_is_freed_with_the_last(cluster):
    here = await cluster.open()
    for name in ("poet", "twin"):
        await here.load(name, "poet")
    await here.pin("twin", True)
    assert list(here.names.values()) == [["poet", "twin"]]
    assert await here.unload("poet") == 0
    assert engine_of(here).unloaded == []
    assert len(engine_of(here).pinned) == 1
    assert await here.unload("twin") == 2
    assert len(engine_of(here).unloaded) == 1


async def test_a_pin_goes_with_the_name_that_asked_for_it(cluster):
    here = await cluster.open()
    for name in ("poet", "twin"):
        await here.load(name, "poet")
    await here.pin("twin", True)
    await here.unload("twin")
    await until(lambda: not engine_of(here).pinned)
    assert here.pick("poet")


async def test_a_pin_the_engine_refuses_is_told(cluster):
    here = await cluster.open()
    await here.load("poet", "poet")
    engine_of(here).unpinnable = "pins hold every adapter page"
    await here.pin("poet", True)
    await until(lambda: "pins hold every adapter page" in here._mirror.errors.get("poet", ""))


async def test_a_version_wanted_again_while_the_engine_lets_it_go_is_loaded_again(cluster, monkeypatch):
    here = await cluster.open()
    version = (await here.load("poet", "poet")).version
    engine, unload_adapter, loads = engine_of(here), engine_of(here).unload_adapter, []

    async def unload_while_an_operator_loads(version, drain_seconds):
        loads.append(asyncio.create_task(here.load("twin", "poet")))
        await until(lambda: engine.loads.count(version) == 2)
        return await unload_adapter(version, drain_seconds)

    monkeypatch.setattr(engine, "unload_adapter", unload_while_an_operator_loads)
    await here.unload("poet")
    await asyncio.gather(*loads)
    assert set(engine.paths) == {version}
    assert engine.loads.count(version) == 3


async def test_an_evicted_adapter_whose_folder_is_gone_has_an_error_until_it_is_back(cluster):
    here = await cluster.open()
    version, poet = (await here.load("poet", "poet")).version, cluster.root / "poet"
    poet.rename(cluster.root / "elsewhere")
    for state, words in (("host", ""), ("disk", f"{poet} is gone")):
        engine_of(here).picture = pb.EngineStats(adapters=[pb.AdapterStats(adapter=version, state=state)])
        error = (await here.status("poet")).error
        assert words in error and bool(error) == bool(words)
    (cluster.root / "elsewhere").rename(poet)
    assert (await here.status("poet")).error == ""
    engine_of(here).picture.adapters[0].error = "it has changed"
    assert "could not read the adapter again: it has changed" in (await here.status("poet")).error


async def test_a_load_during_which_the_version_went_is_made_again(cluster, monkeypatch):
    """The engine reads it, lets it go for another name's sake, and only then its answer gets through."""
    here = await cluster.open()
    version = (await here.load("poet", "poet")).version
    engine, load_adapter = engine_of(here), engine_of(here).load_adapter

    async def answer_late(path):
        info = await load_adapter(path)
        if engine.loads.count(version) == 2:
            await here.unload("poet")
        return info

    monkeypatch.setattr(engine, "load_adapter", answer_late)
    await here.load("twin", "poet")
    assert set(engine.paths) == {version}


@pytest.mark.parametrize("change", ["load", "pin"])
async def test_a_change_that_loses_against_an_unload_is_a_conflict_of_its_own(change, cluster, monkeypatch):
    here, there = await cluster.open(), await cluster.open()
    if change == "pin":
        await here.load("poet", "poet")
    put = here._log.put

    async def then_unloaded(*args, **options):
        written = await put(*args, **options)
        await until(lambda: there.records == here.records)
        await there.unload("poet", 0.0)
        await until(lambda: "poet" not in here.records)
        return written

    monkeypatch.setattr(here._log, "put", then_unloaded)
    refused = await refusal(here.load("poet", "poet") if change == "load" else here.pin("poet", True))
    assert (refused.http_status, refused.code) == (409, "adapter_unloaded")
    assert (await refusal(here.status_after_change("poet"))).fault is Fault.ADAPTER_UNLOADED


async def test_a_load_across_an_engines_restart_is_served_by_the_new_engine(cluster, monkeypatch):
    here = await cluster.open()
    engine, put = engine_of(here), here._store.put

    async def put_while_the_engine_restarts(*args, **options):
        engine.paths.clear()
        await here.restore()
        return await put(*args, **options)

    monkeypatch.setattr(here._store, "put", put_while_the_engine_restarts)
    await here.load("poet", "poet")
    await until(lambda: "poet" in here._mirror.served)
    assert set(engine.paths) == {here.pick("poet").version}


async def test_unloading_needs_no_engine_and_loading_does(cluster):
    here = await cluster.open()
    await here.load("poet", "poet")
    engine_of(here).ready = False
    assert await here.unload("poet") == 0
    error = await refusal(here.load("poet", "poet"))
    assert (error.code, dict(here.records)) == ("engine_unavailable", {})


async def test_statuses_need_no_engine(cluster):
    here = await cluster.open()
    await here.load("poet", "poet")
    engine_of(here).ready = False
    assert [(status.name, status.tier) for status in await here.statuses()] == [("poet", "disk")]


async def test_a_redis_too_slow_for_one_write_does_not_keep_a_gateway_from_starting(cluster, monkeypatch):
    """A disk that is busy reading adapters can hold up Redis for seconds, just while they are preloaded."""
    here = await cluster.open()
    put, calls = here._store.put, []

    async def slow_once(*args, **options):
        calls.append(args)
        if len(calls) == 1:
            raise StoreAway("Redis does not answer")
        return await put(*args, **options)

    monkeypatch.setattr(here._store, "put", slow_once)
    await here.seed("poet", "poet")
    assert here.pick("poet").version
    await until(lambda: here.records["poet"].generation > 0)
    assert (await adapter_store(cluster.client, BASE).read()).records == here.records
