"""The process that is measured: the fuzzer's target with a probe in its loop.

It prints one line of JSON with its addresses. Each line on its standard input asks for the longest hold of its loop
since the last one, and is answered by a line of JSON. It ends with its input.
"""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "gateway"))  # the doubles of the gateway's own tests

import structlog
from batch_fakes import stored_options
from patient_valkey import PatientValkey
from redis.asyncio import Redis
from served import Served, served

from gateway.serve.memory import memory_kept_low
from gateway.serve.process import freeze_memory
from tests.fuzz.growth.beside import NEIGHBOUR, PACE_SECONDS
from tests.fuzz.growth.probe import LoopProbe
from tests.fuzz.target import answer, idle, watch

MOST_BYTES = 8 * 2**30
"""Address space that the process may take: an allocation beyond it fails here rather than end something else."""


def main() -> None:
    logging.disable(logging.WARNING)  # python-multipart warns about each broken form
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))
    errors = structlog.make_filtering_bound_logger(logging.ERROR)
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr), wrapper_class=errors)
    with tempfile.TemporaryDirectory() as folder, PatientValkey() as valkey:
        options = stored_options(Redis.from_url(valkey.connection_url), Path(folder) / "stored")
        with served(Path(folder), **options) as running:
            running.run(running.gateway_app.services.accounts.start())
            _measured(running)


def _measured(running: Served) -> None:
    """Serve, and answer questions, until the standard input ends."""
    engine, probe = running.gateway_app.engine, LoopProbe()
    engine.reply, engine.tokens_per_event, engine.pauses = answer, 3, {NEIGHBOUR: PACE_SECONDS}
    tasks = [
        asyncio.run_coroutine_threadsafe(work, running.loop)
        for work in (watch(running.gateway_app), probe.run(), _kept_low())
    ]
    freeze_memory()
    _say(http=running.url, grpc=running.grpc_target)
    for _ in sys.stdin:
        hold = running.run(probe.take())
        _say(seconds=hold.seconds, where=hold.where)
    for task in tasks:
        task.cancel()
    running.run(idle(running.gateway_app))
    running.run(running.gateway_app.assert_empty())
    _say(left=running.gateway_app.engine.open + running.gateway_app.gateway.active)


async def _kept_low() -> None:
    """Return memory as a whole gateway does, until this is cancelled."""
    async with memory_kept_low():
        await asyncio.Event().wait()


def _say(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
