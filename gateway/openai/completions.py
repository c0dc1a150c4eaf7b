"""Converts bodies of completions to the gateway's `GenerateRequest`, and reads fields that hold prompts."""

from __future__ import annotations

from msgspec.structs import replace

from gateway.api_schema.chats import CompletionRequest
from gateway.core.errors import invalid_request
from gateway.core.trace_context import UNKNOWN, Ingress
from gateway.openai.convert import output_of, request_of
from gateway.requests.types import GenerateRequest

COMPLETION_TOKENS = 16
"""Default maximum of output tokens of /v1/completions, as OpenAI documents it."""


def completion_request(body: CompletionRequest, request_id: str, ingress: Ingress = UNKNOWN) -> GenerateRequest:
    """Convert the body of a completion to a request with one or several prompts. An echo with `logprobs` asks for log
    probabilities of the prompt, too. Raises ApiError: INVALID_REQUEST, fields contradict each other or a prompt or
    grammar is invalid; UNSUPPORTED_PARAMETER, the grammar's kind, or a `best_of` other than `n` is not supported."""
    if body.echo and body.truncate_prompt_tokens is not None:
        raise invalid_request("echo and truncate_prompt_tokens exclude each other", "truncate_prompt_tokens")
    if body.max_tokens == 0 and not body.echo and body.prompt_logprobs is None:
        raise invalid_request("max_tokens must be at least 1 without echo or prompt_logprobs", "max_tokens")
    asked = [width for width in (body.logprobs if body.echo else None, body.prompt_logprobs) if width is not None]
    output = replace(output_of(body, body.max_tokens), default_max_tokens=COMPLETION_TOKENS)
    request = request_of(body, prompts_of(body.prompt, "prompt"), request_id, ingress, output)
    sampling = request.sampling._replace(logprobs=body.logprobs, prompt_logprobs=max(asked, default=None))
    return replace(request, sampling=sampling)


def prompts_of(prompt: str | list[str | int | list[int]], field: str) -> tuple[str | tuple[int, ...], ...]:
    """Return the prompts in a field: a text, a list of token ids, or a list of texts or of lists of ids.

    Raises ApiError: INVALID_REQUEST, the list is empty or mixes kinds.
    """
    if isinstance(prompt, str):
        return (prompt,)
    if not prompt:
        raise invalid_request(f"the {field} is empty", field)
    for kind in (str, int, list):
        if all(isinstance(item, kind) for item in prompt):
            return (tuple(prompt),) if kind is int else tuple(_prompt(item) for item in prompt)  # type: ignore[arg-type]
    raise invalid_request(f"{field} must be a text, token ids, a list of texts or a list of lists of token ids", field)


def _prompt(item: str | int | list[int]) -> str | tuple[int, ...]:
    return tuple(item) if isinstance(item, list) else str(item)
