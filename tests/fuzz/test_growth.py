"""The fuzzer that measures: its probe finds what holds a loop and nothing else, and some of its cases."""

import asyncio
import hashlib
import threading
import time

from tests.fuzz.growth.plan import all_fields, plan
from tests.fuzz.growth.probe import LoopProbe
from tests.fuzz.growth.run import run

HELD = 0.05
"""Seconds of processor time for which the loops of these tests are held."""


async def probed(work):
    """Return the longest hold of this loop while `work` runs."""
    probe = LoopProbe()
    measuring = asyncio.create_task(probe.run())
    await asyncio.sleep(0.01)
    await probe.take()
    await work()
    hold = await probe.take()
    measuring.cancel()
    return hold


def burn(seconds=HELD):
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def burn_with_the_lock():
    """Compute in one call of C, in which no other thread gets Python's lock."""
    sum(range(6_000_000))


def burn_without_the_lock():
    data = bytes(2**20)
    until = time.thread_time() + 4 * HELD
    while time.thread_time() < until:
        hashlib.sha256(data)


async def test_a_callback_that_computes_is_found_and_named():
    async def work():
        burn()
        await asyncio.sleep(0)

    hold = await probed(work)
    assert hold.seconds >= HELD * 0.9
    assert "burn" in hold.where


async def test_a_thread_that_holds_pythons_lock_is_found():
    hold = await probed(lambda: asyncio.to_thread(burn_with_the_lock))
    assert hold.seconds >= HELD / 2


async def test_a_thread_that_computes_without_the_lock_is_not_found():
    hold = await probed(lambda: asyncio.to_thread(burn_without_the_lock))
    assert hold.seconds < HELD / 2


async def test_a_loop_that_sleeps_is_not_found():
    async def work():
        await asyncio.sleep(HELD)
        await asyncio.to_thread(threading.Event().wait, HELD)

    assert (await probed(work)).seconds < HELD / 2


def test_the_first_cases_grow_different_fields_to_their_largest_size():
    cases = plan(seed=1)[:500]
    assert len({case.field.kind for case in cases}) > 490
    assert all(case.size == case.field.sizes[-1] for case in cases)
    assert len(all_fields()) > 1000


async def test_some_cases_cost_little():
    cases = [case for case in plan(seed=1)[:2_000] if case.key][:20]
    report = await run(1, cases)
    assert report.failures == []
    assert sum(report.outcomes.values()) == 20
