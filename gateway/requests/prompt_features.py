"""What a learned router uses to choose the member of a virtual model that answers: facts about a request's prompt, and
the prompt's vector."""

from __future__ import annotations

import numpy as np
from msgspec.structs import replace

from engine.core.messages.requests import Pooling, PoolingKind, SamplingParams
from gateway.core.errors import ApiError
from gateway.core.tenants import Principal
from gateway.requests.member_run import MemberRun
from gateway.requests.members import Members
from gateway.requests.types import Chat, GenerateRequest, PromptInput
from gateway.virtual_models.features import PromptFacts
from gateway.virtual_models.policy import NoVector, Vector


async def prompt_vector(
    members: Members, principal: Principal, request: GenerateRequest, run: MemberRun, pooling: str
) -> Vector:
    """Return the vector of a request's first prompt: fp32 [hidden_size], of length 1.

    The tenant is charged for the prompt. The run leaves the prompt's KV in the prefix cache, so that an answer of the
    same member computes only the last page of the prompt again.

    Args:
        members: run the member.
        run: the run that computes the vector.
        pooling: the name of a PoolingKind.

    Raises:
        NoVector: the member cannot compute it now.
    """
    asked = replace(
        request,
        prompts=request.prompts[:1],
        pooling=Pooling(PoolingKind(pooling), shares_pages=True),
        sampling=SamplingParams(),
        grammar_field=None,
        max_tokens=0,
        reserve_tokens=0,
        n=1,
        stop=(),
        thinking_budget=None,
        needs_thinking=False,
        prediction="",
        coalesce=True,
    )
    try:
        async with members.serve(principal, asked, run) as generation:
            async for chunk in generation:
                if chunk.vector:
                    return np.frombuffer(chunk.vector, dtype="<f4")
    except ApiError as error:
        raise NoVector(error.message) from error
    raise NoVector("the run ended without a vector")


def prompt_facts(request: GenerateRequest) -> PromptFacts:
    """Return the facts about the first prompt of a request. Of token ids only their number is known, as if each were a
    word of one letter."""
    prompt, schema = request.prompts[0], request.sampling.grammar is not None
    if not isinstance(prompt, Chat):
        text = prompt if isinstance(prompt, str) else "x " * len(prompt)
        return PromptFacts((text,), text, schema=schema)
    texts = [str(message.get("content") or "") for message in prompt.messages]
    roles = [message.get("role") for message in prompt.messages]
    return PromptFacts(texts, last_question(prompt), "system" in roles, len(prompt.tools), schema)


def last_question(prompt: PromptInput) -> str:
    """Return the text of a chat's last user message, or a text prompt as it is. Empty means that there is none, as in a
    prompt of token ids."""
    if not isinstance(prompt, Chat):
        return prompt if isinstance(prompt, str) else ""
    said = [message for message in prompt.messages if message.get("role") == "user"]
    return str(said[-1].get("content") or "") if said else ""
