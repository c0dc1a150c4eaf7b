"""Merges the streams of several answers as they come, and joins the chunks of an answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

from msgspec.structs import replace

from gateway.requests.prompt_scores import join_scores
from gateway.requests.types import GenerationChunk

T = TypeVar("T")


def join_answers(chunks: Sequence[GenerationChunk]) -> list[GenerationChunk]:
    """Return one chunk for each answer, ordered by the answer's number, joined from all chunks of all answers. The
    chunks of each answer must be in order. `usage` is dropped."""
    answers: dict[int, list[GenerationChunk]] = {}
    for chunk in chunks:
        answers.setdefault(chunk.answer, []).append(chunk)
    return [join_chunks(answers[index]) for index in sorted(answers)]


def join_chunks(chunks: Sequence[GenerationChunk]) -> GenerationChunk:
    """Return one chunk that joins all chunks of one answer, given in order. `usage` is dropped."""
    if len(chunks) == 1:
        return replace(chunks[0], usage=None, more=False)
    return GenerationChunk(
        answer=chunks[0].answer,
        text="".join(chunk.text for chunk in chunks),
        reasoning="".join(chunk.reasoning for chunk in chunks),
        calls=tuple(call for chunk in chunks for call in chunk.calls),
        prompt_scores=join_scores([chunk.prompt_scores for chunk in chunks]),
        token_ids=tuple(token_id for chunk in chunks for token_id in chunk.token_ids),
        logprobs=tuple(values for chunk in chunks for values in chunk.logprobs),
        silent=chunks[-1].silent,
        finish_reason=chunks[-1].finish_reason,
        stop_string=chunks[-1].stop_string,
    )


async def merge_streams(streams: Sequence[AsyncGenerator[T, None]], most: int) -> AsyncGenerator[T, None]:
    """Yield the items of all streams as they come, reading them in concurrent tasks, at most `most` streams at a time,
    in their order. The first error of any stream is raised; that, the end, or closing the merged stream closes every
    stream that was begun."""
    queue: asyncio.Queue[tuple[T] | BaseException | None] = asyncio.Queue()
    turns = asyncio.Semaphore(most)
    pumps = [asyncio.create_task(_pump(stream, queue, turns)) for stream in streams]
    try:
        running = len(pumps)
        while running:
            item = await queue.get()
            if isinstance(item, BaseException):
                try:
                    raise item
                finally:
                    del item  # its traceback refers to this frame: a cycle would keep what the frame holds
            if item is None:
                running -= 1
            else:
                yield item[0]
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(
    stream: AsyncGenerator[T, None], queue: asyncio.Queue[tuple[T] | BaseException | None], turns: asyncio.Semaphore
) -> None:
    try:
        async with turns, aclosing(stream):
            async for item in stream:
                queue.put_nowait((item,))
    except Exception as error:
        queue.put_nowait(error)
    else:
        queue.put_nowait(None)
