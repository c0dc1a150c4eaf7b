"""Extracts from a request what a learned router's text features need to know."""

from __future__ import annotations

from gateway.requests.types import Chat, GenerateRequest, PromptInput
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
    return PromptFacts(texts, last_question(prompt), "system" in roles, len(prompt.tools), schema)


def last_question(prompt: PromptInput) -> str:
    """Return the text of the last user message, or the prompt if it is a text; token ids have none."""
    if not isinstance(prompt, Chat):
        return prompt if isinstance(prompt, str) else ""
    said = [message for message in prompt.messages if message.get("role") == "user"]
    return str(said[-1].get("content") or "") if said else ""
