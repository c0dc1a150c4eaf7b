"""Says what to use instead of a route that is not there."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from gateway.openai.unknown import suggestion

TEXT_ONLY = "this model reads and writes text"

ABSENT: Mapping[str, str] = {
    "/v1/responses": "use /v1/responses itself",
    "/v1/responses/compact": "send the items that matter in input; nothing is compacted",
    "/v1/responses/input_tokens": "use /tokenize",
    "/v1/assistants": "use /v1/chat/completions",
    "/v1/threads": "use /v1/chat/completions",
    "/v1/conversations": "use previous_response_id of /v1/responses",
    "/v1/messages": "use /v1/messages itself, or /v1/batches for many requests",
    "/v1/engines": "name the model in the body of /v1/completions",
    "/v1/edits": "use /v1/chat/completions",
    "/v1/moderations": f"{TEXT_ONLY}, and moderates none",
    "/v1/audio": TEXT_ONLY,
    "/v1/images": TEXT_ONLY,
    "/v1/videos": TEXT_ONLY,
    "/v1/realtime": TEXT_ONLY,
    "/v1/fine_tuning": "adapters are trained elsewhere; an administrator loads them",
    "/v1/uploads": "use /v1/files, which takes a file of any allowed size at once",
    "/v1/vector_stores": f"{TEXT_ONLY}, and searches no files",
}
"""Hints at what to use instead of OpenAI's endpoints that the gateway lacks, by the path or its first two segments."""
FOREIGN: Mapping[str, str] = {
    "/api/chat": "/v1/chat/completions",
    "/api/embed": "/v1/embeddings",
    "/api/embeddings": "/v1/embeddings",
    "/api/generate": "/v1/completions",
    "/api/ps": "/v1/models",
    "/api/show": "/v1/models",
    "/api/tags": "/v1/models",
    "/api/version": "/version",
    "/apply-template": "/tokenize",
    "/completion": "/v1/completions",
    "/embedding": "/v1/embeddings",
    "/encode": "/v1/embeddings",
    "/generate": "/v1/completions",
    "/generate_stream": "/v1/completions",
    "/get_model_info": "/v1/models",
    "/infill": "/v1/completions",
    "/model_info": "/v1/models",
    "/pooling": "/v1/embeddings",
    "/props": "/v1/models",
    "/reranking": "/v1/rerank",
    "/v1/complete": "/v1/messages",
    "/v1/reranking": "/v1/rerank",
    "/v2/embed": "/v1/embeddings",
}
"""Routes of Ollama, llama.cpp, SGLang, TGI, Cohere and older ones of Anthropic, and what they are here."""
MOST_PATH = 128
"""Maximum characters of a path that is compared with others. A stranger's may have 64 KiB."""


def route_hint(path: str, known: Collection[str]) -> str | None:
    """Return what to use instead of a path that no route has. `known` are the paths of the routes. None means that
    nothing resembles it."""
    if len(path) > MOST_PATH:
        return None
    meant = FOREIGN.get(path) or next((each for each in _spellings(path) if each in known), None)
    meant = meant or suggestion(path, frozenset(known))
    return f"did you mean {meant}?" if meant in known else _absence(path)


def method_hint(path: str, known: Collection[str]) -> str | None:
    """Return what to use instead of a path that has a route by chance, because a part of its name is taken for an id.
    None means that the path is what the caller meant. `known` are the paths of the routes."""
    return None if path in known else ABSENT.get(path)


def _absence(path: str) -> str | None:
    return ABSENT.get(path) or ABSENT.get("/".join(path.split("/")[:3]))


def _spellings(path: str) -> Collection[str]:
    """Return the path with single slashes, with and without the version before it."""
    plain = re.sub("/+", "/", path)
    bare = re.sub("^(/v1)+/", "/", plain)
    return plain, bare, f"/v1{bare}"
