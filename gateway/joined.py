"""Joins the answers of one request: merges their streams into one, and their chunks into whole answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

from gateway.generation import GenerationChunk

T = TypeVar("T")


def join_answers(chunks: Sequence[GenerationChunk]) -> list[GenerationChunk]:
    """Join chunks to one for each answer, ordered by the answer's number.

    `chunks` holds all chunks of all answers; those of one answer must be in order.
    """
    answers: dict[int, list[GenerationChunk]] = {}
    for chunk in chunks:
        answers.setdefault(chunk.answer, []).append(chunk)
    return [join(answers[index]) for index in sorted(answers)]


def join(chunks: Sequence[GenerationChunk]) -> GenerationChunk:
    """Join all chunks of one answer to one chunk."""
    return GenerationChunk(
        answer=chunks[0].answer,
        text="".join(chunk.text for chunk in chunks),
        token_ids=tuple(token_id for chunk in chunks for token_id in chunk.token_ids),
        logprobs=tuple(values for chunk in chunks for values in chunk.logprobs),
        silent=chunks[-1].silent,
        finish_reason=chunks[-1].finish_reason,
    )


async def merge(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """Yield the items of all streams as they come. The first error of any stream ends the merged stream, and closing it
    closes every stream."""
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
