"""Parses long request bodies in a thread, one at a time, so that the event loop goes on meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from gateway.core.in_thread import in_thread
from gateway.requests.encoding_turns import EncodingTurns

T = TypeVar("T")

LOOP_BYTES = 32 * 1024
"""Maximum bytes of a body that is parsed on the event loop, which takes 3 ms at worst. To hand it to a thread takes
0.1 ms."""


class ParsingTurns:
    """Runs the parsers of request bodies: of short ones at once, of others in the process's one thread for this. There
    tenants take turns, because several threads would keep Python's lock from the event loop for longer."""

    def __init__(self) -> None:
        self._turns = EncodingTurns(at_once=1)
        self._thread = ThreadPoolExecutor(1, "parse")

    async def run(self, tenant: str, num_bytes: int, parse: Callable[[], T]) -> T:
        """Call `parse`, which parses a tenant's body of `num_bytes` bytes, and return its result. Raises what `parse`
        raises. The bytes of bodies that wait are counted where they arrive (`WireRoom`)."""
        if num_bytes <= LOOP_BYTES:
            return parse()
        async with self._turns.turn(tenant):
            return await in_thread(parse, self._thread)
