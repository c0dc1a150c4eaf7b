"""A task of a batch that takes its process down is given up by name; other batches are not held up for good."""

import asyncio
import sys
from types import SimpleNamespace

import pytest
from batch_cluster import BatchCluster, chat_line, until
from fakes import ACME

from gateway.batches import dispatcher, validation
from gateway.batches.marks import under_mark
from gateway.batches.trial import LOST_CODE, MOST_MARKS
from gateway.batches.validation import Validator

LEASE_SECONDS = 0.4
ATTEMPTS = range(1 + MOST_MARKS, 3 + MOST_MARKS)
"""On a busy machine a lease may run out before its holder dies, and then the attempt counts for nothing."""
LINES = 3


class Deadly:
    """Wraps a task's work: for one batch, the process dies of it before it says another word, or the work fails."""

    def __init__(self, work, batch_of, dies):
        self.work, self.batch_of, self.dies = work, batch_of, dies
        self.victim = ""
        self.attempts = 0
        self.died = asyncio.Event()

    async def __call__(self, *args):
        if self.batch_of(*args).batch_id != self.victim:
            await self.work(*args)
            return
        self.attempts += 1
        if not self.dies:
            raise LookupError("a bug that this batch brings out")
        self.died.set()
        await asyncio.Event().wait()


def deadly(monkeypatch, cluster, kind, dies):
    """Make tasks of a kind deadly for the batch that is named later."""
    if kind == "validate":
        found = Deadly(cluster.validate, lambda _, lease: lease, dies)
        monkeypatch.setattr(cluster, "validate", found)
    else:
        found = Deadly(getattr(dispatcher, kind), lambda *args: args[-1], dies)
        monkeypatch.setattr(dispatcher, kind, found)
    return found


async def kill(member):
    """End a process: nothing that it would have said is heard."""

    async def silent(*_):
        raise AssertionError("a dead process says nothing")

    for name in ("end_trial", "release"):
        setattr(member.context.store, name, silent)
    await member.kill()


async def work_until_swept(cluster, batches, died):
    """Start gateways, one after the other as each dies, until all batches have ended. Returns them as they ended."""
    ending = asyncio.gather(*(cluster.ended(batch) for batch in batches))
    number = 0
    while not ending.done():
        member = await cluster.add_member(f"{number}")
        number += 1
        await member.dispatcher.__aenter__()
        dying = asyncio.create_task(died.wait())
        await asyncio.wait((ending, dying), return_when=asyncio.FIRST_COMPLETED)
        if dying.done():
            died.clear()
            await kill(member)
        else:
            dying.cancel()
            await member.dispatcher.__aexit__(None, None, None)
    return await ending


@pytest.mark.parametrize("dies", [True, False], ids=["dies", "fails"])
@pytest.mark.parametrize(
    ("kind", "status"), [("validate", "failed"), ("finalize", "failed"), ("sweep", "completed")], ids=lambda word: word
)
async def test_a_task_that_ends_its_process_is_given_up_by_name(tmp_path, valkey, monkeypatch, kind, status, dies):
    cluster = BatchCluster(tmp_path, valkey, LEASE_SECONDS)
    task = deadly(monkeypatch, cluster, kind, dies)
    victim, neighbour = [await cluster.submit([chat_line(f"{n}") for n in range(LINES)]) for _ in range(2)]
    task.victim = victim.id
    lost, sound = await work_until_swept(cluster, (victim, neighbour), task.died)
    assert (sound.status, sound.tally.completed) == ("completed", LINES)
    assert lost.status == status and task.attempts in ATTEMPTS
    assert [error.code for error in lost.errors] == ([LOST_CODE] if status == "failed" else [])
    assert (await cluster.files.delete("acme", victim.input_file_id)) is None, "it is no longer pinned"


async def test_a_cancelled_batch_that_cannot_be_finalized_ends_as_cancelled(tmp_path, valkey, monkeypatch):
    cluster = BatchCluster(tmp_path, valkey, LEASE_SECONDS)
    task = deadly(monkeypatch, cluster, "finalize", dies=False)
    batch = await cluster.submit([chat_line("1")])
    task.victim = batch.id
    await cluster.store.cancel("acme", batch.id)
    [lost] = await work_until_swept(cluster, (batch,), task.died)
    assert (lost.status, [error.code for error in lost.errors]) == ("cancelled", [LOST_CODE])


async def test_an_input_that_kills_the_process_that_checks_it_fails_its_batch_by_name(tmp_path, valkey, monkeypatch):
    cluster = BatchCluster(tmp_path, valkey, LEASE_SECONDS)
    deaths = tmp_path / "deaths"
    stand_in = tmp_path / "python"
    stand_in.write_text(f"#!/bin/sh\necho died >> {deaths}\nkill -KILL $$\n")
    stand_in.chmod(0o700)
    monkeypatch.setattr(validation, "sys", SimpleNamespace(executable=str(stand_in)))
    member = await cluster.add_member()
    context, models = member.context, member.gateway_app.gateway.models
    validator = Validator(context.store, context.files, lambda _: ACME, models, 100, 2**20)
    member.dispatcher._validate = validator.run
    batch = await cluster.submit([chat_line("1")])
    async with member.dispatcher:
        lost = await cluster.ended(batch)
    assert (lost.status, [error.code for error in lost.errors]) == ("failed", [LOST_CODE])
    assert deaths.read_text().count("died") in ATTEMPTS


async def test_a_storage_that_is_away_while_an_input_is_checked_counts_for_nothing(tmp_path, valkey, monkeypatch):
    cluster = BatchCluster(tmp_path, valkey, LEASE_SECONDS)
    monkeypatch.setattr(validation, "RETRY_SECONDS", 0.01)
    member = await cluster.add_member()
    context, models = member.context, member.gateway_app.gateway.models
    validator = Validator(context.store, context.files, lambda _: ACME, models, 100, 2**20)
    member.dispatcher._validate = validator.run
    batch = await cluster.submit([chat_line("1")])
    record = await cluster.files.get("acme", batch.input_file_id)
    url = cluster.files.url
    away = iter([True] * (2 + MOST_MARKS))
    asked = []

    def location(found):
        asked.append(found)
        return url(found) + ("-away" if next(away, False) else "")

    monkeypatch.setattr(member.context.files, "url", location)
    async with member.dispatcher:
        ended = await cluster.ended(batch)
    assert (ended.status, len(asked) >= 3 + MOST_MARKS, record.id) == ("completed", True, batch.input_file_id)
    assert sys.executable == validation.sys.executable
    await until(lambda: not member.dispatcher.leases)


async def test_a_task_that_is_cancelled_while_it_is_marked_leaves_no_mark(tmp_path, valkey):
    cluster = BatchCluster(tmp_path, valkey)
    batch = await cluster.submit([chat_line("1")])
    lease = await cluster.store.claim("one", ["validate"])
    begin, is_marked, go_on = cluster.store.begin_trial, asyncio.Event(), asyncio.Event()

    async def slow(*args):
        held = await begin(*args)
        is_marked.set()
        await go_on.wait()
        return held

    cluster.store.begin_trial = slow

    async def work():
        async with under_mark(cluster.store, lease, stays=lambda _: True):
            raise AssertionError("the task was cancelled before it began")

    task = asyncio.create_task(work())
    await is_marked.wait()
    task.cancel()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not await valkey.hexists(f"loralane:batch:{{acme}}:{batch.id}", "mark:validate")
