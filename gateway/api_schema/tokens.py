"""Token ids of texts, and texts of token ids: what tenants send and get, and the operations."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from gateway.api_schema.chat_messages import ChatMessage, Tool
from gateway.api_schema.operation import Operation
from gateway.core.errors import Fault


class TokenizeRequest(Struct, kw_only=True):
    """Body of /tokenize, as in vLLM's API. Exactly one of `prompt` and `messages` is required."""

    model: str | None = None
    """Required if the gateway serves several base models."""
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool | None = None
    """By default true for a prompt, and false for messages."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Struct, kw_only=True):
    """Body of /detokenize."""

    tokens: list[int]
    model: str | None = None
    """Required if the gateway serves several base models."""


class Tokens(Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Text(Struct):
    prompt: str


COUNTED = frozenset({Fault.MODEL_NOT_FOUND, Fault.RATE_LIMIT_EXCEEDED})
TOKENIZE = Operation(
    "POST",
    "/tokenize",
    "Encode a text or a chat as token ids.",
    "tenant",
    Tokens,
    TokenizeRequest,
    COUNTED | {Fault.UNSUPPORTED_PARAMETER},
)
DETOKENIZE = Operation("POST", "/detokenize", "Decode token ids.", "tenant", Text, DetokenizeRequest, COUNTED)

OPERATIONS: tuple[Operation[Any], ...] = (TOKENIZE, DETOKENIZE)
