"""Answers by schemas from the demo's model: five for every client, which all have others."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

from tests.e2e.behaviour.clients import CLIENTS, Client
from tests.e2e.behaviour.reply import Reply
from tests.schemas import check, random_schema

QUESTION = [{"role": "user", "content": "Describe a red bicycle, in JSON."}]
ANSWERS = 5


async def assert_answers_follow_schemas(kind: type[Client], address: str, models: Sequence[str]) -> None:
    """Ask at temperature 1, base and adapters mixed, some of the answers streamed."""
    rng = random.Random(list(CLIENTS.values()).index(kind))
    schemas = [random_schema(rng, depth=1 + (index == 0)) for index in range(ANSWERS)]

    async def one(client: Client, index: int) -> Reply:
        wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schemas[index]}}
        options: dict[str, Any] = {"messages": QUESTION, "seed": index, "temperature": 1.0, "max_tokens": 400}
        answer = client.chat if index % 3 else client.stream
        return await answer(model=models[index % len(models)], response_format=wanted, **options)

    async with aclosing(kind(address, "sk-demo-acme", 0)) as client:
        replies = await asyncio.gather(*(one(client, index) for index in range(ANSWERS)))
    for reply, schema in zip(replies, schemas, strict=True):
        assert reply.only.finish == "stop", reply.only.text
        check(reply.only.text, schema)
    assert len({json.dumps(reply.only.text) for reply in replies}) > 0.6 * ANSWERS
