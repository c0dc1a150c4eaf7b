"""The attacking tenant, as attacks see it."""

from __future__ import annotations

import ssl
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import httpx

TLS = ssl.create_default_context()
"""TLS context shared by all clients, so that the certificates are read once. The demo itself uses plain HTTP."""


@dataclass(frozen=True, slots=True)
class Attacker:
    """The attacking tenant's API key and HTTP client, the gateway's gRPC address, and the model to ask for."""

    http: httpx.AsyncClient
    """Client with base URL and authorization set."""
    grpc_target: str
    model: str
    key: str

    def body(self, **fields: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": "Tell me about the sea."}]
        return {"model": self.model, "messages": messages, "max_tokens": 8, **fields}

    def another_client(self) -> httpx.AsyncClient:
        """Return a client with the same base URL and key, but its own connections."""
        limits = httpx.Limits(max_connections=None)
        url, headers = self.http.base_url, {"authorization": f"Bearer {self.key}"}
        return httpx.AsyncClient(base_url=url, headers=headers, timeout=self.http.timeout, limits=limits, verify=TLS)

    async def chat(self, **fields: Any) -> str:
        """Send a chat; returns its HTTP status as text, followed by the error's code if there is one."""
        answer = await self.http.post("/v1/chat/completions", json=self.body(**fields))
        error = answer.json().get("error") or {}
        return " ".join(filter(None, (str(answer.status_code), error.get("code"))))


Attack = Callable[[Attacker], Awaitable[Counter[str]]]
"""Function that mounts an attack once, and returns how often the gateway gave each kind of answer."""
