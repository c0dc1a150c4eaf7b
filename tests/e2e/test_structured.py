"""Answers of the demo's model that keep to what was asked for, whatever the model would rather say."""

import asyncio
import json
import random
import re

import pytest
from openai import AsyncOpenAI, BadRequestError

from tests.e2e.reflected import ReflectedClient
from tests.schemas import check, random_schema

pytestmark = pytest.mark.asyncio(loop_scope="session")

QUESTION = [{"role": "user", "content": "Describe a red bicycle, in JSON."}]


@pytest.fixture
def client(server):
    return AsyncOpenAI(base_url=f"http://127.0.0.1:{server.http_port}/v1", api_key="sk-demo-acme", max_retries=0)


def named(schema):
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


async def test_a_hundred_of_a_hundred_answers_are_valid(client, models):
    """At temperature 1, base and adapters mixed, some streamed, some beside requests without a grammar."""
    rng, at_once = random.Random(1), asyncio.Semaphore(24)  # as many as there is room for, so that nobody waits long
    schemas = [random_schema(rng, depth=1 + (index % 5 == 0)) for index in range(100)]

    async def one(index):
        options = {"model": models[index % len(models)], "messages": QUESTION, "max_tokens": 600, "seed": index}
        options["response_format"] = named(schemas[index])
        async with at_once:
            return await (whole(options) if index % 3 else streamed(options))

    async def whole(options):
        answer = await client.chat.completions.create(**options)
        return answer.choices[0].finish_reason, answer.choices[0].message.content

    async def streamed(options):
        text, reason = "", None
        async for chunk in await client.chat.completions.create(**options, stream=True):
            text, reason = text + (chunk.choices[0].delta.content or ""), chunk.choices[0].finish_reason
        return reason, text

    async def free(index):
        return await client.chat.completions.create(model=models[0], messages=QUESTION, max_tokens=20, seed=index)

    answers = await asyncio.gather(*map(one, range(100)), *map(free, range(4)))
    for (reason, text), schema in zip(answers[:100], schemas, strict=False):
        assert reason == "stop", text
        check(text, schema)
    assert len({text for _, text in answers[:100]}) > 80


async def test_several_answers_to_one_schema(client, models):
    schema = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 10**6}}}
    schema |= {"required": ["n"], "additionalProperties": False}
    whole = await client.chat.completions.create(
        model=models[0], messages=QUESTION, n=4, response_format=named(schema), seed=1
    )
    numbers = [json.loads(choice.message.content)["n"] for choice in whole.choices]
    assert len(set(numbers)) > 1


@pytest.mark.parametrize(
    ("wanted", "pattern"),
    [
        ({"choice": ["a cat", "a dog"]}, "a cat|a dog"),
        ({"regex": r"[A-Z][a-z]{3,9} [0-9]{4}"}, r"[A-Z][a-z]{3,9} [0-9]{4}"),
        ({"grammar": 'root ::= "<" word ">"\nword ::= [a-z]{2,8}'}, r"<[a-z]{2,8}>"),
    ],
)
async def test_what_vllm_users_know(client, server, models, wanted, pattern):
    whole = await client.chat.completions.create(
        model=models[0], messages=QUESTION, extra_body={"structured_outputs": wanted}
    )
    assert re.fullmatch(pattern, whole.choices[0].message.content)
    kinds = {"choice": {"choice": {"choice": wanted.get("choice")}}}
    request = {"model": models[1], "prompt": "I saw", "structured_outputs": kinds.get(next(iter(wanted)), wanted)}

    def over_grpc():
        reflected = ReflectedClient(f"127.0.0.1:{server.grpc_port}", "sk-demo-acme")
        try:
            return list(reflected.call("loralane.v1.Generation", "Generate", request))
        finally:
            reflected.close()

    (reply,) = await asyncio.to_thread(over_grpc)
    assert re.fullmatch(pattern, reply["choices"][0]["text"])


async def test_any_object(client, models):
    whole = await client.chat.completions.create(
        model="json", messages=QUESTION, response_format={"type": "json_object"}, max_tokens=200, temperature=0
    )
    assert isinstance(json.loads(whole.choices[0].message.content), dict)


async def test_what_cannot_be_followed_is_refused_with_the_reason(client, models):
    with pytest.raises(BadRequestError) as caught:
        await client.chat.completions.create(
            model=models[0], messages=QUESTION, response_format=named({"type": "array", "uniqueItems": True})
        )
    assert caught.value.body["param"] == "response_format.json_schema.schema"
    assert "uniqueItems" in caught.value.body["message"]
