"""The engines of one base model on a cluster: which are wanted, which leaves, and what gateways are told of them."""

from __future__ import annotations

import asyncio

import pytest
from local_engines import ask, until

from engine.core.config import LaneGoals
from engine.core.messages.requests import Lane
from gateway.cluster.lease import Lease
from gateway.cluster.model import LEAVE_SECONDS, ModelOnRay
from gateway.cluster.reports import EngineReport, Reports
from gateway.config.cluster import RayConfig

GOALS = {lane: LaneGoals(1.0, 0.1, 0.99, 60.0) for lane in Lane}


class Scripted:
    """A scaler that wants what it is told."""

    def __init__(self, count):
        self.count, self.loads, self.drained = count, [], 0

    def wanted(self, loads, now, drained):
        self.loads, self.drained = loads, drained
        return self.count


@pytest.fixture
async def model():
    model = ModelOnRay("m", RayConfig(min=1, max=4), GOALS, "orders of {}".format, None)
    model.scaler = Scripted(2)
    yield model
    await model.close()


def reports(**addresses):
    return Reports({f"m/{name.replace('_', '-')}": EngineReport(address) for name, address in addresses.items()})


async def test_engines_are_wanted_until_they_listen_and_then_published(model, engines):
    await model.look(Reports(), 0.0)
    assert {name: wanted.orders for name, wanted in model.wanted.items()} == {
        "m/ray-0": "orders of ray-0",
        "m/ray-1": "orders of ray-1",
    }
    assert model.addresses == {} and model.scaler.loads == []
    where = {"ray_0": engines.start("a").target.address}
    await model.look(reports(**where), 1.0)
    assert model.addresses == {"ray-0": where["ray_0"]} and len(model.wanted) == 2
    await until(lambda: model._engines["ray-0"].load is not None)
    await model.look(reports(**where), 2.0)
    assert [load.slots for load in model.scaler.loads] == [16]


async def test_an_engine_that_an_operator_drains_is_told_apart_from_one_that_does_not_serve_yet(model, engines):
    where = {"ray_0": engines.start("a").target.address}
    await model.look(Reports(), 0.0)
    await model.look(reports(**where), 1.0)
    await until(lambda: model._engines["ray-0"].load is not None)
    await model._engines["ray-0"].client.drain(True)
    await until(lambda: model._engines["ray-0"].is_drained)
    await model.look(reports(**where), 2.0)
    assert (model.scaler.loads, model.scaler.drained) == ([], 1)


async def test_the_idle_engine_leaves_once_it_drains(model, engines):
    where = {"ray_0": engines.start("a").target.address, "ray_1": engines.start("b").target.address}
    await model.look(Reports(), 0.0)
    await model.look(reports(**where), 1.0)
    client = model._engines["ray-0"].client
    await client.wait_ready()
    stream = client.submit(ask("r", length=2000))
    await until(lambda: model._engines["ray-0"].requests == 1 and model._engines["ray-1"].load is not None)
    model.scaler.count = 1
    await model.look(reports(**where), 2.0)
    assert set(model.addresses) == {"ray-0", "ray-1"}, "gateways still know an engine that drains"
    await until(lambda: model._engines["ray-1"].is_empty)
    await model.look(reports(**where), 3.0)
    assert set(model.addresses) == {"ray-0"} and set(model.wanted) == {"m/ray-0"}
    await stream.aclose()


async def test_an_engine_that_does_not_get_rid_of_its_requests_ends_after_a_while(model, engines):
    where = {"ray_0": engines.start("a").target.address}
    model.scaler.count = 1
    await model.look(Reports(), 0.0)
    await model.look(reports(**where), 1.0)
    client = model._engines["ray-0"].client
    await client.wait_ready()
    stream = client.submit(ask("r", length=3000))
    await until(lambda: model._engines["ray-0"].requests == 1)
    model.scaler.count = 0
    await model.look(reports(**where), 2.0)
    await until(lambda: model._engines["ray-0"].news.draining)
    await model.look(reports(**where), 1.0 + LEAVE_SECONDS)
    assert set(model.wanted) == {"m/ray-0"}
    await model.look(reports(**where), 2.0 + LEAVE_SECONDS)
    assert not model.wanted
    await stream.aclose()


async def test_an_engine_that_moves_is_published_at_its_new_address(model, engines):
    model.scaler.count = 1
    await model.look(Reports(), 0.0)
    for name in ("a", "b"):
        address = engines.start(name).target.address
        await model.look(reports(ray_0=address), 1.0)
        assert model.addresses == {"ray-0": address}
    await model.look(Reports({"m/ray-0": EngineReport("", "its node is gone")}), 2.0)
    assert model.addresses == {} and set(model.wanted) == {"m/ray-0"}


async def test_one_gateway_at_a_time_owns_the_engines(valkey):
    first, second = Lease(valkey, "t:"), Lease(valkey, "t:")
    assert await first.hold() and await first.hold()
    assert not await second.hold()
    await second.give_up()
    assert not await second.hold(), "only the owner can give the lease up"
    await first.give_up()
    assert await second.hold() and not await first.hold()
    assert 0 < await valkey.pttl("t:engines-owner") <= 10_000
    await asyncio.gather(first.give_up(), second.give_up())
    assert await first.hold()
