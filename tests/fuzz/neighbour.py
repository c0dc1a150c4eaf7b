"""The other tenant: it streams chats while cases are sent, and every one of its streams has to be whole."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import httpx

KEY = "sk-initech"
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 20, "stream": True}
PAUSE_SECONDS = 0.02
MOST_FAILURES = 20
"""After so many the neighbour stops: the first ones say what there is to say."""


@dataclass
class Neighbour:
    """What the other tenant has seen."""

    ttft: list[float] = field(default_factory=list)
    """Seconds until the first event of each of its whole streams."""
    failures: list[str] = field(default_factory=list)


@asynccontextmanager
async def stream_beside(url: str, seen: Neighbour, hang_seconds: float) -> AsyncIterator[None]:
    """Stream chats, one after the other, as long as the block runs. A stream that fails, hangs or is not whole is a
    failure, and so is a block beside which no stream ended."""
    ends = asyncio.Event()
    task = asyncio.create_task(_stream_until(ends, url, seen, hang_seconds))
    try:
        yield
    finally:
        ends.set()
        await task
    if not seen.ttft:
        seen.failures.append("none of the neighbour's streams was whole")


async def _stream_until(ends: asyncio.Event, url: str, seen: Neighbour, hang_seconds: float) -> None:
    headers = {"authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(base_url=url, timeout=hang_seconds, headers=headers) as client:
        while not ends.is_set() and len(seen.failures) < MOST_FAILURES:
            number = len(seen.ttft) + len(seen.failures)
            try:
                async with asyncio.timeout(hang_seconds):
                    seen.ttft.append(await _stream_one(client))
            except Exception as error:  # whatever has kept a stream from being whole
                seen.failures.append(f"the neighbour's stream {number} failed: {type(error).__name__}: {error}")
            with suppress(TimeoutError):
                await asyncio.wait_for(ends.wait(), PAUSE_SECONDS)


async def _stream_one(client: httpx.AsyncClient) -> float:
    """Return the seconds until the first event. Raises ValueError if the stream is not whole."""
    begun, first = time.perf_counter(), None
    lines = []
    async with client.stream("POST", "/v1/chat/completions", json=CHAT) as response:
        async for line in response.aiter_lines():
            first = first or time.perf_counter() - begun
            lines.append(line)
    if response.status_code != 200 or first is None or "data: [DONE]" not in lines:
        raise ValueError(f"status {response.status_code}, and at its end {lines[-3:]}")
    return first
