"""Adapters of two base models in one Redis: a name belongs to one model, on all gateways."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeEngine, write_adapter
from grpc_app import until
from redis.asyncio import Redis

from gateway.adapters import names
from gateway.adapters.admin import AdapterAdmin
from gateway.adapters.names import AdapterNames, NameLocks
from gateway.adapters.record import adapter_store
from gateway.adapters.registry import AdapterRegistry
from gateway.adapters.sources import LocalSources
from gateway.core.errors import ApiError, Fault
from gateway.core.routing import find

MODELS = ("large", "small")
PATIENCE_SECONDS = 30.0


class OneGateway:
    """The registries of one gateway, by base model in the order of its configuration."""

    def __init__(self, valkey: Redis, root: Path) -> None:
        sources = LocalSources([root])
        self.models = {
            name: AdapterRegistry(FakeEngine(), adapter_store(valkey, name), sources, base_names=(name,))
            for name in MODELS
        }
        self.admin = AdapterAdmin(list(self.models.values()), sources, locks=NameLocks(valkey))

    def serving(self, name: str) -> str | None:
        """Return the base model that serves a name."""
        target = find(name, [registry.catalog for registry in self.models.values()])
        return None if target is None else MODELS[target.model]


@asynccontextmanager
async def open_gateway(valkey: Redis, root: Path) -> AsyncIterator[OneGateway]:
    gateway = OneGateway(valkey, root)
    for registry in gateway.models.values():
        await registry.start()
        await registry.restore()
    try:
        yield gateway
    finally:
        for registry in gateway.models.values():
            await registry.close()


async def until_known(name: str, *registries: AdapterRegistry) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not all(name in registry.records for registry in registries):
            await asyncio.sleep(0.01)


async def until_gone(name: str, *registries: AdapterRegistry) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while any(name in registry.records for registry in registries):
            await asyncio.sleep(0.01)


async def refusal(change: Awaitable[Any]) -> ApiError:
    with pytest.raises(ApiError) as caught:
        await change
    return caught.value


async def test_gateways_on_which_two_models_have_one_name_agree_on_the_first(valkey, tmp_path):
    """A gateway that starts without Redis cannot see that another model has the name."""
    source = str(write_adapter(tmp_path, "tone"))
    async with open_gateway(valkey, tmp_path) as one, open_gateway(valkey, tmp_path) as two:
        await one.models["small"].load("tone", source)
        two.models["large"].share_names(AdapterNames([two.models["large"]]))
        await two.models["large"].load("tone", source)
        for gateway in (one, two):
            await until_known("tone", *gateway.models.values())
            assert gateway.serving("tone") == "large"
            errors = {status.base_model: status.error for status in await gateway.admin.statuses()}
            assert (errors["large"], errors["small"][:10]) == ("", "not served")
        await one.admin.of("tone", "large").unload("tone", 0.0)
        await until_gone("tone", two.models["large"])
        assert two.serving("tone") == "small"
        assert [status.error for status in await one.admin.statuses()] == [""]


@pytest.mark.parametrize("gateways", [1, 2])
async def test_of_two_simultaneous_loads_of_one_name_into_two_models_one_is_refused(valkey, tmp_path, gateways):
    sources = [str(write_adapter(tmp_path, name)) for name in ("tone", "other")]
    async with open_gateway(valkey, tmp_path) as one, open_gateway(valkey, tmp_path) as two:
        other = (one, two)[gateways - 1]
        loads = one.models["small"].load("tone", sources[0]), other.models["large"].load("tone", sources[1])
        outcomes = await asyncio.gather(*loads, return_exceptions=True)
        [refused] = [outcome for outcome in outcomes if isinstance(outcome, ApiError)]
        assert refused.fault is Fault.ADAPTER_CONFLICT
        [status] = await one.admin.statuses()
        assert status.error == ""


@pytest.mark.parametrize("gateways", [1, 2])
async def test_of_an_alias_and_a_load_of_one_name_at_the_same_time_one_is_refused(valkey, tmp_path, gateways):
    for name in ("tone", "mood"):
        write_adapter(tmp_path, name)
    async with open_gateway(valkey, tmp_path) as one, open_gateway(valkey, tmp_path) as two:
        other = (one, two)[gateways - 1]
        await one.models["small"].load("tone", "tone")
        await until_known("tone", two.models["small"])
        both = one.models["small"].alias("tone", "mood"), other.models["large"].load("mood", "mood")
        outcomes = await asyncio.gather(*both, return_exceptions=True)
        [refused] = [outcome for outcome in outcomes if isinstance(outcome, ApiError)]
        assert refused.fault is Fault.ADAPTER_CONFLICT


async def test_the_lock_of_a_gateway_that_died_delays_a_name_until_it_expires(valkey, tmp_path, monkeypatch):
    monkeypatch.setattr(names, "LOCK_SECONDS", 0.2)
    write_adapter(tmp_path, "tone")
    locks = NameLocks(valkey)
    async with open_gateway(valkey, tmp_path) as gateway, locks.locked("tone"):
        await gateway.models["large"].load("tone", "tone")
        assert gateway.serving("tone") == "large"
        monkeypatch.setattr(names, "LOCK_SECONDS", 100.0)
        monkeypatch.setattr(names, "WAIT_SECONDS", 0.1)
        write_adapter(tmp_path, "mood")
        async with locks.locked("mood"):
            refused = await refusal(gateway.models["large"].load("mood", "mood"))
            assert refused.fault is Fault.ADAPTER_CONFLICT
        await gateway.models["large"].load("mood", "mood")


async def test_an_unloaded_adapter_that_still_drains_hides_no_adapter_of_another_model(valkey, tmp_path):
    large, small = (str(write_adapter(tmp_path, name)) for name in MODELS)
    async with open_gateway(valkey, tmp_path) as gateway:
        registries = gateway.models
        first = await registries["large"].load("tone", large)
        with registries["large"].using(first.version):
            unloading = asyncio.create_task(registries["large"].unload("tone", 60.0))
            await until_gone("tone", registries["large"])
            while not registries["large"].is_draining("tone"):
                await asyncio.sleep(0)
            assert gateway.admin.of("tone") is registries["large"], "the call is about the only one there is"
            await registries["small"].load("tone", small)
            assert gateway.admin.of("tone") is registries["small"]
            assert await gateway.admin.to_load("tone", small) is registries["small"]
            await gateway.admin.of("tone").unload("tone", 0.0)
            assert not registries["small"].records
        await unloading


async def test_what_still_drains_does_not_decide_which_model_a_load_is_for(valkey, tmp_path):
    folder = write_adapter(tmp_path, "tone")
    async with open_gateway(valkey, tmp_path) as gateway:
        registry = gateway.models["large"]
        first = await registry.load("tone", str(folder))
        (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "small"}')
        with registry.using(first.version):
            unloading = asyncio.create_task(registry.unload("tone", 60.0))
            while not registry.is_draining("tone"):
                await asyncio.sleep(0)
            assert await gateway.admin.to_load("tone", str(folder)) is gateway.models["small"]
        await unloading


async def test_a_configuration_that_is_nested_too_deep_cannot_be_read(valkey, tmp_path):
    folder = write_adapter(tmp_path, "tone")
    (folder / "adapter_config.json").write_text('{"x": ' + "[" * 50_000)
    async with open_gateway(valkey, tmp_path) as gateway:
        with pytest.raises(ApiError, match="cannot be read"):
            await gateway.admin.to_load("tone", str(folder))


async def test_a_gguf_file_names_no_model(valkey, tmp_path):
    (tmp_path / "tone.gguf").touch()
    async with open_gateway(valkey, tmp_path) as gateway:
        with pytest.raises(ApiError) as caught:
            await gateway.admin.to_load("tone", str(tmp_path / "tone.gguf"))
        assert caught.value.message == "set base_model to one of large, small: the adapter names none"
        registry = await gateway.admin.to_load("tone", str(tmp_path / "tone.gguf"), base_model="small")
        assert registry is gateway.models["small"]


async def test_a_name_that_another_gateway_gave_to_another_model_is_refused(valkey, tmp_path):
    source = str(write_adapter(tmp_path, "tone"))
    async with open_gateway(valkey, tmp_path) as one, open_gateway(valkey, tmp_path) as two:
        await one.models["large"].load("tone", source)
        await one.models["large"].alias("tone", "mood")
        await until_known("tone", two.models["large"])
        async with asyncio.timeout(PATIENCE_SECONDS):
            while two.serving("mood") is None:
                await asyncio.sleep(0.01)
        for name in ("tone", "mood"):
            with pytest.raises(ApiError) as caught:
                await two.models["small"].load(name, source)
            assert caught.value.fault is Fault.ADAPTER_CONFLICT
            assert "of the base model 'large'" in caught.value.message


async def test_a_seed_that_was_applied_before_does_not_stand_in_the_way_of_a_later_owner(valkey, tmp_path):
    """The configuration preloads an adapter into one model, and an operator moves its name to another."""
    source = str(write_adapter(tmp_path, "tone"))
    async with open_gateway(valkey, tmp_path) as gateway:
        await gateway.models["large"].seed("tone", source)
        await gateway.models["large"].unload("tone", 0.0)
        await gateway.models["small"].load("tone", source)
    async with open_gateway(valkey, tmp_path) as restarted:
        await until_known("tone", restarted.models["small"])
        await restarted.models["large"].seed("tone", source)
        assert restarted.serving("tone") == "small"
        with pytest.raises(ApiError) as refused:
            await restarted.models["large"].seed("tone", str(write_adapter(tmp_path, "other")))
        assert refused.value.fault is Fault.ADAPTER_CONFLICT


async def test_an_adapter_that_the_configuration_names_for_another_model_moves_there(valkey, tmp_path):
    source = str(write_adapter(tmp_path, "tone"))
    async with open_gateway(valkey, tmp_path) as running, open_gateway(valkey, tmp_path) as gateway:
        await running.models["large"].seed("tone", source)
        await running.models["large"].alias("tone", "mood")
        await running.models["large"].allow("tone", ["acme"])
        await running.models["large"].load("tone", source, replace=True, chat_template="{{ messages }}")
        await until_known("tone", gateway.models["large"])
        await until(lambda: gateway.models["large"].chat_template("tone"))
        for home, former in (("small", "large"), ("large", "small")):
            await gateway.models[home].seed("tone", source)
            for one in (gateway, running):
                await until_known("tone", one.models[home])
                await until_gone("tone", one.models[former])
                assert (one.serving("tone"), one.serving("mood")) == (home, home)
                record = one.models[home].records["tone"]
                assert (record.aliases, record.tenants, record.source) == (("mood",), ("acme",), source)
                assert record.chat_template == "{{ messages }}"


async def test_gateways_that_start_together_with_a_moved_adapter_move_it_once(valkey, tmp_path):
    source = str(write_adapter(tmp_path, "tone"))
    async with open_gateway(valkey, tmp_path) as one, open_gateway(valkey, tmp_path) as two:
        await one.models["large"].seed("tone", source)
        await until_known("tone", two.models["large"])
        await asyncio.gather(*(gateway.models["small"].seed("tone", source) for gateway in (one, two)))
        for gateway in (one, two):
            await until_known("tone", gateway.models["small"])
            await until_gone("tone", gateway.models["large"])
            assert [status.error for status in await gateway.admin.statuses()] == [""]


async def test_an_adapter_that_the_other_model_cannot_serve_stays_where_it_is(valkey, tmp_path):
    source = str(write_adapter(tmp_path, "tone"))
    async with open_gateway(valkey, tmp_path) as gateway:
        await gateway.models["large"].seed("tone", source)
        gateway.models["small"]._statuses._engine.rejected = "its shapes are others"
        assert "its shapes are others" in await gateway.models["small"].seed("tone", source)
        assert gateway.serving("tone") == "large"
        assert [status.base_model for status in await gateway.admin.statuses()] == ["large"]


async def test_a_configured_name_that_an_operator_gave_to_another_model_is_refused_with_the_command(valkey, tmp_path):
    """What the operator loaded, perhaps from a folder that is gone, is not given up for the configuration."""
    source, another = (str(write_adapter(tmp_path, name)) for name in ("tone", "another"))
    async with open_gateway(valkey, tmp_path) as gateway:
        large = gateway.models["large"]
        await large.seed("tone", source)
        await large.load("tone", another, replace=True)
        await large.alias("tone", "mood")
        message = (await refusal(gateway.models["small"].seed("tone", source))).message
        assert "`loralane adapters unload tone --base-model large`" in message
        message = (await refusal(gateway.models["small"].seed("mood", source))).message
        assert "`loralane adapters alias tone mood --remove`" in message
        await large.unload("tone", 0.0)
        await gateway.models["small"].seed("tone", source)
        assert gateway.serving("tone") == "small"
