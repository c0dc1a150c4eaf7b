"""All operations of the HTTP API, with their request bodies, responses and errors."""

from __future__ import annotations

from gateway.api_schema import (
    accounts,
    adapters,
    admins,
    batches,
    console,
    engines,
    files,
    gateways,
    limits,
    status,
    tokens,
    traffic,
    usage,
    vectors,
)
from gateway.api_schema import chats as bodies
from gateway.api_schema.common import GENERATION
from gateway.api_schema.operation import Operation
from gateway.http.openapi import answers
from gateway.http.openapi.messages import message_operations
from gateway.http.openapi.responses import response_operations
from gateway.protocols.invocations import Invocation

OPERATIONS: tuple[Operation, ...] = (
    Operation(
        "POST",
        "/v1/chat/completions",
        "Create a chat completion.",
        "tenant",
        answers.ChatCompletion,
        bodies.ChatRequest,
        GENERATION,
        answers.ChatCompletionChunk,
    ),
    Operation(
        "POST",
        "/v1/completions",
        "Complete one or several prompts.",
        "tenant",
        answers.Completion,
        bodies.CompletionRequest,
        GENERATION,
        answers.Completion,
    ),
    *response_operations(GENERATION),
    *message_operations(GENERATION),
    *vectors.OPERATIONS,
    Operation(
        "POST",
        "/invocations",
        "Chat, complete, embed, rank or score, as the fields of the body say (SageMaker).",
        "tenant",
        answers.Invoked,
        Invocation,
        GENERATION,
        answers.Invoked,
    ),
    status.LIST_MODELS,
    status.GET_MODEL,
    *tokens.OPERATIONS,
    *files.OPERATIONS,
    *batches.OPERATIONS,
    *adapters.OPERATIONS,
    engines.CHECK,
    *limits.OPERATIONS,
    *usage.OPERATIONS,
    *accounts.OPERATIONS,
    *admins.OPERATIONS,
    *engines.OPERATIONS,
    *gateways.OPERATIONS,
    *traffic.OPERATIONS,
    *console.OPERATIONS,
    *status.OPERATIONS,
)
