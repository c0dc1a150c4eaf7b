"""Turns the body of a request for vectors into a request and the renderer of its response, for HTTP handlers and for
the lines of batches."""

from __future__ import annotations

from typing import Protocol

from msgspec import Struct

from gateway.api_schema.vectors import EmbeddingsRequest, RerankRequest, ScoreRequest
from gateway.core.tenants import Tenant
from gateway.core.trace_context import UNKNOWN, Ingress
from gateway.embeddings.parse import embeddings_request, parse, rerank_request, score_request
from gateway.embeddings.render import EmbeddingsRenderer, RerankRenderer, ScoreRenderer
from gateway.openai.render import Json, WholeAnswer
from gateway.requests.service import Gateway
from gateway.requests.types import Admitted, GenerateRequest, Generation, TokenUsage


class VectorRenderer(Protocol):
    """Renders one response. An instance serves one request."""

    def add(self, index: int, vector: bytes) -> None:
        """Take in the vector of the prompt with this number: fp32, little-endian."""

    def complete(self, admitted: Admitted, usage: TokenUsage) -> Json:
        """Return the body of the response, once every vector has been added."""


class PooledCall(Struct, frozen=True):
    """A parsed request and the renderer of its response, which is never a stream."""

    request: GenerateRequest
    renderer: VectorRenderer

    async def whole(self, generation: Generation) -> WholeAnswer:
        usage = None
        async for chunk in generation:
            if chunk.vector:  # the first chunk of an answer says only that the engine has begun
                self.renderer.add(chunk.answer, chunk.vector)
            usage = chunk.usage
        assert usage is not None, "the last chunk carries it"
        return WholeAnswer(self.renderer.complete(generation.admitted, usage), usage)


def embeddings_call(
    gateway: Gateway, tenant: Tenant, text: bytes, request_id: str, ingress: Ingress = UNKNOWN
) -> PooledCall:
    """Parse `text`, the JSON body of /v1/embeddings. The tenant's settings decide about unknown fields. Raises
    ApiError: INVALID_JSON; INVALID_REQUEST, a field is missing or invalid; UNSUPPORTED_PARAMETER, a field or its value
    is not supported."""
    body = parse(text, EmbeddingsRequest, tenant.unknown_fields)
    return PooledCall(embeddings_request(body, request_id, ingress), EmbeddingsRenderer(body))


def rerank_call(
    gateway: Gateway, tenant: Tenant, text: bytes, request_id: str, ingress: Ingress = UNKNOWN
) -> PooledCall:
    """Parse `text`, the JSON body of /v1/rerank, like `embeddings_call`."""
    body = parse(text, RerankRequest, tenant.unknown_fields)
    return PooledCall(rerank_request(body, request_id, ingress), RerankRenderer(body))


def score_call(
    gateway: Gateway, tenant: Tenant, text: bytes, request_id: str, ingress: Ingress = UNKNOWN
) -> PooledCall:
    """Parse `text`, the JSON body of /v1/score, like `embeddings_call`."""
    body = parse(text, ScoreRequest, tenant.unknown_fields)
    return PooledCall(score_request(body, request_id, ingress), ScoreRenderer(body))
