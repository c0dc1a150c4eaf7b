"""Turns of lines that an engine may have died of.

Several gateways share an engine, and every line that was under way at its deaths is suspect, wherever it ran. One such
line at a time is tried, by one of all gateways that share the Redis, so that two suspects are never blamed for one
death. And a line is tried only on an engine that has run for longer than in its last life: whatever else the engine
dies of again and again, such as a request that a client repeats, or a line that is not suspect yet, shows itself first.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from engine.client import EngineApi
from gateway.batches.store import BatchStore
from gateway.core.errors import ApiError

LOOK_SECONDS = 0.25
"""Between two looks at whether the engine is there: shorter than the start of one."""
STEADY_SECONDS = 30.0
"""How much longer than in its last life an engine has run before a suspect line is tried."""
MOST_LIFE_SECONDS = 300.0
"""The most of the last life that counts, so that trials do not wait for hours after the death of an old engine."""
ASK_SECONDS = 1.0
"""Between two questions for the turn, while another gateway has it."""
RENEWALS = 5
"""Of a turn in its term, at least."""


class EngineTurn:
    """The right to try one line, as long as this process can be sure of it."""

    def __init__(self, trials: EngineTrials) -> None:
        self._trials = trials
        self.until = 0.0
        """Time on the loop's clock."""

    @property
    def is_held(self) -> bool:
        return asyncio.get_running_loop().time() < self.until

    @property
    def may_begin(self) -> bool:
        """Whether a death of the engine from now on would be the line's: the engine has run well without it."""
        return self.is_held and not self._trials.unproven


class EngineTrials:
    """What one gateway process knows of its engine's lives, and its place among gateways that try suspect lines."""

    def __init__(self, store: BatchStore, engine: EngineApi, seconds: float) -> None:
        """`seconds`: the term of a turn, which is extended while it is needed and runs out if the process dies."""
        self._store = store
        self._engine = engine
        self._seconds = seconds
        self._next = asyncio.Lock()
        self._up_since: float | None = None
        self._last_life = 0.0

    async def watch(self) -> None:
        """Look at the engine again and again; for good."""
        while True:
            self._look()
            await asyncio.sleep(LOOK_SECONDS)

    def engine_lost(self) -> None:
        """Note that the engine has died."""
        if self._up_since is not None:
            self._last_life = asyncio.get_running_loop().time() - self._up_since
            self._up_since = None

    @property
    def unproven(self) -> float:
        """Seconds until the engine has run long enough without a suspect; 0 means that it has."""
        needed = STEADY_SECONDS + min(self._last_life, MOST_LIFE_SECONDS)
        lived = 0.0 if self._up_since is None else asyncio.get_running_loop().time() - self._up_since
        return max(0.0, needed - lived)

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[EngineTurn]:
        """Wait until the engine has proven itself and no other suspect line is being tried by any gateway.

        Raises:
            ApiError: REGISTRY_UNAVAILABLE, on entry.
        """
        async with self._next:
            turn, token = EngineTurn(self), secrets.token_hex(8)
            await self._take(turn, token)
            keeping = asyncio.create_task(self._keep(turn, token), name="batch-engine-turn")
            try:
                yield turn
            finally:
                keeping.cancel()
                await asyncio.wait([keeping])
                with suppress(ApiError):  # then it runs out
                    await asyncio.shield(self._store.take_turn(token, 0.0))

    def _look(self) -> None:
        if not self._engine.ready:
            self.engine_lost()
        elif self._up_since is None:
            self._up_since = asyncio.get_running_loop().time()

    async def _take(self, turn: EngineTurn, token: str) -> None:
        while not turn.is_held:
            wait = self.unproven
            if not wait:
                await self._ask(turn, token)
                wait = 0.0 if turn.is_held else ASK_SECONDS
            await asyncio.sleep(wait)

    async def _ask(self, turn: EngineTurn, token: str) -> None:
        """Take the turn, or extend it, unless another gateway has it."""
        asked = asyncio.get_running_loop().time()
        is_ours = await self._store.take_turn(token, self._seconds)
        turn.until = asked + self._seconds if is_ours else 0.0

    async def _keep(self, turn: EngineTurn, token: str) -> None:
        """Extend a turn until another gateway has it, as after an outage of Redis that was longer than its term."""
        while turn.until:
            await asyncio.sleep(self._seconds / RENEWALS)
            with suppress(ApiError):  # what is held runs out by itself
                await self._ask(turn, token)
