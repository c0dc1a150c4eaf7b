"""Converts the gateway's answers to messages of `loralane.v1`; `pooled.py` does so for vectors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from engine.core.messages.requests import Lane, TokenLogprobs
from gateway.openai.tools import ChunkContent
from gateway.pb import generation_pb2 as pb
from gateway.requests.prompt_scores import PromptScores
from gateway.requests.streams import join_answers
from gateway.requests.types import Admitted, GenerationChunk, TokenUsage

TokenText = Callable[[int], str]
Read = Callable[[GenerationChunk], ChunkContent]
"""Function that separates the tool calls of a chunk from its text."""

_LANE: Mapping[Lane, pb.Lane] = {Lane.INTERACTIVE: pb.LANE_INTERACTIVE, Lane.BATCH: pb.LANE_BATCH}
_FINISH: Mapping[str | None, pb.FinishReason] = {
    None: pb.FINISH_REASON_UNSPECIFIED,
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
    "tool_calls": pb.FINISH_REASON_TOOL_CALLS,
}


def chunk_to_pb(
    admitted: Admitted, chunk: GenerationChunk, told: ChunkContent, token_text: TokenText
) -> pb.GenerateChunk:
    choice = _choice(chunk, told, token_text)
    return pb.GenerateChunk(choice=choice, usage=usage_to_pb(chunk.usage), **head_fields(admitted))


def response_bytes(admitted: Admitted, chunks: Sequence[GenerationChunk], read: Read, token_text: TokenText) -> bytes:
    """Return the encoded GenerateResponse to the `admitted` request from all chunks, each answer's in order; the last
    has the usage. `read` separates tool calls; `token_text` returns a token's text."""
    # Each answer is encoded by itself, because a thread lets others run only between calls into protobuf: 128 answers
    # with log probabilities took 0.1 s at once. An encoding's parts may follow each other.
    head = pb.GenerateResponse(usage=usage_to_pb(chunks[-1].usage), **head_fields(admitted))
    choices = (_choice(answer, read(answer), token_text) for answer in join_answers(chunks))
    parts = [pb.GenerateResponse(choices=[choice]).SerializeToString() for choice in choices]
    return b"".join([head.SerializeToString(), *parts])


def usage_metadata(usage: TokenUsage) -> dict[str, str]:
    """Return a request's usage as entries of trailing metadata: from header name to number of tokens, as text."""
    return {
        "x-loralane-prompt-tokens": str(usage.prompt),
        "x-loralane-cached-tokens": str(usage.cached),
        "x-loralane-completion-tokens": str(usage.completion),
    }


def head_fields(admitted: Admitted) -> dict[str, Any]:
    """Return the fields, by name, that the messages GenerateResponse and GenerateChunk have in common."""
    return {
        "id": admitted.id,
        "model": admitted.model,
        "lane": _LANE[admitted.lane],
        "system_fingerprint": admitted.fingerprint,
    }


def _choice(chunk: GenerationChunk, told: ChunkContent, token_text: TokenText) -> pb.Choice:
    return pb.Choice(
        index=chunk.answer,
        text=told.text,
        token_ids=chunk.token_ids,
        logprobs=_logprobs(chunk, token_text),
        finish_reason=_FINISH[told.finish_reason],
        tool_calls=map(_tool_call, told.calls),
        reasoning_content=chunk.reasoning,
        prompt_logprobs=_prompt_logprobs(chunk.prompt_scores, token_text),
    )


def _tool_call(call: Mapping[str, Any]) -> pb.ToolCall:
    function = call["function"]
    return pb.ToolCall(
        index=call["index"],
        id=call.get("id", ""),
        name=function.get("name", ""),
        arguments=function["arguments"],
    )


def _logprobs(chunk: GenerationChunk, token_text: TokenText) -> list[pb.TokenLogprob]:
    if not chunk.logprobs:
        return []
    pairs = zip(chunk.token_ids, chunk.logprobs, strict=True)
    return [_token_logprob(token_id, values, token_text) for token_id, values in pairs]


def _prompt_logprobs(scores: PromptScores, token_text: TokenText) -> list[pb.TokenLogprob]:
    found = []
    for token_id, scored in scores.pairs():
        if scored is not None:
            found.append(_token_logprob(token_id, scored.values, token_text))
            found[-1].rank = scored.rank
    return found


def _token_logprob(token_id: int, values: TokenLogprobs, token_text: TokenText) -> pb.TokenLogprob:
    top = [pb.TopLogprob(token_id=other, token=token_text(other), logprob=logprob) for other, logprob in values.top]
    return pb.TokenLogprob(token_id=token_id, token=token_text(token_id), logprob=values.logprob, top=top)


def usage_to_pb(usage: TokenUsage | None) -> pb.Usage | None:
    if usage is None:
        return None
    return pb.Usage(
        prompt_tokens=usage.prompt,
        cached_tokens=usage.cached,
        completion_tokens=usage.completion,
        reasoning_tokens=usage.reasoning,
        accepted_prediction_tokens=usage.accepted_prediction,
        rejected_prediction_tokens=usage.rejected_prediction,
    )
