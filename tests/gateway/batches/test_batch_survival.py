"""Batches among gateways that die, stall, and lose their engines and their disk, at random."""

import asyncio
import random

import pytest
from batch_house import Town, chat_line, until
from fakes import BASE

from gateway.batches import parts
from gateway.batches.store import BatchStore
from gateway.core.errors import Fault, unavailable

LINES, OFFICES, PLACES = 300, 3, 12
LEASE_SECONDS = 1.0
MODELS = [BASE, "pirate", "poet"]


class FlakyStore(BatchStore):
    """One whose calls come through, or whose answers get lost, or neither."""

    chance = 0.0
    rng = random.Random(0)

    async def _run(self, script, keys, args):
        if script in ("commit", "release", "renew", "claim", "finished") and self.rng.random() < self.chance:
            if self.rng.random() < 0.5:
                await super()._run(script, keys, args)
            raise unavailable(Fault.REGISTRY_UNAVAILABLE, "the answer got lost")
        return await super()._run(script, keys, args)


class World:
    """Several gateways, one after the other in each place, while misfortunes happen."""

    def __init__(self, town, rng):
        self.town, self.rng = town, rng
        self.offices = {}
        self.dead = []
        self.number = 0
        self.deaths = 0

    async def open(self, place):
        self.number += 1
        office = await self.town.office(f"{place}-{self.number}", lane_capacity=2 * PLACES)
        office.house.engine.pause = 0.02
        store = FlakyStore(self.town.redis, lease_seconds=LEASE_SECONDS)
        store.rng, store.chance = self.rng, 0.02
        object.__setattr__(office.shop, "store", store)
        office.dispatcher._leases._store = store
        await office.dispatcher.__aenter__()
        self.offices[place] = office

    async def kill(self, place):
        office = self.offices.pop(place)
        await office.kill()
        self.deaths += 1
        self.dead.append(office)
        await self.open(place)

    async def stall(self, place):
        """It knows nothing of time for a while: its leases run out, and it works on as if it had them."""
        leases = self.offices[place].dispatcher._leases
        for held in leases._held.values():
            held.close()
        leases.renew = lambda: asyncio.sleep(0)
        await asyncio.sleep(self.rng.uniform(1.2, 1.8) * LEASE_SECONDS)
        del leases.renew

    async def lose_engine(self, place):
        engine = self.offices[place].house.engine
        engine.fail_after, engine.ready = self.rng.randrange(4), False
        await asyncio.sleep(self.rng.uniform(0.05, 0.3))
        engine.fail_after, engine.ready = None, True

    async def break_disk(self, place):
        self.town.folder.is_broken = True
        await asyncio.sleep(self.rng.uniform(0.05, 0.3))
        self.town.folder.is_broken = False

    async def misfortune(self):
        place = self.rng.choice(list(self.offices))
        await self.rng.choice([self.kill, self.kill, self.stall, self.lose_engine, self.break_disk])(place)
        await asyncio.sleep(self.rng.uniform(0.0, 0.2))

    async def close(self):
        for office in self.offices.values():
            await office.dispatcher.__aexit__(None, None, None)


@pytest.mark.parametrize(("seed", "end"), [(1, "completed"), (2, "cancelled")])
async def test_whatever_dies_every_line_is_answered_once(tmp_path, valkey, monkeypatch, seed, end):
    monkeypatch.setattr(parts, "RETRY_SECONDS", 0.1)
    town, rng = Town(tmp_path, valkey, LEASE_SECONDS), random.Random(seed)
    world = World(town, rng)
    for place in range(OFFICES):
        await world.open(place)
    lines = [chat_line(f"{number}", f"{number}", rng.choice(MODELS)) for number in range(LINES)]
    batch = await town.submit(lines)
    ending = asyncio.create_task(town.ended(batch))

    async def has_lines():
        return (await town.store.get(batch.tenant, batch.id)).total > 0

    for count in range(12):
        if not ending.done():
            await (world.kill(0) if count == 1 else world.misfortune())
        if count == 5 and end == "cancelled" and not ending.done():
            await until(has_lines)
            await town.store.cancel(batch.tenant, batch.id)
    ended = await ending
    await world.close()
    output, errors = await town.results(ended)
    assert world.deaths > 0
    assert ended.status == end
    assert (ended.tally.completed, ended.tally.failed) == (len(output), 0)
    assert output.keys() | errors.keys() == {line["custom_id"] for line in lines}
    if end == "completed":
        assert not errors
    else:
        assert {line["error"]["code"] for line in errors.values()} == {"batch_cancelled"}
    await town.assert_clean(*world.offices.values())
    for office in world.dead:
        await office.house.assert_empty()
    await town.files.delete(batch.tenant, batch.input_file_id)
