"""loralane in Python: `LLM` and `AsyncLLM` run a model in this process, `Client` and `AsyncClient` administer gateways.

Importing this package loads nothing else: each name is imported when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gateway.client.client import AsyncClient, Client, ClientError
    from gateway.core.errors import ApiError
    from gateway.llm.async_llm import AsyncLLM
    from gateway.llm.llm import LLM
    from gateway.llm.params import SamplingParams
    from gateway.llm.results import Answer, Embedding, Result, ToolCall
    from gateway.llm.setup import EngineFailed
    from gateway.llm.stream import AnswerStream

_HOMES = {
    "AnswerStream": "gateway.llm.stream",
    "Answer": "gateway.llm.results",
    "ApiError": "gateway.core.errors",
    "AsyncClient": "gateway.client.client",
    "AsyncLLM": "gateway.llm.async_llm",
    "Client": "gateway.client.client",
    "ClientError": "gateway.client.client",
    "Embedding": "gateway.llm.results",
    "EngineFailed": "gateway.llm.setup",
    "LLM": "gateway.llm.llm",
    "Result": "gateway.llm.results",
    "SamplingParams": "gateway.llm.params",
    "ToolCall": "gateway.llm.results",
}
"""Module from which each public name of this package is imported when it is first used."""

__all__ = [
    "Answer",
    "AnswerStream",
    "ApiError",
    "AsyncClient",
    "AsyncLLM",
    "Client",
    "ClientError",
    "Embedding",
    "EngineFailed",
    "LLM",
    "Result",
    "SamplingParams",
    "ToolCall",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
