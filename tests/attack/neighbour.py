"""The tenant beside the attacker: it streams chats, one after the other, and notes what it sees. It runs in a process
of its own, so that the attacker's work does not delay its clock."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection

import httpx
import msgspec

PATIENCE_SECONDS = 120.0
HEALTH_PAUSE_SECONDS = 0.05
TOKENS = 16
"""Number of tokens in each of the neighbour's answers."""


@dataclass
class Seen:
    """What the neighbour saw in one phase. All times are in seconds."""

    ttft: list[float] = field(default_factory=list)
    itl: list[float] = field(default_factory=list)
    """Times between the events of an answer that have text."""
    health: list[float] = field(default_factory=list)
    """Durations of `GET /health`."""
    usage: Counter[str] = field(default_factory=Counter)
    """Sums of what the answers said of their usage, in the names of the usage report."""
    failures: list[str] = field(default_factory=list)

    def add(self, other: Seen) -> None:
        for mine, more in ((self.ttft, other.ttft), (self.itl, other.itl), (self.health, other.health)):
            mine.extend(more)
        self.usage += other.usage
        self.failures += other.failures


class Neighbour:
    """Starts and ends the phases in which the neighbour's process works."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def begin(self) -> None:
        self._pipe.send("begin")

    async def end(self) -> Seen:
        """Return what the neighbour saw in the phase, after its last answer is complete."""
        self._pipe.send("end")
        seen: Seen = await asyncio.to_thread(self._pipe.recv)
        return seen


@contextmanager
def neighbour_process(url: str, key: str, model: str) -> Iterator[Neighbour]:
    """Run the neighbour's process until the block ends."""
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, url, key, model), daemon=True)
    process.start()
    try:
        yield Neighbour(ours)
    finally:
        process.kill()
        process.join()


def _serve(pipe: Connection, url: str, key: str, model: str) -> None:
    while pipe.recv() == "begin":
        pipe.send(asyncio.run(_phase(pipe, url, key, model)))


async def _phase(pipe: Connection, url: str, key: str, model: str) -> Seen:
    """Stream chats and ask for the gateway's health until the pipe has a message; at least one chat."""
    seen, headers = Seen(), {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=PATIENCE_SECONDS) as client:
        health = asyncio.create_task(_ask_for_health(client, seen))
        try:
            while not (pipe.poll() and seen.ttft) and not seen.failures:
                await _chat(client, model, seen)
        finally:
            health.cancel()
            await asyncio.wait([health])
    if pipe.poll(PATIENCE_SECONDS):
        pipe.recv()
    return seen


async def _ask_for_health(client: httpx.AsyncClient, seen: Seen) -> None:
    while True:
        begun = time.perf_counter()
        answer = await client.get("/health")
        seen.health.append(time.perf_counter() - begun)
        if answer.status_code != 200:
            seen.failures.append(f"/health answered {answer.status_code}")
        await asyncio.sleep(HEALTH_PAUSE_SECONDS)


async def _chat(client: httpx.AsyncClient, model: str, seen: Seen) -> None:
    messages = [{"role": "user", "content": f"Say {time.time_ns()} words about the sea."}]
    body = {"model": model, "messages": messages, "max_tokens": TOKENS, "stream": True, "ignore_eos": True}
    begun, last, end = time.perf_counter(), None, ""
    async with client.stream(
        "POST", "/v1/chat/completions", json=body | {"stream_options": {"include_usage": True}}
    ) as answer:
        async for line in answer.aiter_lines():
            now, end = time.perf_counter(), line or end
            if '"content":"' in line and '"content":""' not in line:
                (seen.ttft if last is None else seen.itl).append(now - (last or begun))
                last = now
            elif '"usage":{' in line:
                seen.usage += _usage(line)
    if answer.status_code != 200 or end != "data: [DONE]":
        seen.failures.append(f"a chat of the neighbour got {answer.status_code}, and ended with {end[:200]!r}")


def _usage(line: str) -> Counter[str]:
    usage = msgspec.json.decode(line.removeprefix("data: "))["usage"]
    return Counter(requests=1, **{name: usage[name] for name in ("prompt_tokens", "completion_tokens")})
