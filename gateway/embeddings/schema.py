"""Schemas of the bodies of /v1/embeddings, /v1/rerank and /v1/score, and the fields that are known but not supported
there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from msgspec import Struct

from gateway.openai.fields import Refused
from gateway.openai.schema import Count, Extended, Kept, Tier
from gateway.requests.truncation import Side

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


NO_EFFECT = frozenset(("user", "input_type"))
"""Fields that are accepted without effect, also where unknown fields are refused."""

REFUSED: Mapping[str, Refused] = {
    "activation": Refused(),
    "embed_dtype": Refused((None, "float32")),
    "embedding_types": Refused((None, ["float"])),
    "endianness": Refused((None, "native", "little")),
    "max_chunks_per_doc": Refused(),
    "max_tokens_per_doc": Refused(),
    "messages": Refused(),
    "prompt_name": Refused(why="is not supported; put the instruction before each text"),
    "rank_fields": Refused(),
    "softmax": Refused(),
    "stream": Refused(),
    "truncate": Refused((None, False, "NONE")),
    "use_activation": Refused(),
}
"""Unsupported fields of vLLM, Jina and Cohere that only these routes have (`openai/fields.py` has the others)."""
