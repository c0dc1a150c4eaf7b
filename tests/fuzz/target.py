"""The process that the fuzzer attacks: a gateway with a fake engine, a real Valkey and real grammar workers.

It prints one line of JSON with its addresses, serves until its standard input ends, and then says what was left behind.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import tempfile
from pathlib import Path
from zlib import crc32

sys.path.insert(0, str(Path(__file__).parents[1] / "gateway"))  # the doubles of the gateway's own tests

import structlog
from batch_fakes import stored_options
from fakes import GatewayApp
from patient_valkey import PatientValkey
from redis.asyncio import Redis
from served import Served, served

from engine.core.messages.requests import Request
from gateway.requests.heartbeat import heartbeat_running

ANSWERS = (
    "Hello, world!",
    "",
    '{"a": 1, "b": "two"}',
    '{"a": ',
    '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>',
    '<tool_call>{"name": "f", "argum',
    "<tool_call>" * 20,
    "\U0001f3f4\u200d\u2620\ufe0f" * 3,
    "\ufffd\x00",
)


def answer(request: Request) -> str:
    """Return a text that follows from the prompt alone, as a seeded run needs it."""
    text = ANSWERS[crc32(repr(request.prompt_ids).encode()) % len(ANSWERS)]
    return text or ("x" if request.params.ignore_eos else "")  # an engine that ignores the end produces some token


async def watch(gateway_app: GatewayApp) -> None:
    """Keep the gateway told that its engine, which reports no running requests, is alive."""
    picture = await gateway_app.engine.stats()
    for lane in picture.lanes:
        lane.running = 0
    gateway_app.engine.picture = picture
    async with heartbeat_running(gateway_app.gateway.models.default.heartbeat, gateway_app.engine):
        await asyncio.Event().wait()


async def idle(gateway_app: GatewayApp) -> None:
    """Wait for the ends of requests whose clients have just gone away."""
    async with asyncio.timeout(30):
        while gateway_app.gateway.active:
            await asyncio.sleep(0.01)


def main() -> None:
    logging.disable(logging.WARNING)  # python-multipart warns about each broken form
    errors = structlog.make_filtering_bound_logger(logging.ERROR)
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr), wrapper_class=errors)
    with tempfile.TemporaryDirectory() as folder, PatientValkey() as valkey:
        options = stored_options(Redis.from_url(valkey.connection_url), Path(folder) / "stored")
        with served(Path(folder), **options) as running:
            running.gateway_app.engine.reply = answer
            running.gateway_app.engine.tokens_per_event = 3
            watching = asyncio.run_coroutine_threadsafe(watch(running.gateway_app), running.loop)
            print(json.dumps({"http": running.url, "grpc": running.grpc_target}), flush=True)
            sys.stdin.read()
            watching.cancel()
            running.run(idle(running.gateway_app))
            running.run(running.gateway_app.assert_empty())
            print(json.dumps({"left": _left(running)}), flush=True)


def _left(running: Served) -> int:
    """Return the number of requests that the engine or the gateway still has."""
    return running.gateway_app.engine.open + running.gateway_app.gateway.active


if __name__ == "__main__":
    main()
