"""All answers follow their schemas, with the demo's model: five for every client, which all have others."""

import asyncio
import json
import random
from contextlib import aclosing

import pytest

from tests.e2e.behaviour.clients import CLIENTS
from tests.e2e.behaviour.grpc_client import Grpc
from tests.schemas import check, random_schema

QUESTION = [{"role": "user", "content": "Describe a red bicycle, in JSON."}]
ANSWERS = 5


@pytest.mark.asyncio(loop_scope="session")
async def test_all_answers_are_valid(server, models, kind):
    """At temperature 1, base and adapters mixed, some streamed."""
    address = f"127.0.0.1:{server.grpc_port}" if kind is Grpc else f"http://127.0.0.1:{server.http_port}/v1"
    rng = random.Random(list(CLIENTS.values()).index(kind))
    schemas = [random_schema(rng, depth=1 + (index == 0)) for index in range(ANSWERS)]

    async def one(client, index):
        wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schemas[index]}}
        options = {"messages": QUESTION, "seed": index, "temperature": 1.0, "max_tokens": 400}
        answer = client.chat if index % 3 else client.stream
        return await answer(model=models[index % len(models)], response_format=wanted, **options)

    async with aclosing(kind(address, "sk-demo-acme", 0)) as client:
        replies = await asyncio.gather(*(one(client, index) for index in range(ANSWERS)))
    for reply, schema in zip(replies, schemas, strict=True):
        assert reply.only.finish == "stop", reply.only.text
        check(reply.only.text, schema)
    assert len({json.dumps(reply.only.text) for reply in replies}) > 0.6 * ANSWERS
