"""Answers of a virtual model's member that the gateway holds back until acceptance tests decide whether the caller gets
them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from msgspec import Struct
from msgspec.structs import replace

from gateway.requests.member_run import MemberRun
from gateway.requests.streams import join_answers
from gateway.requests.types import Admitted, Generation, GenerationChunk, Speech
from gateway.text.chat_template import ToolSchema
from gateway.text.tools.calls import ToolCallPart
from gateway.text.tools.dialect import schemas_of
from gateway.text.tools.parser import Part, ToolParser
from gateway.virtual_models.acceptance import HeldAnswer


class HeldRun(Struct, frozen=True):
    """A member's complete answers to a request, with all their chunks."""

    run: MemberRun
    admitted: Admitted
    chunks: Sequence[GenerationChunk]

    def answers(self, tools: Sequence[ToolSchema]) -> list[HeldAnswer]:
        """Return the answers in the form that the acceptance tests of a cascade read (`virtual_models/acceptance.py`).
        `tools` are those that the request offers."""
        return [_answer(chunk, self.admitted.speech, tools) for chunk in join_answers(self.chunks)]

    def replay(self, *, with_logprobs: bool) -> Generation:
        """Return a generation that gives the caller the held chunks. Unless `with_logprobs`, it drops their log
        probabilities, which were computed only for the acceptance tests."""
        return Generation(self.admitted, None, _replayed(self.chunks, with_logprobs))


async def _replayed(chunks: Sequence[GenerationChunk], with_logprobs: bool) -> AsyncIterator[GenerationChunk]:
    for chunk in chunks:
        yield chunk if with_logprobs or not chunk.logprobs else replace(chunk, logprobs=())


def _answer(chunk: GenerationChunk, speech: Speech, tools: Sequence[ToolSchema]) -> HeldAnswer:
    logprobs = [values.logprob for values in chunk.logprobs]
    if not tools or speech.dialect is None:
        return HeldAnswer(chunk.text, chunk.finish_reason or "", logprobs, _joined(chunk.calls))
    parser = ToolParser(speech.dialect, schemas_of(tools))
    parts = [*parser.push(chunk.text), *parser.flush()]
    text = "".join(part for part in parts if isinstance(part, str))
    return HeldAnswer(text, chunk.finish_reason or "", logprobs, _joined(parts))


def _joined(parts: Sequence[Part]) -> list[tuple[str, str]]:
    """Return name and arguments of each tool call in the parts of an answer."""
    calls: dict[int, tuple[str, str]] = {}
    for part in parts:
        if isinstance(part, ToolCallPart):
            name, arguments = calls.get(part.index, ("", ""))
            calls[part.index] = name + part.name, arguments + part.arguments
    return list(calls.values())
