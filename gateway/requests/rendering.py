"""Renders whole answers in a thread if they are long, so that the event loop goes on meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from gateway.core.in_thread import in_thread
from gateway.requests.prompt_scores import ENTRIES_AT_ONCE
from gateway.requests.types import GenerationChunk

T = TypeVar("T")

TOKENS_PER_ENTRY = 16
"""Tokens without log probabilities that take as long to render as one log probability."""


async def off_the_loop(chunks: Sequence[GenerationChunk], render: Callable[[], T]) -> T:
    """Call `render`, which renders the chunks of a whole response, and return its result. More than `ENTRIES_AT_ONCE`
    log probabilities, of the answers and of the prompt, are rendered in a thread."""
    if sum(map(_entries, chunks)) > ENTRIES_AT_ONCE:
        return await in_thread(render)
    return render()


def _entries(chunk: GenerationChunk) -> int:
    width = 1 + len(chunk.logprobs[0].top) if chunk.logprobs else 0
    scored = len(chunk.logprobs) * width + chunk.prompt_scores.num_entries
    return scored + len(chunk.token_ids) // TOKENS_PER_ENTRY
