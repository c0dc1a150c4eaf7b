"""A limiter and an upstream that answer when and how a test says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
from virtual_loop import VirtualLoop

from gateway.core.errors import ApiError, Fault, unavailable
from gateway.core.usage import Counts
from gateway.limiter.base import Grant, ReserveRequest
from gateway.limiter.local import LocalLimiter
from gateway.redis.client import StoreError

USAGE = (7, 3)
"""Prompt and completion tokens that the upstream reports for an answer."""


class ScriptedLimiter(LocalLimiter):
    """The limiter in memory, which answers when and how a test says, and records what became of each lease."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__(clock=lambda: int(loop.time() * 1e6))
        self.mode = "degraded"
        self.manner = "at once"
        """`at once`, `late` (when `release` is called), `refuses` or `away`."""
        self.likely, self.strikes = False, 0
        self.waiting: list[asyncio.Future[None]] = []
        self.settled: dict[str, list[int]] = {}
        """Tokens of each settlement by the gateway, by lease."""
        self.grants: dict[str, Grant] = {}
        self.used: dict[str, Counts] = {}
        """What the usage sink was told at each settlement, by lease."""
        self.failures = 0
        """Settlements that the store did not take."""

    def likely_to_grant(self, request: ReserveRequest) -> bool:
        return self.likely

    async def check_requests(self, request: ReserveRequest) -> None:
        if self._strikes("refuses"):
            raise self._limit("requests")
        await super().check_requests(request)

    async def reserve(self, request: ReserveRequest) -> Grant:
        await self._turn()
        if self._strikes("away"):
            raise unavailable(Fault.LIMITER_UNAVAILABLE, "the store is away")
        if self._strikes("refuses"):
            raise self._limit("tokens")
        grant = await super().reserve(request)
        try:
            await self._turn()
        except asyncio.CancelledError:
            await super().settle(grant, 0)
            raise
        self.grants[grant.lease], self.settled[grant.lease] = grant, []
        return grant

    async def settle(self, grant: Grant, actual_tokens: int) -> None:
        self.settled[grant.lease].append(actual_tokens)
        self.used[grant.lease] = grant.request.used()
        await self._turn()
        await super().settle(grant, actual_tokens)
        if self._strikes("away"):
            self.failures += 1
            raise StoreError("the store is away")

    def release(self, count: int) -> None:
        """Answer the oldest calls that wait."""
        for call in self.waiting[:count]:
            if not call.done():
                call.set_result(None)
        del self.waiting[:count]

    async def _turn(self) -> None:
        if self.manner == "late":
            call = asyncio.get_running_loop().create_future()
            self.waiting.append(call)
            await call

    def _strikes(self, manner: str) -> bool:
        """Return whether this call fails in this manner. The limiter recovers after `strikes` such calls."""
        if self.manner != manner:
            return False
        self.strikes -= 1
        if not self.strikes:
            self.manner = "at once"
        return True

    def _limit(self, kind: Any) -> ApiError:
        return ApiError(Fault.RATE_LIMIT_EXCEEDED, "too many", retry_after=1.0, limit_kind=kind)


class Exchange(httpx.AsyncByteStream):
    """One request to the upstream, and the response to it."""

    def __init__(self, answers: int) -> None:
        self.answers = answers
        self.status: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.is_open = True
        """False means that the response has been closed, or that its status never came."""
        self._pieces: asyncio.Queue[bytes | None] = asyncio.Queue()

    def say(self, text: str = "", finish: str | None = None) -> None:
        told = {"delta": {"content": text}, "finish_reason": finish}
        self._event({"choices": [{"index": index, **told} for index in range(self.answers)]})

    def finish(self) -> None:
        self.say(finish="stop")
        self._event({"choices": [], "usage": dict(zip(("prompt_tokens", "completion_tokens"), USAGE, strict=True))})
        self._pieces.put_nowait(b"data: [DONE]\n\n")
        self.cut()

    def cut(self) -> None:
        self._pieces.put_nowait(None)

    def _event(self, event: dict[str, Any]) -> None:
        self._pieces.put_nowait(f"data: {json.dumps(event)}\n\n".encode())

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while (piece := await self._pieces.get()) is not None:
            yield piece

    async def aclose(self) -> None:
        self.is_open = False


class ScriptedUpstream(httpx.AsyncBaseTransport):
    """A server elsewhere."""

    def __init__(self) -> None:
        self.exchanges: list[Exchange] = []
        self.failures = 0
        """Exchanges that failed or broke off."""

    @property
    def open(self) -> list[Exchange]:
        return [exchange for exchange in self.exchanges if exchange.is_open]

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        exchange = Exchange(json.loads(request.content).get("n", 1))
        self.exchanges.append(exchange)
        try:
            status = await exchange.status
        except BaseException:
            exchange.is_open = False
            raise
        if not status:
            exchange.is_open = False
            raise httpx.ConnectError("refused")
        if status != 200:
            exchange.cut()
        return httpx.Response(status, headers={"content-type": "text/event-stream"}, stream=exchange)
