"""OpenAI endpoints that the gateway does not have, with a hint for callers that try them."""

from __future__ import annotations

from collections.abc import Mapping

TEXT_ONLY = "this model reads and writes text"

ABSENT: Mapping[str, str] = {
    "/v1/responses": "use /v1/chat/completions",
    "/v1/assistants": "use /v1/chat/completions",
    "/v1/threads": "use /v1/chat/completions",
    "/v1/conversations": "use /v1/chat/completions",
    "/v1/messages": "use /v1/chat/completions",
    "/v1/engines": "name the model in the body of /v1/completions",
    "/v1/edits": "use /v1/chat/completions",
    "/v1/embeddings": f"{TEXT_ONLY}, and makes no embeddings",
    "/v1/moderations": f"{TEXT_ONLY}, and moderates none",
    "/v1/rerank": f"{TEXT_ONLY}, and ranks none",
    "/v1/score": f"{TEXT_ONLY}, and scores none",
    "/v1/audio": TEXT_ONLY,
    "/v1/images": TEXT_ONLY,
    "/v1/videos": TEXT_ONLY,
    "/v1/realtime": TEXT_ONLY,
    "/v1/fine_tuning": "adapters are trained elsewhere; an administrator loads them",
    "/v1/uploads": "use /v1/files, which takes a file of any allowed size at once",
    "/v1/vector_stores": f"{TEXT_ONLY}, and searches no files",
}
"""Hints by the first two segments of the endpoint's path."""


def instead_of(path: str) -> str | None:
    """Return what to use instead of an OpenAI endpoint that the gateway does not have. None means that the path is not
    one of these endpoints."""
    endpoint = "/".join(path.split("/")[:3])
    return ABSENT.get(endpoint)
