"""Drives an OpenAI-compatible server: so many requests at once, each streamed and timed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

import httpx

from benchmarks.measure import Measured, Stream
from benchmarks.workload import Item


async def drive(
    name: str, url: str, key: str, items: Sequence[Item], concurrency: int, on_done: Callable[[], None]
) -> Measured:
    """Sends `items` in order, `concurrency` at a time. Raises RuntimeError with the server's words if one fails."""
    gate = asyncio.Semaphore(concurrency)
    limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
    headers = {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=url, headers=headers, limits=limits, timeout=600) as client:

        async def one(item: Item) -> Stream:
            async with gate:
                stream = await _stream(client, item)
            on_done()
            return stream

        started = time.perf_counter()
        streams = await asyncio.gather(*(one(item) for item in items))
        seconds = time.perf_counter() - started
    return Measured(name, sum(stream.tokens for stream in streams), seconds, streams)


async def _stream(client: httpx.AsyncClient, item: Item) -> Stream:
    body = {
        "model": item.model,
        "prompt": item.prompt,
        "max_tokens": item.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
    }
    stream, started = Stream(), time.perf_counter()
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.is_error:
            raise RuntimeError((await response.aread()).decode())
        async for line in response.aiter_lines():
            if line.startswith('data: {"error"'):
                raise RuntimeError(line)
            if line.startswith("data: {"):
                stream.times.append(time.perf_counter() - started)
    # Text may lag behind tokens; the server was told how many to make, and makes exactly those.
    stream.tokens = item.max_tokens
    return stream
