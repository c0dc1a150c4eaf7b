"""Attacks by ordinary generations: grammars, floods, batches and callers that hang up."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import grpc

from tests.attack.attacker import Attack, Attacker

CHAIN = "start: a0\n" + "\n".join(f"a{i}: a{i + 1}" for i in range(3000)) + '\na3000: "x"'
TOO_DEEP = "nesting without an end"
GRAMMARS: Mapping[str, Mapping[str, Any]] = {
    "the smallest integer": {"guided_json": {"const": -9223372036854775808}},
    "its neighbour": {"guided_json": {"enum": [-9223372036854775807]}},
    "the smallest integer in a format": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": -(2**63)}}}
    },
    "bounds beyond integers": {"guided_json": {"type": "integer", "minimum": -1e30, "maximum": -1e29}},
    "an integer beyond integers": {"guided_json": {"allOf": [{"type": "integer"}, {"enum": [-1e308]}]}},
    "a chain of rules": {"guided_grammar": CHAIN},
    TOO_DEEP: {"guided_json": "[" * 60_000},
    "brackets of a regex": {"guided_regex": "(" * 20_000 + "a" + ")" * 20_000},
}
"""Schemas and grammars that crash or overflow a grammar compiler."""
POISON = {name: fields for name, fields in GRAMMARS.items() if name != TOO_DEEP}
"""Grammars that pass the check of a batch's file, which refuses a file with the other one."""
GROWING = "(.*e.{200}){5}"
"""A regex that compiles, but whose number of states grows too large a few tokens into an answer."""
A_CLIENT = 50
"""Number of requests in a flood that share a client. httpx takes time quadratic in the requests that a client has in
flight, which would slow the neighbour's chats in the same process."""
TERMINAL = frozenset(("completed", "failed", "expired", "cancelled"))
MALFORMED = b"\x0a\xff\xff\xff\xff\x0f"


async def crashing_grammars(attacker: Attacker) -> Counter[str]:
    return Counter([await attacker.chat(**fields) for fields in GRAMMARS.values()])


async def expensive_grammars(attacker: Attacker, count: int = 12) -> Counter[str]:
    """Send `count` schemas that each require 200 patterns or a few more, and one that requires 500, all at once.
    Without a bound, the states of their grammars would fill gigabytes."""
    sizes = [*range(200, 200 + count), 500]
    schemas = [{"allOf": [{"type": "string", "pattern": f"^.*a.*{i}$"} for i in range(size)]} for size in sizes]
    return Counter(await asyncio.gather(*[attacker.chat(guided_json=schema) for schema in schemas]))


async def many_grammars(attacker: Attacker, count: int = 300) -> Counter[str]:
    """Ask for `count` different grammars at once, more than the gateway queues for a tenant and the engine prepares."""
    grammars = [f"[a-z ]{{1,40}}{number}" for number in range(count)]
    chats = [attacker.chat(guided_regex=grammar, max_tokens=4) for grammar in grammars]
    return Counter(await asyncio.gather(*chats))


async def growing_grammar(attacker: Attacker) -> Counter[str]:
    """Stream an answer whose grammar grows too large on the way. Returns its status, error param and last event."""
    body = attacker.body(guided_regex=GROWING, max_tokens=64, stream=True)
    async with attacker.http.stream("POST", "/v1/chat/completions", json=body) as answer:
        events = [line.removeprefix("data: ") async for line in answer.aiter_lines() if line]
    errors = [json.loads(event)["error"]["param"] for event in events if '"error"' in event]
    return Counter([" ".join((str(answer.status_code), *errors, events[-1]))])


async def flood(attacker: Attacker, count: int = 1500) -> Counter[str]:
    """Send `count` requests at once, more than a lane admits, each for four answers."""
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(attacker.another_client()) for _ in range(-(-count // A_CLIENT))]
        attackers = [replace(attacker, http=client) for client in clients]
        chats = [attackers[number // A_CLIENT].chat(n=4, seed=number, max_tokens=2) for number in range(count)]
        return Counter(await asyncio.gather(*chats))


async def poisoned_batch(attacker: Attacker) -> Counter[str]:
    """Run a batch of the grammars that crash and one sound line. Counts its status and its done and failed lines."""
    lines = [
        {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": attacker.body(**fields)}
        for name, fields in POISON.items()
    ]
    lines.append({"custom_id": "sound", "method": "POST", "url": "/v1/chat/completions", "body": attacker.body()})
    text = "\n".join(map(json.dumps, lines)).encode()
    sent = await attacker.http.post("/v1/files", files={"file": ("in.jsonl", text)}, data={"purpose": "batch"})
    wanted = {"input_file_id": sent.json()["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    batch = (await attacker.http.post("/v1/batches", json=wanted)).json()
    while batch["status"] not in TERMINAL:
        await asyncio.sleep(0.1)
        batch = (await attacker.http.get(f"/v1/batches/{batch['id']}")).json()
    counts = batch["request_counts"]
    return Counter({f"batch {batch['status']}": 1, "lines done": counts["completed"], "lines failed": counts["failed"]})


async def malformed_protobuf(attacker: Attacker) -> Counter[str]:
    metadata = (("authorization", f"Bearer {attacker.key}"),)
    async with grpc.aio.insecure_channel(attacker.grpc_target) as channel:
        call = channel.unary_unary("/loralane.v1.Generation/Generate")
        try:
            await call(MALFORMED, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            return Counter([f"{error.code().name}: {error.details()}"])
    return Counter(["OK"])


async def hang_ups(attacker: Attacker, count: int = 20) -> Counter[str]:
    """Begin `count` long streams at once and disconnect from each after its first bytes."""

    async def one() -> str:
        body = attacker.body(stream=True, max_tokens=500)
        async with attacker.http.stream("POST", "/v1/chat/completions", json=body) as answer:
            async for _ in answer.aiter_raw():
                break
            return f"{answer.status_code} hung up"

    return Counter(await asyncio.gather(*[one() for _ in range(count)]))


ATTACKS: Mapping[str, Attack] = {
    "grammars that crash": crashing_grammars,
    "grammars that cost": expensive_grammars,
    "many grammars at once": many_grammars,
    "a grammar that grows": growing_grammar,
    "a batch of grammars that crash": poisoned_batch,
    "malformed protobuf": malformed_protobuf,
    "streams that are left": hang_ups,
    "a flood with n = 4": flood,
}
"""Attacks by name."""
