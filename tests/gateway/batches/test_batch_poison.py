"""A line that takes processes with it is singled out and fails by name; its neighbours do not."""

import asyncio
import json
import multiprocessing
import signal

import batch_worker
from batch_cluster import BatchCluster, chat_line, until
from fakes import ids_of

from engine.rpc.stream import CrashesEngines
from gateway.batches.quarantine import Quarantine
from gateway.batches.trial import MOST_MARKS

LINES, LEASE_SECONDS = 20, 0.5
POISON = "venom"
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.gateway.conftest", "batch_worker"])


class CrashedStream:
    life, engine, reason, handover = "first", "engine-0", "home", None

    def __aiter__(self):
        return self

    async def __anext__(self):
        raise CrashesEngines("two engine processes crashed while they computed this request")

    async def aclose(self):
        """Nothing was begun."""


class Processes:
    """Gateways that take turns, each of which dies as soon as a poisonous line reaches its engine."""

    def __init__(self, cluster, poison):
        self.cluster, self.poison = cluster, ids_of(poison)
        self.died_with = []
        """Numbers of requests that were under way at each death."""
        self.poisoned = asyncio.Event()

    async def open(self, number):
        member = await self.cluster.add_member(f"{number}")
        gateway_app = member.gateway_app
        gateway_app.engine.pause = 0.002

        def reply(request):
            size = len(self.poison)
            if self.poison in {request.prompt_ids[at : at + size] for at in range(len(request.prompt_ids))}:
                self.poisoned.set()
                raise ConnectionAbortedError("the process dies of this")
            return "ok"

        gateway_app.engine.reply = reply
        await member.dispatcher.__aenter__()
        return member

    async def run(self, batch):
        """Until the batch has ended."""
        ending, number = asyncio.create_task(self.cluster.ended(batch)), 0
        while not ending.done():
            member = await self.open(number)
            number += 1
            dying = asyncio.create_task(self.poisoned.wait())
            await asyncio.wait((ending, dying), return_when=asyncio.FIRST_COMPLETED)
            if dying.done():
                self.died_with.append(len(member.gateway_app.gateway.live))
                await self.die(member)
            else:
                dying.cancel()
                await member.dispatcher.__aexit__(None, None, None)
        return await ending

    async def die(self, member):
        """Nothing that a dead process would have said is heard."""

        async def silent(*_):
            raise AssertionError("a dead process says nothing")

        for name in ("end_trial", "release", "commit"):
            setattr(member.context.store, name, silent)
        await member.kill()
        self.poisoned.clear()


async def test_a_poisonous_line_fails_by_name_and_its_neighbours_are_answered(tmp_path, valkey):
    cluster = BatchCluster(tmp_path, valkey, LEASE_SECONDS)
    processes = Processes(cluster, POISON)
    batch = await cluster.submit([chat_line(f"{n}", POISON if n == 7 else f"{n}") for n in range(LINES)])
    ended = await processes.run(batch)
    output, errors = await cluster.results(ended)
    assert ended.status == "completed" and set(errors) == {"7"}
    assert errors["7"]["error"]["code"] == "process_lost" and "not tried again" in errors["7"]["error"]["message"]
    assert set(output) == {f"{number}" for number in range(LINES)} - {"7"}
    assert len(processes.died_with) == 1 + MOST_MARKS
    assert processes.died_with[1:] == [1] * MOST_MARKS, "suspects are run alone"


async def test_a_line_that_makes_engines_crash_fails_by_name_and_is_not_tried_again(tmp_path, valkey):
    cluster = BatchCluster(tmp_path, valkey)
    batch = await cluster.submit([chat_line(f"{n}", POISON if n == 7 else f"{n}") for n in range(LINES)])
    member = await cluster.add_member()
    generate, poison, tries = member.gateway_app.engine.generate, ids_of(POISON), []

    def generate_or_crash(request, session="", handover=None):
        if poison in {request.prompt_ids[at : at + len(poison)] for at in range(len(request.prompt_ids))}:
            tries.append(request)
            return CrashedStream()
        return generate(request)

    member.gateway_app.engine.generate = generate_or_crash
    async with member.dispatcher:
        ended = await cluster.ended(batch)
    output, errors = await cluster.results(ended)
    assert set(errors) == {"7"} and errors["7"]["response"]["body"]["error"]["code"] == "engine_crashed"
    assert set(output) == {f"{number}" for number in range(LINES)} - {"7"}
    assert len(tries) == 1


async def test_processes_that_a_line_kills_are_three_and_then_no_more(tmp_path, valkey):
    address = valkey.connection_pool.connection_kwargs
    redis = f"redis://{address['host']}:{address['port']}/{address.get('db', 0)}"
    cluster = BatchCluster(tmp_path, valkey, LEASE_SECONDS)
    batch = await cluster.submit([chat_line(f"{n}", POISON if n == 7 else f"{n}") for n in range(LINES)])
    ending, exits = asyncio.create_task(cluster.ended(batch)), []
    while not ending.done():
        options = {"redis": redis, "folder": str(tmp_path), "name": f"{len(exits)}", "lease_seconds": LEASE_SECONDS}
        process = FORKS.Process(target=batch_worker.run, args=({**options, "poison": POISON},), daemon=True)
        process.start()
        dying = asyncio.create_task(asyncio.to_thread(process.join))
        try:
            await asyncio.wait((ending, dying), return_when=asyncio.FIRST_COMPLETED)
            if dying.done():
                exits.append(process.exitcode)
        finally:
            process.kill()
            await dying
    output, errors = await cluster.results(await ending)
    assert exits == [-signal.SIGKILL] * (1 + MOST_MARKS)
    assert [errors[name]["error"]["code"] for name in errors] == ["process_lost"] and set(errors) == {"7"}
    assert set(output) == {f"{number}" for number in range(LINES)} - {"7"}


async def test_a_clean_stop_leaves_no_mark_and_counts_for_nothing(tmp_path, valkey):
    cluster = BatchCluster(tmp_path, valkey, LEASE_SECONDS)
    batch = await cluster.submit([chat_line(f"{number}", f"{number}") for number in range(LINES)])
    stopped = await cluster.add_member("stopped", lane_capacity=8)
    stopped.gateway_app.engine.pause = 0.2
    await stopped.dispatcher.__aenter__()
    await until(lambda: bool(stopped.gateway_app.engine.requests))
    await stopped.dispatcher.__aexit__(None, None, None)
    assert len(stopped.gateway_app.engine.requests) < LINES
    member = await cluster.add_member("last")
    await member.dispatcher.__aenter__()
    ended = await cluster.ended(batch)
    await member.dispatcher.__aexit__(None, None, None)
    assert (ended.status, ended.tally.completed, ended.tally.failed) == ("completed", LINES, 0)
    fields = await valkey.hkeys(f"loralane:batch:{{acme}}:{batch.id}")
    assert not [name for name in fields if name.startswith((b"lost:", b"mark:"))]


async def test_a_suspect_shard_waits_until_it_is_alone_and_keeps_others_out():
    quarantine, order = Quarantine(), []
    assert quarantine.enter()

    async def suspect():
        async with quarantine.alone():
            order.append("alone")
            assert not quarantine.enter()
        order.append("free")

    async def later():
        await quarantine.until_free()
        order.append("together")

    task = asyncio.create_task(suspect())
    await asyncio.sleep(0)
    assert not quarantine.enter() and order == []
    waiting = asyncio.create_task(later())
    quarantine.leave()
    await asyncio.gather(task, waiting)
    assert order[0] == "alone" and set(order) == {"alone", "free", "together"}
    assert json.dumps(order) and quarantine.enter()
