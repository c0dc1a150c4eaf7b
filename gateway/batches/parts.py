"""Commits a shard's answers: they are first written to the storage and then counted in Redis under the lease's fence.

Only counted answers exist, and only they are charged: the script that counts an answer charges its line's usage. An
object that was written but not counted, because the lease was lost or the gateway died in between, is deleted after the
batch has ended.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from operator import attrgetter
from typing import TypeVar

import structlog

from gateway.batches.answers import SUFFIXES, LineAnswer
from gateway.batches.lease import Lease
from gateway.batches.record import COUNTS, Tally
from gateway.batches.store import BatchStore
from gateway.core.errors import ApiError
from gateway.core.space import SpaceUse
from gateway.core.usage import DeferredUsage
from gateway.files.service import Files

PART_LINES = 64
PART_SECONDS = 1.0
"""Seconds after the first uncommitted answer when answers are committed, or earlier if there are PART_LINES of them."""
MAX_WAITING_BYTES = 8 * 2**20
"""Bytes of uncommitted answers at which they are committed at once and `wait_for_room` blocks."""
RETRY_SECONDS = 1.0
ONLY_USAGE = ".use"
"""Suffix of names under which usage is charged without answers. There are no objects with these names."""

T = TypeVar("T")

log = structlog.get_logger("batches")


class AnswerBuffer:
    """Collects the answers of one shard under one lease (`add`), while `commit` runs and commits many of them at a
    time. The tenant is charged for the bytes of committed answers as for those of files."""

    def __init__(self, store: BatchStore, files: Files, lease: Lease, wasted: Callable[[int], None]) -> None:
        """`wasted` is called with the tokens of answers that are dropped, because the lease is lost."""
        self._wasted = wasted
        self._store = store
        self._files = files
        self._storage = files.storage
        self._lease = lease
        # Redis may lose its last second, including fences. A second holder of the same fence writes other names.
        self._name = f"{lease.batch.folder}parts/{lease.task_name}-{lease.fence}-{secrets.token_hex(4)}"
        self._count = 0
        self._answers: dict[int, LineAnswer] = {}
        """Answers that are not committed yet, by position."""
        self._usage = DeferredUsage()
        """Usage that no commit has charged yet: that of `_answers`, and of lines that ended without an answer."""
        self._bytes = 0
        self._first = asyncio.Event()
        self._many = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._closed = False

    def add(self, position: int, answer: LineAnswer) -> None:
        self._answers[position] = answer
        self._bytes += len(answer.text)
        self._usage.add(answer.deferred.rows)
        self._first.set()
        if len(self._answers) >= PART_LINES or self._bytes >= MAX_WAITING_BYTES:
            self._many.set()
        if self._bytes >= MAX_WAITING_BYTES:
            self._room.clear()

    def add_usage(self, used: DeferredUsage) -> None:
        """Have the next commit charge what a line has used that ended without an answer and does not run again."""
        self._usage.add(used.rows)
        self._first.set()

    async def wait_for_room(self) -> None:
        """Wait while the buffer is full: from MAX_WAITING_BYTES of uncommitted answers until a commit has made room.
        Also wait while answers cannot be committed, because Redis or the storage is away or the disk almost full."""
        await self._room.wait()

    def close(self) -> None:
        """Tell `commit` that no more answers will come, so that it commits the rest and returns."""
        self._closed = True
        self._first.set()
        self._many.set()

    def drop(self) -> None:
        """Drop the answers that no commit has begun to write, because the lease is lost, and close."""
        self._wasted(self._usage.tokens)
        self._answers, self._usage = {}, DeferredUsage()
        self.close()

    async def commit(self) -> bool:
        """Commit answers as they come until `close` was called and none is left; retry while Redis or the storage is
        away. False means that the lease is lost; uncommitted answers are then dropped. Raises ValueError like
        `BatchStore.commit`, and ApiError if what was written for a lost lease cannot be refunded."""
        held = True
        while held and not (self._closed and not self._has_any):
            await self._first.wait()
            with suppress(TimeoutError):
                async with asyncio.timeout(PART_SECONDS):
                    await self._many.wait()
            held = await self._commit()
        return held

    async def _commit(self) -> bool:
        answers, usage, had_any = self._answers, self._usage, self._has_any
        self._answers, self._usage, self._bytes = {}, DeferredUsage(), 0
        if not self._closed:
            self._first.clear()
            self._many.clear()
        if not had_any:
            return True
        held, size = False, sum(len(answer.text) for answer in answers.values())
        try:
            parts = await self._patiently(lambda: self._write(answers))
            await self._patiently(lambda: self._charge(size))
            tally = sum_of_tallies([answer.tally for answer in answers.values()])
            changes = sorted(answers), tally, usage.rows
            held = await self._patiently(lambda: self._store.commit(self._lease, parts, *changes))
        finally:
            if not held:  # also if the lease was lost meanwhile, which cancels this
                self._wasted(usage.tokens)
        if not held:
            await self._storage.discard(parts)  # the batch may have been swept already
            await self._charge(-size)
        if self._bytes < MAX_WAITING_BYTES:  # answers may have come while the others were written
            self._room.set()
        return held

    @property
    def _has_any(self) -> bool:
        return bool(self._answers or self._usage.rows)

    async def _charge(self, num_bytes: int) -> None:
        await self._files.charge_answers(self._lease.tenant, self._lease.batch_id, num_bytes)

    async def _write(self, answers: dict[int, LineAnswer]) -> list[str]:
        """Write answers, by the positions of their lines in the batch, to one object for the output file and one, of
        failed lines, for the error file, each if it has any. Return the names of the objects, or without answers one
        under which usage is charged. Raises ApiError."""
        self._count += 1
        parts = []
        for ending in SUFFIXES:
            texts = [answer.text for _, answer in sorted(answers.items()) if answer.suffix == ending]
            if texts:
                parts.append(f"{self._name}-{self._count}{ending}")
                text = b"".join(texts)
                await self._storage.write(parts[-1], _once(text), SpaceUse.RESULT, len(text))
        return parts or [f"{self._name}-{self._count}{ONLY_USAGE}"]

    async def _patiently(self, work: Callable[[], Awaitable[T]]) -> T:
        """Return the result of `work`. While `work` raises ApiError, try again every RETRY_SECONDS, and let no line
        begin (`wait_for_room`). Each reason is logged once."""
        last_reason = ""
        while True:
            try:
                return await work()
            except ApiError as error:
                self._room.clear()
                if error.reason != last_reason:
                    last_reason = error.reason
                    log.warning("batch_part_waits", batch=self._lease.batch_id, reason=last_reason)
                await asyncio.sleep(RETRY_SECONDS)


def sum_of_tallies(tallies: Sequence[Tally]) -> Tally:
    return Tally(*(sum(map(attrgetter(name), tallies)) for name in COUNTS))


async def _once(text: bytes) -> AsyncIterator[bytes]:
    yield text
