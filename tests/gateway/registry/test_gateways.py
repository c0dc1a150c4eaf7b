"""The list of gateways in Redis: each tells of itself, drains when it is asked to, and is forgotten when it ends."""

from __future__ import annotations

import asyncio

import pytest
from fakes import build_gateway_app

from gateway.core.errors import ApiError, Fault
from gateway.core.lifecycle import Lifecycle
from gateway.registry import gateways
from gateway.registry.gateways import GatewayDirectory, gateway_directory


def directory(redis, name, running=0):
    made = GatewayDirectory(redis, Lifecycle(), lambda: running)
    made.address = f"http://{name}:8000"
    return made


async def test_gateways_know_each_other(valkey):
    one, two = directory(valkey, "one", running=3), directory(valkey, "two")
    await one.beat()
    await two.beat()
    found = await two.gateways()
    assert [(each.address, each.state, each.requests) for each in found] == [
        ("http://one:8000", "serving", 3),
        ("http://two:8000", "serving", 0),
    ]
    assert len({each.id for each in found}) == 2


async def test_a_gateway_that_tells_nothing_is_forgotten(valkey):
    one, two = directory(valkey, "one"), directory(valkey, "two")
    await one.beat()
    await valkey.delete(one._key("one", one.own.id))  # as if it had expired
    assert await two.gateways() == [two.own]
    assert not await valkey.exists(one._key("ids"))


async def test_a_gateway_that_has_ended_is_not_listed(valkey):
    life, two = Lifecycle(), directory(valkey, "two")
    async with gateway_directory(valkey, life, lambda: 0, "loralane:") as one:
        one.address = "http://one:8000"
        await one.beat()
        assert len(await two.gateways()) == 2
    assert await two.gateways() == [two.own]


@pytest.mark.parametrize("stop", [False, True])
async def test_another_gateway_drains_when_it_is_asked_to(valkey, stop):
    one, two = directory(valkey, "one"), directory(valkey, "two")
    await one.beat()
    keeping = asyncio.create_task(one.keep())
    try:
        told = await two.drain(one.own.id, stop=stop)
    finally:
        one.close()
        await keeping
    assert (told.id, told.state) == (one.own.id, "draining")
    assert one._life.is_draining and one._life.is_alone
    assert one._life.ending.is_set() is stop
    assert not two._life.is_draining


async def test_a_gateway_drains_itself_without_redis(tmp_path):
    gateway_app = await build_gateway_app(tmp_path)  # over a Redis that is away
    directory = gateway_app.services.gateways
    assert (await directory.drain(directory.own.id, stop=False)).state == "draining"
    assert gateway_app.gateway.lifecycle.is_draining
    with pytest.raises(ApiError) as caught:
        await directory.gateways()
    assert caught.value.fault is Fault.REGISTRY_UNAVAILABLE


async def test_an_unknown_gateway_and_one_that_does_not_answer_are_reported(valkey, monkeypatch):
    monkeypatch.setattr(gateways, "ECHO_SECONDS", 0.01)
    one, two = directory(valkey, "one"), directory(valkey, "two")
    with pytest.raises(ApiError, match="there is no gateway 'none'") as caught:
        await two.drain("none", stop=False)
    assert caught.value.fault is Fault.INVALID_REQUEST
    await one.beat()
    with pytest.raises(ApiError, match="has not told yet that it drains") as caught:
        await two.drain(one.own.id, stop=False)
    assert caught.value.fault is Fault.REGISTRY_UNAVAILABLE


async def test_only_a_gateway_that_serves_at_the_same_address_of_the_machine_is_a_peer(valkey):
    one, two, other = directory(valkey, "here"), directory(valkey, "here"), directory(valkey, "there")
    far = directory(valkey, "here")
    far._life.id = f"far-{far._life.id}"
    await other.beat()
    await far.beat()
    assert not await one.has_peer()
    await two.beat()
    assert await one.has_peer()
    await two.drain(two.own.id, stop=False)
    assert not await one.has_peer()


async def test_of_two_gateways_that_drain_at_once_neither_is_the_peer_of_the_other(valkey):
    one, two = directory(valkey, "here"), directory(valkey, "here")
    await one.beat()
    await two.beat()
    one._life.drain()
    two._life.drain()
    assert await asyncio.gather(one.has_peer(), two.has_peer()) in ([False, False], [True, False], [False, True])


async def test_a_gateway_knows_no_peer_while_redis_is_away(tmp_path):
    gateway_app = await build_gateway_app(tmp_path)
    assert not await gateway_app.services.gateways.has_peer()
