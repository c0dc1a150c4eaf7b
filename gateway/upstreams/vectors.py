"""Converts requests for vectors to bodies of OpenAI's embeddings, and their answers to chunks."""

from __future__ import annotations

import binascii
import math
from base64 import b64decode
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from engine.core.messages.requests import Pooling
from gateway.core.errors import unsupported_parameter
from gateway.requests.types import GenerateRequest, GenerationChunk
from gateway.upstreams.wire import Json, UpstreamFailed, Usage, usage_of

MOST_DIMENSIONS = 65_536
"""Maximum number of elements of a vector that an upstream may send."""


class Item(Struct):
    embedding: str | list[float]
    """Base64 of fp32 numbers in little-endian order, or numbers."""
    index: int = 0


class Vectors(Struct):
    """The body of an upstream's embeddings response, with only the fields that the gateway reads."""

    data: list[Item] = []
    usage: Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(Vectors).decode


def body_of(request: GenerateRequest, model: str) -> Json:
    """Return the body for a request for vectors that `bodies.check` accepts. `model` is the model's name at the
    upstream."""
    pooling = request.pooling or Pooling()
    body: Json = {"model": model, "input": list(request.prompts), "encoding_format": "base64"}
    optional = {
        "dimensions": pooling.dimensions or None,
        "normalize": None if pooling.normalize else False,
        "add_special_tokens": request.encoding.add_special_tokens,
    }
    return body | {name: value for name, value in optional.items() if value is not None}


def read_vectors(text: bytes) -> Vectors:
    """Return the answer in the body of a response. Raises UpstreamFailed if it is an error, or not of embeddings."""
    try:
        vectors = _decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise UpstreamFailed("an answer that is not of embeddings", is_transient=False) from error
    if vectors.error:
        raise UpstreamFailed("an error in place of vectors")
    return vectors


def chunks_of(answer: Vectors, request: GenerateRequest) -> Sequence[GenerationChunk]:
    """Return a chunk with the vector of each prompt; the last one has the usage. Raises UpstreamFailed unless there is
    one vector for each prompt, all of the same length, and ApiError (UNSUPPORTED_PARAMETER) if the request asks for
    another length."""
    pooling = request.pooling or Pooling()
    if sorted(item.index for item in answer.data) != list(range(len(request.prompts))):
        raise UpstreamFailed("other vectors than were asked for", is_transient=False)
    found = {item.index: _vector(item, pooling) for item in answer.data}
    lengths = {len(vector) for vector in found.values()}
    if len(lengths) != 1:
        raise UpstreamFailed("vectors of several lengths", is_transient=False)
    if pooling.dimensions and lengths != {pooling.dimensions}:
        raise unsupported_parameter("dimensions", f"is not supported by an upstream that gives {min(lengths)}")
    *chunks, last = (
        GenerationChunk(index, vector=found[index].astype("<f4").tobytes(), finish_reason="pooled")
        for index in sorted(found)
    )
    return [*chunks, replace(last, usage=replace(usage_of(answer.usage), completion=0, reasoning=0))]


def _vector(item: Item, pooling: Pooling) -> npt.NDArray[np.float32]:
    """Return the vector of an item as fp32, scaled to length 1 if the request asks for that. Raises UpstreamFailed if
    the item has no valid vector."""
    try:
        given = item.embedding if isinstance(item.embedding, list) else _decoded(item.embedding)
        vector: npt.NDArray[np.float32] = np.asarray(given, dtype=np.float32)
    except (ValueError, binascii.Error, OverflowError) as error:
        raise UpstreamFailed("a vector that cannot be read", is_transient=False) from error
    length = float(np.linalg.norm(vector))
    if not 0 < len(vector) <= MOST_DIMENSIONS or not math.isfinite(length):
        raise UpstreamFailed("a vector that cannot be read", is_transient=False)
    return np.divide(vector, length, dtype=np.float32) if pooling.normalize and length else vector


def _decoded(text: str) -> npt.NDArray[np.float32]:
    return np.frombuffer(b64decode(text, validate=True), dtype="<f4")
