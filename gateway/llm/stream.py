"""One request of a program: its caller awaits the whole result, or takes pieces of the answers as they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Generator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Self

from gateway.llm.results import Answer, Result, answer_of, result_of
from gateway.openai.tools import ToolCalls
from gateway.requests.types import Admitted, Generation, GenerationChunk


@dataclass(frozen=True, slots=True)
class Opened:
    """A generation, and the reader of the tool calls in its answers; None means that no tools were offered."""

    generation: Generation
    reader: ToolCalls | None


Open = Callable[[bool], AbstractAsyncContextManager[Opened]]
"""Returns a context manager that starts a request, yields it as `Opened`, and aborts it if its body is left early. The
argument says whether the caller takes tokens as they come."""
Item = Opened | GenerationChunk | BaseException | None


class AnswerStream:
    """A request that starts when it is first awaited, for its `Result`, or iterated, for an `Answer` for each piece,
    once. Closing, cancelling or dropping it ends the request and frees its memory at once."""

    def __init__(self, open_request: Open) -> None:
        self._open = open_request
        self._items: asyncio.Queue[Item] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None
        self._reader: ToolCalls | None = None
        self._is_over = False

    def __await__(self) -> Generator[Any, None, Result]:
        return self._whole().__await__()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Answer:
        """Return the next piece. Raises ApiError if the request is refused or fails, EngineFailed if the engine
        does."""
        while not self._is_over:
            item = await self._next(streams=True)
            if isinstance(item, Opened):
                self._reader = item.reader
            elif item is not None:
                piece = answer_of(item, self._reader)
                if piece.token_ids or piece.text or piece.reasoning or piece.tool_calls or piece.finish_reason:
                    return piece
        raise StopAsyncIteration

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End the request, unless it has ended. The engine drops it before its next step."""
        self._is_over = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def __del__(self) -> None:
        if self._task is not None and not self._task.done() and not (loop := self._task.get_loop()).is_closed():
            loop.call_soon_threadsafe(self._task.cancel)

    async def _whole(self) -> Result:
        admitted: Admitted | None = None
        chunks: list[GenerationChunk] = []
        try:
            while (item := await self._next(streams=False)) is not None:
                if isinstance(item, Opened):
                    admitted, self._reader = item.generation.admitted, item.reader
                else:
                    chunks.append(item)
        finally:
            await self.aclose()
        if admitted is None or not chunks or chunks[-1].usage is None:
            raise asyncio.CancelledError("the request was closed before its end")
        return result_of(admitted, chunks, self._reader)

    async def _next(self, *, streams: bool) -> Opened | GenerationChunk | None:
        """Return the next item of the request, which the first call starts. None means that the request has ended.
        Raises the exception with which it failed."""
        if self._task is None:
            self._task = asyncio.create_task(_pump(self._open(streams), self._items), name="answer")
        item = await self._items.get()
        self._is_over = item is None or isinstance(item, BaseException)
        if isinstance(item, BaseException):
            try:
                raise item
            finally:
                del item  # its traceback refers to this frame: a cycle would keep what the frame holds
        return item


async def _pump(request: AbstractAsyncContextManager[Opened], items: asyncio.Queue[Item]) -> None:
    """Run a request to its end in a task, which a deadline may cancel, and queue its `Opened`, its chunks and its
    exception or None. It holds no reference to the `AnswerStream`, which can so be garbage-collected."""
    end: BaseException | None = None
    try:
        async with request as opened:
            items.put_nowait(opened)
            chunks: AsyncIterator[GenerationChunk] = opened.generation
            async for chunk in chunks:
                items.put_nowait(chunk)
    except Exception as error:
        end = error
    finally:  # after a cancellation, too: another task may wait for an item
        items.put_nowait(end)
        del end  # its traceback refers to this frame: a cycle would keep what the frame holds
