"""Extracts from a request what a learned router's text features need to know."""

from __future__ import annotations

from gateway.requests.types import Chat, GenerateRequest
from gateway.routes.features import PromptFacts


def prompt_facts(request: GenerateRequest) -> PromptFacts:
    """Return the facts about the first prompt of a request. Of token ids only their number is known, as if each were a
    word of one letter."""
    prompt, schema = request.prompts[0], request.sampling.grammar is not None
    if not isinstance(prompt, Chat):
        text = prompt if isinstance(prompt, str) else "x " * len(prompt)
        return PromptFacts((text,), text, schema=schema)
    texts = [str(message.get("content") or "") for message in prompt.messages]
    roles = [message.get("role") for message in prompt.messages]
    question = next((text for role, text in zip(reversed(roles), reversed(texts), strict=True) if role == "user"), "")
    return PromptFacts(texts, question, "system" in roles, len(prompt.tools), schema)
