"""Parses bodies of requests for vectors, and converts them to requests with one prompt for each text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import TypeVar

from engine.core.messages.requests import Pooling, PoolingKind
from gateway.api_schema.chats import Slo
from gateway.api_schema.vectors import EmbeddingsRequest, PooledBody, RerankRequest, ScoreRequest
from gateway.core.errors import invalid_request
from gateway.core.lanes import requested_lane
from gateway.core.routing import ModelQuery
from gateway.core.tenants import UnknownFields
from gateway.core.trace_context import UNKNOWN, Ingress
from gateway.embeddings.refused_fields import NO_EFFECT, REFUSED
from gateway.openai.convert import extensions, prompts_of, truncation_of
from gateway.openai.parse import decode_json, to_struct
from gateway.openai.refused_fields import refuse_unsupported
from gateway.openai.unknown import check_unknown
from gateway.requests.types import GenerateRequest, PromptInput

Body = TypeVar("Body", bound=PooledBody)

KINDS = {kind.value: kind for kind in PoolingKind}


def parse(text: bytes, kind: type[Body], unknown: UnknownFields = "ignore") -> Body:
    """Parse a JSON body. `unknown` decides about unknown fields that are not misspellings of known ones.

    Raises ApiError: INVALID_JSON; INVALID_REQUEST, a field is missing, unknown, of a wrong type or out of range;
    UNSUPPORTED_PARAMETER, a field is set that is not supported. The last two name the field.
    """
    document = decode_json(text, kind)
    if isinstance(document, dict):
        check_unknown(document, _known(kind), unknown)
        refuse_unsupported(document, kind, REFUSED)
    return to_struct(document, kind)


@cache
def _known(kind: type[PooledBody]) -> Mapping[str, frozenset[str]]:
    """Return the known field names of each object in a body, by the object's path."""
    names = frozenset((*kind.__struct_fields__, *REFUSED, *NO_EFFECT))
    return {"": names, "slo": frozenset(Slo.__struct_fields__)}


def embeddings_request(body: EmbeddingsRequest, request_id: str, ingress: Ingress = UNKNOWN) -> GenerateRequest:
    """Convert a body to a request. Raises ApiError: INVALID_REQUEST, the input is empty or mixes kinds."""
    prompts = prompts_of(body.input, "input")
    is_list = isinstance(body.input, list) and not isinstance(body.input[0], int)
    fields = _members("input", len(prompts)) if is_list else ("input",)
    return _request(body, prompts, fields, request_id, ingress, body.dimensions or 0, body.normalize is not False)


def rerank_request(body: RerankRequest, request_id: str, ingress: Ingress = UNKNOWN) -> GenerateRequest:
    """Convert a body to a request whose first prompt is the query, and the others the documents. Raises ApiError:
    INVALID_REQUEST, there are no documents."""
    if not body.documents:
        raise invalid_request("documents must not be empty", "documents")
    fields = ("query", *_members("documents", len(body.documents)))
    return _request(body, (body.query, *texts_of(body)), fields, request_id, ingress)


def texts_of(body: RerankRequest) -> list[str]:
    return [document if isinstance(document, str) else document.text for document in body.documents]


def score_request(body: ScoreRequest, request_id: str, ingress: Ingress = UNKNOWN) -> GenerateRequest:
    """Convert the body of /v1/score to a request whose prompts are the texts of the first side, then those of the
    second. Raises ApiError: INVALID_REQUEST, a side is missing, given under both of its names or empty, or the first
    side has several texts and the second not equally many."""
    names = ("text_1", "text_2"), ("queries", "documents")
    given = [pair for pair in names if any(getattr(body, name) is not None for name in pair)]
    if len(given) != 1:
        raise invalid_request("give either text_1 and text_2, or queries and documents", "text_1")
    prompts: list[str] = []
    fields: list[str] = []
    for name in given[0]:
        side = getattr(body, name)
        if not side:
            raise invalid_request(f"{name} is required and must not be empty", name)
        prompts += (side,) if isinstance(side, str) else side
        fields += (name,) if isinstance(side, str) else _members(name, len(side))
    num_first, num_second = side_lengths(body)
    if num_first not in (1, num_second):
        raise invalid_request(f"{given[0][0]} has {num_first} texts, and must have 1 or {num_second}", given[0][0])
    return _request(body, prompts, fields, request_id, ingress)


def side_lengths(body: ScoreRequest) -> tuple[int, int]:
    """Return how many texts the first and the second side of a /v1/score body have."""
    first, second = body.text_1 or body.queries or (), body.text_2 or body.documents or ()
    return tuple(1 if isinstance(side, str) else len(side) for side in (first, second))  # type: ignore[return-value]


def _members(field: str, count: int) -> tuple[str, ...]:
    return tuple(f"{field}[{index}]" for index in range(count))


def _request(
    body: PooledBody,
    prompts: Sequence[PromptInput],
    fields: Sequence[str],
    request_id: str,
    ingress: Ingress,
    dimensions: int = 0,
    normalize: bool = True,
) -> GenerateRequest:
    return GenerateRequest(
        model=ModelQuery(body.model, body.adapter_id, body.lora_path),
        prompts=tuple(prompts),
        prompt_fields=tuple(fields),
        pooling=Pooling(KINDS[body.pooling or "last"], dimensions, normalize),
        request_id=request_id,
        ingress=ingress,
        max_tokens=0,
        coalesce=True,
        lane=requested_lane(body.service_tier),
        truncation=truncation_of(body, "right"),
        local_field="pooling" if body.pooling else "",
        **extensions(body),
    )
