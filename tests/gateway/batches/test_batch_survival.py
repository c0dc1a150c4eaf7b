"""Batches among gateways that die, stall, and lose their engines and their disk, at random."""

import asyncio
import random

import pytest
from batch_cluster import BatchCluster, chat_line, until
from fakes import BASE

from gateway.batches import parts
from gateway.batches.store import BatchStore
from gateway.core.errors import Fault, unavailable

LINES, MEMBERS, PLACES = 150, 3, 6
LEASE_SECONDS = 1.0
MODELS = [BASE, "pirate", "poet"]


class FlakyStore(BatchStore):
    """A store that fails at random: the call is lost before it reaches Redis, or its reply is lost afterwards."""

    chance = 0.0
    rng = random.Random(0)

    async def _run(self, script, keys, args):
        if script in ("commit", "release", "renew", "claim", "finished") and self.rng.random() < self.chance:
            if self.rng.random() < 0.5:
                await super()._run(script, keys, args)
            raise unavailable(Fault.REGISTRY_UNAVAILABLE, "the answer got lost")
        return await super()._run(script, keys, args)


class FailingCluster:
    """A cluster whose gateways stall, die and lose their engines. Another gateway takes the place of each that dies."""

    def __init__(self, cluster, rng):
        self.cluster, self.rng = cluster, rng
        self.members = {}
        self.dead = []
        self.number = 0
        self.deaths = 0

    async def open(self, place):
        self.number += 1
        member = await self.cluster.add_member(f"{place}-{self.number}", lane_capacity=2 * PLACES)
        member.gateway_app.engine.pause = 0.02
        store = FlakyStore(self.cluster.redis, lease_seconds=LEASE_SECONDS)
        store.rng, store.chance = self.rng, 0.02
        object.__setattr__(member.context, "store", store)
        member.dispatcher._leases._store = store
        await member.dispatcher.__aenter__()
        self.members[place] = member

    async def kill(self, place):
        member = self.members.pop(place)
        await member.kill()
        self.deaths += 1
        self.dead.append(member)
        await self.open(place)

    async def stall(self, place):
        """It knows nothing of time for a while: its leases run out, and it works on as if it had them."""
        leases = self.members[place].dispatcher._leases
        for held in leases._held.values():
            held.close()
        leases.renew = lambda: asyncio.sleep(0)
        await asyncio.sleep(self.rng.uniform(1.2, 1.8) * LEASE_SECONDS)
        del leases.renew

    async def lose_engine(self, place):
        engine = self.members[place].gateway_app.engine
        engine.fail_after, engine.ready = self.rng.randrange(4), False
        await asyncio.sleep(self.rng.uniform(0.05, 0.3))
        engine.fail_after, engine.ready = None, True

    async def break_disk(self, place):
        self.cluster.folder.is_broken = True
        await asyncio.sleep(self.rng.uniform(0.05, 0.3))
        self.cluster.folder.is_broken = False

    async def misfortune(self):
        place = self.rng.choice(list(self.members))
        await self.rng.choice([self.kill, self.kill, self.stall, self.lose_engine, self.break_disk])(place)
        await asyncio.sleep(self.rng.uniform(0.0, 0.2))

    async def close(self):
        for member in self.members.values():
            await member.dispatcher.__aexit__(None, None, None)


@pytest.mark.parametrize(("seed", "end"), [(1, "completed"), (2, "cancelled")])
async def test_whatever_dies_every_line_is_answered_once(tmp_path, valkey, monkeypatch, seed, end):
    monkeypatch.setattr(parts, "RETRY_SECONDS", 0.1)
    cluster, rng = BatchCluster(tmp_path, valkey, LEASE_SECONDS), random.Random(seed)
    failing = FailingCluster(cluster, rng)
    for place in range(MEMBERS):
        await failing.open(place)
    lines = [chat_line(f"{number}", f"{number}", rng.choice(MODELS)) for number in range(LINES)]
    batch = await cluster.submit(lines)
    ending = asyncio.create_task(cluster.ended(batch))

    async def has_lines():
        return (await cluster.store.get(batch.tenant, batch.id)).lines.total > 0

    for count in range(12):
        if not ending.done():
            await (failing.kill(0) if count == 1 else failing.misfortune())
        if count == 5 and end == "cancelled" and not ending.done():
            await until(has_lines)
            await cluster.store.cancel(batch.tenant, batch.id)
    ended = await ending
    await failing.close()
    output, errors = await cluster.results(ended)
    assert failing.deaths > 0
    assert ended.status == end
    assert (ended.tally.completed, ended.tally.failed) == (len(output), 0)
    assert output.keys() | errors.keys() == {line["custom_id"] for line in lines}
    if end == "completed":
        assert not errors
    else:
        assert {line["error"]["code"] for line in errors.values()} == {"batch_cancelled"}
    await cluster.assert_clean(*failing.members.values())
    for member in failing.dead:
        await member.gateway_app.assert_empty()
    await cluster.files.delete(batch.tenant, batch.input_file_id)
