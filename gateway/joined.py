"""The answers of one request put together: their streams as one, and their chunks as whole answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

from gateway.generation import GenerationChunk

T = TypeVar("T")


def join_answers(chunks: Sequence[GenerationChunk]) -> list[GenerationChunk]:
    """One for each answer, by its number. `chunks`: all of all answers, each answer's in order."""
    answers: dict[int, list[GenerationChunk]] = {}
    for chunk in chunks:
        answers.setdefault(chunk.answer, []).append(chunk)
    return [join(answers[index]) for index in sorted(answers)]


def join(chunks: Sequence[GenerationChunk]) -> GenerationChunk:
    """All chunks of one answer as one."""
    return GenerationChunk(
        answer=chunks[0].answer,
        text="".join(chunk.text for chunk in chunks),
        token_ids=tuple(token_id for chunk in chunks for token_id in chunk.token_ids),
        logprobs=tuple(values for chunk in chunks for values in chunk.logprobs),
        silent=chunks[-1].silent,
        finish_reason=chunks[-1].finish_reason,
    )


async def merge(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """Items of all streams as they come. Closing it closes every stream; the first error of any ends it."""
    queue: asyncio.Queue[tuple[T] | BaseException | None] = asyncio.Queue()
    pumps = [asyncio.create_task(_pump(stream, queue)) for stream in streams]
    try:
        running = len(pumps)
        while running:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                running -= 1
            else:
                yield item[0]
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(stream: AsyncGenerator[T, None], queue: asyncio.Queue[tuple[T] | BaseException | None]) -> None:
    end: BaseException | None = None
    try:
        async with aclosing(stream):
            async for item in stream:
                queue.put_nowait((item,))
    except Exception as error:
        end = error
    queue.put_nowait(end)
