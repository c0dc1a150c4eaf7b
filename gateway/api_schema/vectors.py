"""Vectors, similarities and orders of texts: what tenants send and get, and the operations."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from gateway.api_schema.chats import Count, Extended, Kept, Side, Tier
from gateway.api_schema.common import GENERATION
from gateway.api_schema.operation import A, Operation

PoolingName = Literal["last", "mean"]


class PooledBody(Extended, kw_only=True):
    """Fields that the three bodies have in common."""

    model: str
    pooling: PoolingName | None = None
    """Makes a text's vector from the hidden state of its last token (the default) or from the mean over its tokens."""
    service_tier: Tier | None = None
    add_special_tokens: bool | None = None
    """False leaves special tokens such as BOS out, as in vLLM's API."""
    truncate_prompt_tokens: Kept | None = None
    """Longer texts lose their end, as in vLLM's API, or their beginning if `truncation_side` is left."""
    truncation_side: Side | None = None

    @property
    def stream(self) -> bool:
        return False


class EmbeddingsRequest(PooledBody, kw_only=True):
    """Body of /v1/embeddings."""

    input: str | list[str | int | list[int]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Count | None = None
    """Leading elements to keep of each vector, before it is normalised."""
    normalize: bool | None = None
    """False leaves vectors as long as they are. By default their Euclidean length is 1."""


class RerankDocument(Struct):
    text: str


class RerankRequest(PooledBody, kw_only=True):
    """Body of /v1/rerank, as in Jina's and Cohere's APIs."""

    query: str
    documents: list[str | RerankDocument]
    top_n: Count | None = None
    """Number of results. None means all documents."""
    return_documents: bool | None = None
    """False leaves the documents out of the results."""


class ScoreRequest(PooledBody, kw_only=True):
    """Body of /v1/score, as in vLLM's API: `text_1` and `text_2`, or the same as `queries` and `documents`. One text is
    compared with each of several, and as many texts pairwise."""

    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    queries: str | list[str] | None = None
    documents: str | list[str] | None = None


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


def _operation(path: str, summary: str, answer: type[A], body: type[PooledBody]) -> Operation[A]:
    return Operation("POST", path, summary, "tenant", answer, body, GENERATION)


EMBEDDINGS = _operation("/v1/embeddings", "Create the vectors of one or several texts.", Embeddings, EmbeddingsRequest)
RERANK = _operation("/v1/rerank", "Order documents by similarity to a query.", Ranking, RerankRequest)
SCORE = _operation("/v1/score", "Compare texts.", Scores, ScoreRequest)

OPERATIONS: tuple[Operation[Any], ...] = (
    EMBEDDINGS,
    RERANK,
    _operation("/rerank", "Order documents by similarity to a query (vLLM).", Ranking, RerankRequest),
    _operation("/v2/rerank", "Order documents by similarity to a query (Cohere).", Ranking, RerankRequest),
    SCORE,
    _operation("/score", "Compare texts (vLLM).", Scores, ScoreRequest),
)
