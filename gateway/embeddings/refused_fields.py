"""Fields of the bodies of /v1/embeddings, /v1/rerank and /v1/score that are known but not supported there."""

from __future__ import annotations

from collections.abc import Mapping

from gateway.openai.refused_fields import Refused

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
"""Unsupported fields of vLLM, Jina and Cohere that only these routes have; `openai/refused_fields.py` has others."""
