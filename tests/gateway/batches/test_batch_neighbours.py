"""What one tenant's batches cost the gateway's time does not delay the batches of another."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

import pytest
from batch_cluster import BatchCluster, chat_line, until
from fakes import ACME
from file_fakes import pieces

from gateway.batches import validation
from gateway.batches.cpu_budget import PAUSE_SECONDS, SLICE_SECONDS, CpuBudget
from gateway.batches.finalize import finalize
from gateway.batches.line_reader import pack_index
from gateway.batches.quarantine import Quarantine
from gateway.batches.tenant_turns import MAX_TASKS
from gateway.batches.validation import Validator
from tests.gateway.batches.test_batch_dispatcher import working

MOST_HELD_S = 0.01
"""Most processor time for which one piece of work may hold the event loop. Without pauses the one below took 23 ms."""


@pytest.fixture
async def cluster(tmp_path, valkey):
    return BatchCluster(tmp_path, valkey)


async def stuck_member(cluster, tenant):
    """Add a gateway in which validations of a tenant's batches do not end. Return it and the ids of those batches."""
    member, validate, begun = await cluster.add_member(), cluster.validate, []

    async def slow(store, lease):
        if lease.tenant == tenant:
            begun.append(lease.batch_id)
            await asyncio.Event().wait()
        await validate(store, lease)

    cluster.validate = slow
    return member, begun


async def test_slow_validations_of_one_tenant_delay_no_batch_of_another(cluster):
    """One tenant's finalizing, sweeping and cancelling batches leave places for the batches of other tenants."""
    member, begun = await stuck_member(cluster, "acme")
    slow = [await cluster.submit([chat_line("1")], window="5m") for _ in range(5)]
    async with working(member):
        await until(lambda: len(begun) == MAX_TASKS // 2)
        for _ in range(2):
            ended = await cluster.ended(await cluster.submit([chat_line("1")], tenant="globex", window="24h"))
            assert (ended.status, ended.tally.completed) == ("completed", 1)
        assert (len(begun), member.dispatcher.leases["validate"]) == (MAX_TASKS // 2, MAX_TASKS // 2)
        for batch in slow:
            await cluster.store.cancel("acme", batch.id)
        assert {(await cluster.ended(batch)).status for batch in slow} == {"cancelled"}


async def test_the_ends_of_one_tenants_batches_delay_no_batch_of_another(cluster, monkeypatch):
    member, go_on = await cluster.add_member(), asyncio.Event()
    monkeypatch.setattr("gateway.batches.dispatcher.finalize", lambda *args: held_finalize(go_on, *args))
    slow = [await cluster.submit([chat_line("1")], window="5m") for _ in range(5)]
    async with working(member):
        await until(lambda: member.dispatcher.leases["finalize"] == MAX_TASKS // 2)
        ended = await cluster.ended(await cluster.submit([chat_line("1")], tenant="globex", window="24h"))
        assert (ended.status, ended.tally.completed) == ("completed", 1)
        go_on.set()
        assert {(await cluster.ended(batch)).status for batch in slow} == {"completed"}


async def held_finalize(go_on, store, files, lease):
    if lease.tenant == "acme":
        await go_on.wait()
    await finalize(store, files, lease)


async def test_a_suspect_waits_for_no_validation_and_a_suspect_validation_keeps_no_ordinary_work_out():
    quarantine = Quarantine()
    async with quarantine.apart():
        assert quarantine.enter(), "a line may begin beside a suspect validation"
        quarantine.leave()
        other = asyncio.create_task(enter_alone(quarantine))
        await asyncio.sleep(0)
        assert not other.done(), "but no other suspect may"
    await other


async def enter_alone(quarantine):
    async with quarantine.alone():
        pass


def test_a_check_works_in_slices_up_to_its_limit():
    now, slept = [0.0], []
    budget = CpuBudget(1.0, lambda: now[0], slept.append)
    for _ in range(10):
        now[0] += 0.6 * SLICE_SECONDS
        budget.pause_if_due()
    assert slept == [PAUSE_SECONDS] * 5
    assert not budget.is_spent
    now[0] = 1.01
    assert budget.is_spent


async def validated_with(cluster, **options):
    """Submit a batch of three lines whose input is checked as usual, in a process. Return it as it ended."""
    member = await cluster.add_member()
    context, models = member.context, member.gateway_app.gateway.models
    validator = Validator(context.store, context.files, lambda _: ACME, models, 100, 2**20, **options)
    member.dispatcher._validate = validator.run
    batch = await cluster.submit([chat_line(f"{number}") for number in range(3)])
    async with working(member):
        return await cluster.ended(batch)


async def test_a_check_that_takes_too_long_fails_its_batch_and_says_where(cluster):
    ended = await validated_with(cluster, max_cpu_seconds=0.0)
    [error] = ended.errors
    assert (ended.status, error.code, error.line) == ("failed", "validation_too_slow", 1)
    assert "more than the maximum of 0 s of processor time; split the file" in error.message


async def test_a_check_that_is_stuck_in_one_line_is_ended_by_the_kernel(cluster, tmp_path, monkeypatch):
    """The stand-in sets the limits of a check and never ends by itself."""
    stuck = (
        "from gateway.batches import cpu_budget as c; c.GRACE_SECONDS = 1; c.end_process_beyond(0.0)\nwhile True: pass"
    )
    stand_in = tmp_path / "python"
    stand_in.write_text(f"#!/bin/sh\nexec {validation.sys.executable} -c '{stuck}'\n")
    stand_in.chmod(0o700)
    monkeypatch.setattr(validation, "sys", SimpleNamespace(executable=str(stand_in)))
    ended = await validated_with(cluster)
    [error] = ended.errors
    assert (ended.status, error.code, error.line) == ("failed", "validation_too_slow", None)


async def longest_hold(work) -> float:
    """Return the most processor seconds for which a piece of work held the event loop."""
    longest, running = 0.0, asyncio.create_task(work)
    while not running.done():
        began = time.thread_time()
        await asyncio.sleep(0)
        longest = max(longest, time.thread_time() - began)
    await running
    return longest


async def test_the_end_of_a_large_batch_holds_the_event_loop_only_for_moments(cluster):
    """Its lines have no answers, so that each gets a line in the error file."""
    lines = 20_000
    batch = await cluster.submit([chat_line(f"{number:05}") for number in range(lines)])
    size = (await cluster.files.get("acme", batch.input_file_id)).bytes // lines
    validate = await cluster.store.claim("me", {"validate"})
    index = pack_index((number + 1, number * size, size - 1) for number in reversed(range(lines)))
    await cluster.files.storage.write(batch.index_name(validate.fence), pieces(index))
    await cluster.store.validated(validate, lines)
    await cluster.store.cancel("acme", batch.id)
    lease = await cluster.store.claim("me", {"finalize"})
    assert await longest_hold(finalize(cluster.store, cluster.files, lease)) < MOST_HELD_S
    ended = await cluster.store.get("acme", batch.id)
    errors = await cluster.lines_of(batch, ended.error_file_id)
    assert [line["custom_id"] for line in errors] == [f"{number:05}" for number in range(lines)]
