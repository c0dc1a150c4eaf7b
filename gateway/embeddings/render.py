"""Renders vectors, rankings and similarity scores as response bodies."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from gateway.api_schema.vectors import EmbeddingsRequest, RerankRequest, ScoreRequest
from gateway.embeddings.parse import side_lengths, texts_of
from gateway.openai.render import encode_json
from gateway.requests.types import Admitted, TokenUsage

Json = dict[str, Any]
Vector = npt.NDArray[np.float32]


class EmbeddingsRenderer:
    """Renders the response of /v1/embeddings. Each vector is encoded when it comes: encoding two thousand at once would
    stop the event loop for a second."""

    def __init__(self, body: EmbeddingsRequest) -> None:
        self._is_text = body.encoding_format == "base64"
        self._encoded: dict[int, str | msgspec.Raw] = {}

    def add(self, index: int, vector: bytes) -> None:
        if self._is_text:
            self._encoded[index] = b64encode(vector).decode()
        else:
            self._encoded[index] = msgspec.Raw(encode_json(_floats(vector).tolist()))

    def complete(self, admitted: Admitted, usage: TokenUsage) -> Json:
        data = [
            {"object": "embedding", "index": index, "embedding": vector}
            for index, vector in sorted(self._encoded.items(), key=lambda item: item[0])
        ]
        return {"object": "list", "data": data, "model": admitted.model, "usage": usage_body(usage)}


class Collector:
    """Collects the vectors of a request's texts, which come in any order."""

    def __init__(self) -> None:
        self._vectors: dict[int, Vector] = {}

    def add(self, index: int, vector: bytes) -> None:
        self._vectors[index] = _floats(vector)

    def in_order(self) -> Sequence[Vector]:
        return [self._vectors[index] for index in sorted(self._vectors)]


class Ranking(Collector):
    """Ranks documents by cosine similarity to the query, the most similar first, and of equally similar ones the first
    in the request."""

    def __init__(self, body: RerankRequest) -> None:
        super().__init__()
        self._body = body

    def ranked(self) -> list[tuple[int, float, str | None]]:
        """Return the index, the similarity and, if the request asks for it, the text of each document to return."""
        query, *documents = self.in_order()
        scores = (np.stack(documents) @ query).tolist()
        indices = sorted(range(len(scores)), key=lambda index: -scores[index])[: self._body.top_n]
        texts = texts_of(self._body) if self._body.return_documents is not False else None
        return [(index, scores[index], texts[index] if texts else None) for index in indices]


class RerankRenderer(Ranking):
    """Renders the response of /v1/rerank."""

    def complete(self, admitted: Admitted, usage: TokenUsage) -> Json:
        results = [
            {"index": index, "relevance_score": score} | ({} if text is None else {"document": {"text": text}})
            for index, score, text in self.ranked()
        ]
        name = f"rerank-{admitted.id}"
        return {"id": name, "model": admitted.model, "results": results, "usage": usage_body(usage)}


class Scoring(Collector):
    """Compares the texts of the first side of a request with those of the second."""

    def __init__(self, body: ScoreRequest) -> None:
        super().__init__()
        self._num_first = side_lengths(body)[0]

    def scores(self) -> list[float]:
        """Return the cosine similarity of each pair of texts, in order. One text of the first side pairs with each of
        the second."""
        vectors = np.stack(self.in_order())
        scores: list[float] = (vectors[: self._num_first] * vectors[self._num_first :]).sum(axis=1).tolist()
        return scores


class ScoreRenderer(Scoring):
    """Renders the response of /v1/score."""

    def complete(self, admitted: Admitted, usage: TokenUsage) -> Json:
        return {
            "id": f"score-{admitted.id}",
            "object": "list",
            "created": admitted.created,
            "model": admitted.model,
            "data": [{"index": index, "object": "score", "score": score} for index, score in enumerate(self.scores())],
            "usage": usage_body(usage),
        }


def usage_body(usage: TokenUsage) -> Json:
    return {"prompt_tokens": usage.prompt, "total_tokens": usage.prompt}


def _floats(vector: bytes) -> Vector:
    return np.frombuffer(vector, dtype="<f4")
