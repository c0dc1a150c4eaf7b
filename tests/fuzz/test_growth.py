"""The fuzzer that measures: its probe finds what holds a loop and nothing else, and some of its cases."""

import asyncio
import hashlib
import threading
import time
from dataclasses import replace
from itertools import islice

import pytest

from tests.fuzz.growth.measured import Figures
from tests.fuzz.growth.plan import all_fields, plan
from tests.fuzz.growth.probe import LoopProbe
from tests.fuzz.growth.run import judged, run
from tests.fuzz.growth.wire import Ending

CASES = 20
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
    cases = list(islice(plan(seed=1), 500))
    assert len({case.field.kind for case in cases}) > 490
    assert all(case.size == case.field.sizes[-1] for case in cases)
    assert len(all_fields()) > 1000


def test_the_cases_of_a_seed_are_the_same_again():
    first, again = (list(islice(plan(seed=7), 30)) for _ in range(2))
    assert [str(case) for case in first] == [str(case) for case in again]
    assert all(one.small() == other.small() for one, other in zip(first, again, strict=True))


def test_every_growth_of_every_field_makes_a_request():
    for field in all_fields():
        for growth in field.growths.values():
            assert growth(1).with_key(field.key)


FIGURES = Figures(Ending("http 200"), hold=0.01, where="a.py:1", kept=2**20, gap=0.03, cpu=0.5, seconds=0.6)


def test_figures_below_all_limits_are_no_failure():
    assert judged(FIGURES, alone=0.025).words == ""


@pytest.mark.parametrize(
    ("figures", "words"),
    [
        (FIGURES._replace(hold=0.03), "the loop was held for 30.0 ms (a.py:1)"),
        (FIGURES._replace(kept=65 * 2**20), "65 MiB were kept"),
        (FIGURES._replace(gap=0.075), "the neighbour waited 3.0 times as long"),
    ],
)
def test_each_figure_beyond_its_limit_is_a_failure(figures, words):
    assert judged(figures, alone=0.025).words == words


def test_a_gap_that_the_gateway_had_no_time_to_cause_is_the_machines():
    assert judged(FIGURES._replace(gap=0.5, cpu=0.02), alone=0.025).words == ""


def test_what_one_of_two_judgements_does_not_find_does_not_count():
    both = judged(FIGURES._replace(hold=0.03, kept=2**30), 0.025) & judged(FIGURES._replace(kept=2**30), 0.025)
    assert both.words == "1024 MiB were kept"


async def test_some_cases_cost_little():
    cases = [replace(case, size=case.field.sizes[1]) for case in islice(plan(seed=1), CASES)]
    report = await run(1, cases)
    assert report.failures == []
    assert sum(report.outcomes.values()) == CASES
