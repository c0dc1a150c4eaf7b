"""Tells from the fields of a body which endpoint it is for, as vLLM's `/invocations` does for SageMaker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from gateway.core.errors import invalid_request
from gateway.core.tenants import Tenant
from gateway.core.trace_context import UNKNOWN, Ingress
from gateway.embeddings.calls import PooledCall, embeddings_call, rerank_call, score_call
from gateway.openai.calls import ApiCall, chat_call, completion_call
from gateway.openai.parse import decode_json
from gateway.requests.service import Gateway

PARSERS: Mapping[tuple[str, ...], Any] = {
    ("messages",): chat_call,
    ("prompt",): completion_call,
    ("input",): embeddings_call,
    ("query", "documents"): rerank_call,
    ("text_1", "text_2"): score_call,
    ("queries", "documents"): score_call,
}
"""Parsers of bodies, by fields that only their bodies have."""


class Invocation(Struct):
    """Body of /invocations: that of a chat (with `messages`), a completion (`prompt`), of embeddings (`input`), a
    ranking (`query` and `documents`) or scores (`text_1` and `text_2`)."""


def invocation_call(
    gateway: Gateway, tenant: Tenant, text: bytes, request_id: str, ingress: Ingress = UNKNOWN
) -> ApiCall | PooledCall:
    """Parse `text`, the JSON body of a chat, a completion, a request for embeddings, of a ranking or of scores. Raises
    what the parser of its kind raises, and ApiError: INVALID_JSON; INVALID_REQUEST, it has no kind's fields."""
    document = decode_json(text, Invocation)
    fields = document.keys() if isinstance(document, dict) else ()
    for names, parse in PARSERS.items():
        if all(name in fields for name in names):
            call: ApiCall | PooledCall = parse(gateway, tenant, text, request_id, ingress)
            return call
    kinds = "; ".join(" and ".join(names) for names in PARSERS)
    raise invalid_request(f"the body must have one of: {kinds}", "messages", "missing_required_parameter")
