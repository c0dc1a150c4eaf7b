"""Bodies of /v1/embeddings, /v1/rerank and /v1/score as described in /openapi.json. They are rendered in
gateway/embeddings/."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from gateway.core.errors import Fault
from gateway.embeddings.schema import EmbeddingsRequest, RerankRequest, ScoreRequest
from gateway.http.openapi.operation import Operation


class PooledUsage(Struct):
    """Usage of a request in tokens, all of which are prompt tokens."""

    prompt_tokens: int
    total_tokens: int


class Embedding(Struct):
    object: Literal["embedding"]
    index: int
    """Number of the text in the input, from 0."""
    embedding: list[float] | str
    """The vector, or its elements in fp32 (little-endian) as base64."""


class Embeddings(Struct):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: PooledUsage


class RankedText(Struct):
    text: str


class RankedDocument(Struct):
    index: int
    """Number of the document in the request, from 0."""
    relevance_score: float
    """Cosine similarity to the query."""
    document: RankedText | UnsetType = UNSET


class Ranking(Struct):
    """The most similar documents, the most similar first."""

    id: str
    model: str
    results: list[RankedDocument]
    usage: PooledUsage


class Score(Struct):
    index: int
    object: Literal["score"]
    score: float
    """Cosine similarity of the pair with this number, from 0."""


class Scores(Struct):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: PooledUsage


def embeddings_operations(generation: frozenset[Fault]) -> tuple[Operation, ...]:
    """Return the operations that embed, rerank and score texts. `generation` holds the errors of every request for a
    generation."""
    ours = (
        ("/v1/embeddings", "Create the vectors of one or several texts.", Embeddings, EmbeddingsRequest),
        ("/v1/rerank", "Order documents by similarity to a query.", Ranking, RerankRequest),
        ("/rerank", "Order documents by similarity to a query (vLLM).", Ranking, RerankRequest),
        ("/v2/rerank", "Order documents by similarity to a query (Cohere).", Ranking, RerankRequest),
        ("/v1/score", "Compare texts.", Scores, ScoreRequest),
        ("/score", "Compare texts (vLLM).", Scores, ScoreRequest),
    )
    return tuple(
        Operation("POST", path, summary, "tenant", answer, body, generation) for path, summary, answer, body in ours
    )
