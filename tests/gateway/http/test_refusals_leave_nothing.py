"""Refused requests leave nothing to the garbage collector: 182 bodies of 600 kB, one after the other, left 220 MiB."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from fakes import BASE, GatewayApp, build_gateway_app

from gateway.core.errors import ApiError

CHAT = {"model": BASE, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
LONG_BYTES = 100_000
"""Bytes of spaces that make a body one that is parsed in a thread."""
COLLIDING = {str((2**61 - 1) * (number + 1)): 1 for number in range(2_000)}
REFUSED = {
    "a wrong type": ("/v1/chat/completions", {**CHAT, "timeout": "soon"}),
    "integers that are too large": ("/v1/chat/completions", {**CHAT, "logit_bias": COLLIDING}),
    "an unsupported field": ("/v1/chat/completions", {**CHAT, "modalities": ["audio"]}),
    "a missing field": ("/v1/chat/completions", {"model": BASE}),
    "a value out of its range": ("/v1/chat/completions", {**CHAT, "temperature": -1}),
    "an unknown role": ("/v1/chat/completions", {**CHAT, "messages": [{"role": "judge", "content": "hi"}]}),
    "an unknown model": ("/v1/chat/completions", {**CHAT, "model": "none"}),
    "a faulty schema": ("/v1/chat/completions", {**CHAT, "guided_json": {"type": 5}}),
    "a prompt that is too long": ("/v1/completions", {"model": BASE, "prompt": "a " * 40_000}),
    "a wrong prompt": ("/v1/completions", {"model": BASE, "prompt": {"a": 1}}),
    "a wrong input": ("/v1/responses", {"model": BASE, "input": 5}),
    "a wrong message": ("/v1/messages", {"model": BASE, "max_tokens": 1, "messages": [5]}),
    "a wrong embedding": ("/v1/embeddings", {"model": BASE, "input": {}}),
    "a wrong text": ("/tokenize", {"model": BASE, "prompt": 5}),
}


@pytest.fixture
async def gateway_app(tmp_path) -> GatewayApp:
    return await build_gateway_app(tmp_path)


def refusals() -> int:
    """Count the errors in memory, which know no weak references."""
    return sum(isinstance(found, ApiError) for found in gc.get_objects())


@contextmanager
def without_collections() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.parametrize("is_long", [False, True], ids=["short", "long"])
@pytest.mark.parametrize("kind", REFUSED)
async def test_a_refused_body_is_let_go(gateway_app, kind, is_long):
    path, fields = REFUSED[kind]
    body = json.dumps(fields) + " " * (LONG_BYTES if is_long else 0)
    headers = {"content-type": "application/json"}
    async with gateway_app.client() as client:
        with without_collections():
            before = refusals()
            answer = await client.post(path, content=body.encode(), headers=headers)
            assert answer.status_code in (400, 404), answer.text
            for _ in range(5):
                await asyncio.sleep(0)
            assert refusals() == before, "the traceback of one refers to the body"
