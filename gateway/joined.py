"""The chunks of a request put together: what it answers when it does not stream."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.generation import GenerationChunk


def join_answers(chunks: Sequence[GenerationChunk]) -> list[GenerationChunk]:
    """One for each answer, by its number. `chunks`: all of all answers, each answer's in order."""
    answers: dict[int, list[GenerationChunk]] = {}
    for chunk in chunks:
        answers.setdefault(chunk.index, []).append(chunk)
    return [join(answers[index]) for index in sorted(answers)]


def join(chunks: Sequence[GenerationChunk]) -> GenerationChunk:
    """All chunks of one answer as one."""
    return GenerationChunk(
        index=chunks[0].index,
        text="".join(chunk.text for chunk in chunks),
        token_ids=tuple(token_id for chunk in chunks for token_id in chunk.token_ids),
        logprobs=tuple(values for chunk in chunks for values in chunk.logprobs),
        silent=chunks[-1].silent,
        finish_reason=chunks[-1].finish_reason,
    )
