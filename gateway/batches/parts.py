"""What a shard has answered: written to the storage first, and counted under the lease's fence then.

Only what is counted exists. An object that was written and not counted, because the lease was lost or the gateway died
in between, is swept away when the batch has ended.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from operator import attrgetter
from typing import TypeVar

import structlog

from gateway.batches.answers import ENDINGS, Answer
from gateway.batches.lease import Lease
from gateway.batches.record import COUNTS, Tally
from gateway.batches.store import BatchStore
from gateway.core.errors import ApiError
from gateway.files.storage import Storage

PART_LINES = 64
PART_SECONDS = 1.0
"""Answers wait no longer to be committed, and no more of them."""
MAX_WAITING_BYTES = 8 * 2**20
"""Of answers that are not committed: no more lines are begun then."""
RETRY_SECONDS = 1.0

T = TypeVar("T")

log = structlog.get_logger("batches")


class Parts:
    """Of one shard, from one gateway that held it."""

    def __init__(self, store: BatchStore, storage: Storage, lease: Lease) -> None:
        self._store = store
        self._storage = storage
        self._lease = lease
        # Redis may forget its last second, fences and all; whoever is given the same fence then writes other names.
        self._name = f"{lease.batch.folder}parts/{lease.member}-{lease.fence}-{secrets.token_hex(4)}"
        self._count = 0
        self._answers: dict[int, Answer] = {}
        """By position."""
        self._bytes = 0
        self._first = asyncio.Event()
        self._many = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._closed = False

    def add(self, position: int, answer: Answer) -> None:
        self._answers[position] = answer
        self._bytes += len(answer.text)
        self._first.set()
        if len(self._answers) >= PART_LINES or self._bytes >= MAX_WAITING_BYTES:
            self._many.set()
        if self._bytes >= MAX_WAITING_BYTES:
            self._room.clear()

    async def room(self) -> None:
        """Returns when another line may be begun."""
        await self._room.wait()

    def close(self) -> None:
        """No more answers come."""
        self._closed = True
        self._first.set()
        self._many.set()

    async def commit(self) -> bool:
        """Commits answers as they come, until there are no more, however long it takes. False: the lease is lost."""
        held = True
        while held and not (self._closed and not self._answers):
            await self._first.wait()
            with suppress(TimeoutError):
                async with asyncio.timeout(PART_SECONDS):
                    await self._many.wait()
            held = await self._commit()
        return held

    async def _commit(self) -> bool:
        answers, self._answers, self._bytes = self._answers, {}, 0
        if not self._closed:
            self._first.clear()
            self._many.clear()
        if not answers:
            return True
        parts = await self._patiently(lambda: self._write(answers))
        tally = added([answer.tally for answer in answers.values()])
        held = await self._patiently(lambda: self._store.commit(self._lease, parts, sorted(answers), tally))
        if not held:
            await self._storage.delete(parts)  # the batch may be over, and swept
        self._room.set()
        return held

    async def _write(self, answers: dict[int, Answer]) -> list[str]:
        """Names of the objects: one for the output, one for errors, if there are any."""
        self._count += 1
        parts = []
        for ending in ENDINGS:
            texts = [answer.text for _, answer in sorted(answers.items()) if answer.ending == ending]
            if texts:
                parts.append(f"{self._name}-{self._count}{ending}")
                await self._storage.write(parts[-1], _once(b"".join(texts)))
        return parts

    async def _patiently(self, work: Callable[[], Awaitable[T]]) -> T:
        """Storage or Redis may be away for a while; whoever holds the lease no longer is stopped from outside."""
        while True:
            try:
                return await work()
            except ApiError as error:
                log.warning("batch_part_waits", batch=self._lease.batch_id, reason=error.reason)
                await asyncio.sleep(RETRY_SECONDS)


def added(tallies: Sequence[Tally]) -> Tally:
    return Tally(*(sum(map(attrgetter(name), tallies)) for name in COUNTS))


async def _once(text: bytes) -> AsyncIterator[bytes]:
    yield text
