"""Answers of the demo's model that keep to what was asked for, whatever the model would rather say."""

import asyncio
import json
import re
from itertools import cycle, islice, product

import pytest
from openai import BadRequestError

from tests.e2e.reflected import ReflectedClient
from tests.schemas import check

pytestmark = pytest.mark.asyncio(loop_scope="session")

QUESTION = [{"role": "user", "content": "Describe a red bicycle, in JSON."}]


def named(schema):
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


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
    older = await client.chat.completions.create(
        model=models[0], messages=QUESTION, extra_body={f"guided_{name}": value for name, value in wanted.items()}
    )
    assert re.fullmatch(pattern, older.choices[0].message.content)
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


LOOK = {
    "type": "object",
    "properties": {"at": {"enum": ["sea", "sky"]}, "hours": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["at", "hours"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "look", "parameters": LOOK}},
    {"type": "function", "function": {"name": "wait"}},
]


async def test_tools_that_have_to_be_called_are(client, models):
    named = {"tool_choice": {"type": "function", "function": {"name": "look"}}}
    once = {"tool_choice": "required", "parallel_tool_calls": False}

    async def one(model, options, is_streamed):
        asked = {"model": model, "messages": QUESTION, "tools": TOOLS, "max_tokens": 200, **options}
        answer = await client.chat.completions.create(**asked, stream=is_streamed)
        name, arguments, finish = await streamed_call(answer) if is_streamed else whole_call(answer)
        assert finish == "tool_calls"
        assert name == "look" or options is once
        check(arguments, LOOK if name == "look" else {"const": {}})

    cases = zip(islice(cycle(models), 4), product((named, once), (False, True)), strict=True)
    await asyncio.gather(*(one(model, *case) for model, case in cases))


def whole_call(answer):
    [choice] = answer.choices
    [call] = choice.message.tool_calls
    return call.function.name, call.function.arguments, choice.finish_reason


async def streamed_call(stream):
    choices = [chunk.choices[0] async for chunk in stream]
    news = [piece.function for choice in choices for piece in choice.delta.tool_calls or []]
    return news[0].name, "".join(piece.arguments for piece in news), choices[-1].finish_reason


async def test_logprobs_and_echo_beside_a_grammar(client, models):
    wanted = {"structured_outputs": {"choice": ["a cat", "a dog"]}}
    answer = await client.completions.create(
        model=models[0], prompt="I saw ", n=3, seed=2, echo=True, max_tokens=9, extra_body=wanted
    )
    assert {choice.text for choice in answer.choices} <= {"I saw a cat", "I saw a dog"}
    chat = await client.chat.completions.create(
        model=models[0], messages=QUESTION, n=3, seed=2, logprobs=True, top_logprobs=1, extra_body=wanted
    )
    for choice in chat.choices:
        entries = choice.logprobs.content
        assert "".join(entry.token for entry in entries) == choice.message.content
        assert any(entry.top_logprobs[0].token != entry.token for entry in entries), "the model's own, unmasked"


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


HOSTILE = {
    "crashes the library": {"const": -9223372036854775808},
    "works without an end": {"allOf": [{"type": "string", "pattern": f"^.*a.*{i}$"} for i in range(200)]},
    "works without an end once there are tokens": {"type": "integer", "multipleOf": 1_000_003},
}


async def test_hostile_schemas_are_refused_while_others_are_answered(client, server, models):
    """By the gateway, and by the engine where only a model's tokens make the schema hostile."""
    beside = asyncio.create_task(
        client.chat.completions.create(
            model=models[0], messages=QUESTION, max_tokens=64, extra_body={"ignore_eos": True}
        )
    )
    for name, schema in HOSTILE.items():
        with pytest.raises(BadRequestError) as caught:
            await client.chat.completions.create(model=models[0], messages=QUESTION, response_format=named(schema))
        assert caught.value.param == "response_format.json_schema.schema", name
        assert "crash" in caught.value.message or "more than" in caught.value.message, name
    assert (await beside).usage.completion_tokens == 64
