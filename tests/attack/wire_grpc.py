"""Attacks over gRPC with messages that are refused, or that never arrive."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping

import grpc

from gateway.pb import generation_pb2 as pb
from tests.attack.attacker import Attacker

GENERATE = "/loralane.v1.Generation/Generate"
CHECK = "/grpc.health.v1.Health/Check"


def _ids(num_bytes: int) -> bytes:
    """Return a request whose prompt is packed token ids of one byte each."""
    ids = pb.TokenIds(ids=[1] * num_bytes)
    return pb.GenerateRequest(model="smollm2-135m-instruct", prompt_ids=ids).SerializeToString()


def _metadata(key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {key}"),) if key else ()


async def _refused(attacker: Attacker, key: str, count: int, num_bytes: int) -> Counter[str]:
    message = _ids(num_bytes)
    async with grpc.aio.insecure_channel(attacker.grpc_target) as channel:
        calls = [channel.unary_unary(GENERATE)(message, metadata=_metadata(key), timeout=60) for _ in range(count)]
        return Counter(await asyncio.gather(*map(_code, calls)))


async def _code(call: Awaitable[object]) -> str:
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error.code().name
    return "OK"


async def refused_without_a_key(attacker: Attacker, count: int = 40, num_bytes: int = 8_000_000) -> Counter[str]:
    return await _refused(attacker, "", count, num_bytes)


async def refused_with_a_key(attacker: Attacker, count: int = 40, num_bytes: int = 8_000_000) -> Counter[str]:
    """Send prompts of `num_bytes` tokens, which no model's context holds."""
    return await _refused(attacker, attacker.key, count, num_bytes)


async def silent_calls(attacker: Attacker, count: int = 100, seconds: float = 5.0) -> Counter[str]:
    """Begin calls with and without a key whose messages do not come, and leave them after `seconds`."""
    ended: Counter[str] = Counter()
    async with grpc.aio.insecure_channel(attacker.grpc_target) as channel:
        kinds = ((GENERATE, ""), (GENERATE, attacker.key), (CHECK, ""))
        calls = [channel.stream_unary(method)(metadata=_metadata(key)) for method, key in kinds for _ in range(count)]
        codes = [asyncio.create_task(_code(call)) for call in calls]
        done, waiting = await asyncio.wait(codes, timeout=seconds)
        ended.update(task.result() for task in done)
        ended["waiting"] = len(waiting)
        for call in calls:
            call.cancel()
        await asyncio.wait(codes)
    return ended


ATTACKS: Mapping[str, Callable[[Attacker], Awaitable[Counter[str]]]] = {
    "refused gRPC messages without a key": refused_without_a_key,
    "refused gRPC messages with a key": refused_with_a_key,
    "gRPC messages that do not come": silent_calls,
}
