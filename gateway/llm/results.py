"""What callers get: whole results, pieces of streamed answers, and vectors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec import Struct

from engine.core.messages.prompt_logprobs import PromptLogprob
from engine.core.messages.requests import TokenLogprobs
from gateway.openai.tools import ChunkContent, ToolCalls, text_content
from gateway.requests.streams import join_answers
from gateway.requests.types import Admitted, GenerationChunk, TokenUsage

if TYPE_CHECKING:
    import numpy as np


class ToolCall(Struct, frozen=True):
    """A call of a tool or, in a stream, a piece of one: only the first piece has the id and the name."""

    index: int
    """Number of the call in its answer."""
    arguments: str
    """The arguments as the model wrote them, JSON unless it was cut off, or new text of them."""
    id: str = ""
    name: str = ""


class Answer(Struct, frozen=True):
    """One answer to a prompt or, in a stream, what is new of it."""

    index: int
    """Number of the answer, from 0 to n - 1."""
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    """`stop`, `length` or `tool_calls`. None means that the answer goes on."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Log probabilities of each token, if the request asked for them."""
    reasoning: str = ""
    """Text of the model's reasoning, which comes before its answer."""
    tool_calls: tuple[ToolCall, ...] = ()
    stop_string: str | None = None
    """The stop string that ended the answer. None means that something else ended it."""
    usage: TokenUsage | None = None
    """Usage of the whole request, which the last piece of a stream has."""


class Result(Struct, frozen=True):
    """The answers to one prompt."""

    prompt_token_ids: tuple[int, ...]
    outputs: tuple[Answer, ...]
    usage: TokenUsage
    prompt_logprobs: tuple[PromptLogprob | None, ...] = ()
    """Log probabilities and rank of each token of the prompt, if the request asked for them; None for the first."""

    @property
    def text(self) -> str:
        """The text of the first answer."""
        return self.outputs[0].text

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The tool calls of the first answer."""
        return self.outputs[0].tool_calls


class Embedding(Struct, frozen=True):
    """The vector of one text."""

    vector: np.ndarray
    """One-dimensional, fp32."""


def answer_of(chunk: GenerationChunk, reader: ToolCalls | None) -> Answer:
    """Convert a chunk to an `Answer`. `reader` separates tool calls from the text; None means that no tools were
    offered."""
    told = text_content(chunk) if reader is None else reader.read(chunk)
    return Answer(
        index=chunk.answer,
        text=told.text,
        token_ids=chunk.token_ids,
        finish_reason=told.finish_reason,
        logprobs=chunk.logprobs,
        reasoning=chunk.reasoning,
        tool_calls=_calls(told),
        stop_string=chunk.stop_string,
        usage=chunk.usage,
    )


def result_of(admitted: Admitted, chunks: Sequence[GenerationChunk], reader: ToolCalls | None) -> Result:
    """Return the result of a request with one prompt, from all chunks of all its answers."""
    usage = chunks[-1].usage
    assert usage is not None, "the last chunk carries it"
    joined = join_answers(chunks)
    answers = tuple(answer_of(chunk, reader) for chunk in joined)
    scored = tuple(scores for _, scores in joined[0].prompt_scores.pairs())
    return Result(admitted.prompt_ids[0], answers, usage, scored)


def embedding_of(vector: bytes) -> Embedding:
    """Return an embedding from its elements in fp32, little-endian."""
    import numpy as np  # imported here, so that a program that only imports this package does not wait for it

    return Embedding(np.frombuffer(vector, dtype="<f4"))


def _calls(told: ChunkContent) -> tuple[ToolCall, ...]:
    return tuple(
        ToolCall(call["index"], call["function"]["arguments"], call.get("id", ""), call["function"].get("name", ""))
        for call in told.calls
    )
