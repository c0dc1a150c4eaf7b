"""Requests outlive engines that are killed, stopped and restarted: the short version of `make bench-restarts`."""

from __future__ import annotations

import asyncio
import signal

import pytest

from tests.chaos.faults import Harm
from tests.chaos.load import Load, Mix
from tests.chaos.patience import until

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.nightly]

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP)
"""One for each engine process that a request may lose (`gateway.requests.answer.crash_trial.MOST_MOVES`): where engines
start quickly, the longest requests lose all of these."""
MIX = Mix(callers=24, pause=0.01, longest=100, leaving=0.0, slow=0.0)
LIMITS = {"rate_limit_exceeded"}
"""The only refusals: some callers have limits, and ask for more."""
REPLACED_SECONDS = 60.0


async def test_no_request_ends_with_its_engine(audited):
    deployment, auditor = audited
    load = Load(deployment.url, 11, MIX)
    load.start()
    try:
        for sign in SIGNALS:
            await asyncio.sleep(0.5)
            (engine,) = deployment.processes()["engine"]
            engine.send_signal(sign)
            await until(lambda before=engine.pid: _is_replaced(deployment, before), REPLACED_SECONDS, "another engine")
            await deployment.until_ready()
    finally:
        await load.stop()
    unhappy = [each for each in load.outcomes if each.ending != "answered" and each.code not in LIMITS]
    assert unhappy == []
    assert await auditor.complaints(load.outcomes, Harm.NONE) == []
    assert len(load.outcomes) > 50


async def _is_replaced(deployment, before: int) -> bool:
    engines = deployment.processes()["engine"]
    return len(engines) == 1 and engines[0].pid != before
