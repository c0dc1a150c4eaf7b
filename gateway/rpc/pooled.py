"""Converts the messages of Embed, Rerank and Score to requests for vectors, with the checks of HTTP's bodies, and the
vectors to their answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from google.protobuf.message import Message
from msgspec import Struct
from msgspec.structs import replace

from gateway.api_schema.vectors import EmbeddingsRequest, PoolingName, RerankRequest, ScoreRequest
from gateway.core.errors import invalid_request
from gateway.embeddings.parse import embeddings_request, rerank_request, score_request
from gateway.embeddings.render import Ranking, Scoring
from gateway.openai.parse import to_struct
from gateway.pb import generation_pb2 as pb
from gateway.requests.types import Admitted, GenerateRequest, TokenUsage
from gateway.rpc.wire import head_fields, lane_asked, model_query, slo_asked, usage_to_pb

POOLINGS: Mapping[int, PoolingName] = {
    pb.EmbedRequest.POOLING_UNSPECIFIED: "last",
    pb.EmbedRequest.POOLING_LAST: "last",
    pb.EmbedRequest.POOLING_MEAN: "mean",
}
PooledMessage = pb.EmbedRequest | pb.RerankRequest | pb.ScoreRequest


class Answer(Protocol):
    """Collects the vectors of one request and makes its answer."""

    def add(self, index: int, vector: bytes) -> None:
        """Take in the vector of the prompt with this number: fp32, little-endian."""

    def complete(self, admitted: Admitted, usage: TokenUsage) -> Message:
        """Return the answer, once every vector has been added."""


class PooledCall(Struct, frozen=True):
    """A parsed message and the maker of its answer."""

    request: GenerateRequest
    answer: Answer


class EmbedAnswer:
    """The `Answer` of Embed. It converts each vector to a message when it is added, because converting two thousand at
    once would block the event loop."""

    def __init__(self) -> None:
        self._vectors: dict[int, pb.Vector] = {}

    def add(self, index: int, vector: bytes) -> None:
        self._vectors[index] = pb.Vector(values=np.frombuffer(vector, dtype="<f4").tolist())

    def complete(self, admitted: Admitted, usage: TokenUsage) -> pb.EmbedResponse:
        ordered = [self._vectors[index] for index in sorted(self._vectors)]
        return pb.EmbedResponse(vectors=ordered, usage=usage_to_pb(usage), **head_fields(admitted))


class RerankAnswer(Ranking):
    def complete(self, admitted: Admitted, usage: TokenUsage) -> pb.RerankResponse:
        results = [
            pb.RerankResult(index=index, relevance_score=score, document=text) for index, score, text in self.ranked()
        ]
        return pb.RerankResponse(results=results, usage=usage_to_pb(usage), **head_fields(admitted))


class ScoreAnswer(Scoring):
    def complete(self, admitted: Admitted, usage: TokenUsage) -> pb.ScoreResponse:
        return pb.ScoreResponse(scores=self.scores(), usage=usage_to_pb(usage), **head_fields(admitted))


def embed_call(message: pb.EmbedRequest, request_id: str) -> PooledCall:
    """Convert the message of an Embed call to a request for vectors and the `Answer` that collects them. Raises
    ApiError: INVALID_REQUEST, a field is missing or invalid."""
    if bool(message.input) == bool(message.input_ids):
        raise invalid_request("one of input, input_ids is required", "input")
    texts: Sequence[Any] = message.input_ids or message.input
    body = _body(message, EmbeddingsRequest, {"input": texts}, "dimensions", "normalize")
    return PooledCall(_limited(embeddings_request(body, request_id), message), EmbedAnswer())


def rerank_call(message: pb.RerankRequest, request_id: str) -> PooledCall:
    """Convert the message of a Rerank call, like `embed_call`."""
    body = _body(message, RerankRequest, {"documents": message.documents}, "query", "top_n", "return_documents")
    return PooledCall(_limited(rerank_request(body, request_id), message), RerankAnswer(body))


def score_call(message: pb.ScoreRequest, request_id: str) -> PooledCall:
    """Convert the message of a Score call, like `embed_call`."""
    body = _body(message, ScoreRequest, {"queries": message.queries, "documents": message.documents})
    return PooledCall(_limited(score_request(body, request_id), message), ScoreAnswer(body))


def _body(message: Any, kind: type[Any], lists: Mapping[str, Sequence[Any]], *names: str) -> Any:
    """Convert a message to the equivalent HTTP body, a struct of the type `kind`, which checks the fields. `lists` has
    the message's lists of texts or TokenIds, by field. Of the fields `names`, the body gets those that the message
    sets. Raises ApiError: INVALID_REQUEST."""
    if message.pooling not in POOLINGS:
        kinds = ", ".join(pb.EmbedRequest.Pooling.keys())
        raise invalid_request(f"pooling {message.pooling} is none of {kinds}", "pooling")
    optional = {name for name in names if message.DESCRIPTOR.fields_by_name[name].has_presence}
    given = {name: getattr(message, name) for name in names if name not in optional or message.HasField(name)}
    plain = {name: [_plain(member) for member in members] for name, members in lists.items()}
    named = {"model": model_query(message.model).model, "pooling": POOLINGS[message.pooling]}
    return to_struct({**named, **plain, **given}, kind)


def _plain(member: str | pb.TokenIds) -> str | list[int]:
    return member if isinstance(member, str) else list(member.ids)


def _limited(request: GenerateRequest, message: PooledMessage) -> GenerateRequest:
    """Return the request with the lane, the priority and the latency goals that a message asks for."""
    slo = slo_asked(message.slo)
    return replace(
        request, lane=lane_asked(message.lane), priority=message.priority or None, ttft=slo.ttft, itl=slo.itl
    )
