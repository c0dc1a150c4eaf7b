"""Adapters of two base models in one Redis: two gateways that give one name to both serve the same one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from fakes import FakeEngine, write_adapter
from redis.asyncio import Redis

from gateway.adapters.admin import AdapterAdmin
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
        self.admin = AdapterAdmin(list(self.models.values()), sources)

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


async def test_gateways_that_give_one_name_to_two_models_at_once_agree_on_the_first(valkey, tmp_path):
    source = str(write_adapter(tmp_path, "tone"))
    async with open_gateway(valkey, tmp_path) as one, open_gateway(valkey, tmp_path) as two:
        await asyncio.gather(one.models["small"].load("tone", source), two.models["large"].load("tone", source))
        for gateway in (one, two):
            await until_known("tone", *gateway.models.values())
            assert gateway.serving("tone") == "large"
            errors = {status.base_model: status.error for status in await gateway.admin.statuses()}
            assert (errors["large"], errors["small"][:10]) == ("", "not served")
        await one.admin.of("tone", "large").unload("tone", 0.0)
        async with asyncio.timeout(PATIENCE_SECONDS):
            while two.serving("tone") != "small":
                await asyncio.sleep(0.01)
        assert [status.error for status in await one.admin.statuses()] == [""]


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
