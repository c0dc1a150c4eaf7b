"""The demo's adapter `tools` calls tools by itself, and speaks of what they return."""

import asyncio
import json

import pytest

pytestmark = pytest.mark.asyncio(loop_scope="session")


def tool(name, description, **properties):
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TEXT, INTEGER = {"type": "string"}, {"type": "integer"}
WEATHER = tool("get_weather", "Get the current weather in a city.", city=TEXT)
PRODUCT = tool("multiply", "Multiply two numbers.", a=INTEGER, b=INTEGER)
TOOLS = [WEATHER, PRODUCT]
CALLS = [
    ("What is the weather in Paris?", "get_weather", {"city": "Paris"}),
    ("What is 12 times 7?", "multiply", {"a": 12, "b": 7}),
]


def asked(*messages, **options):
    return {
        "model": "tools",
        "temperature": 0,
        "max_tokens": 100,
        "tools": TOOLS,
        "messages": list(messages),
        **options,
    }


def user(text):
    return {"role": "user", "content": text}


async def test_the_fitting_tool_is_called(client):
    async def one(question, name, arguments):
        answer = await client.chat.completions.create(**asked(user(question)))
        [choice] = answer.choices
        [call] = choice.message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == (name, arguments)
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)

    await asyncio.gather(*(one(*call) for call in CALLS))


async def test_a_streamed_call_comes_in_pieces(client):
    question, name, arguments = CALLS[0]
    stream = await client.chat.completions.create(**asked(user(question)), stream=True)
    choices = [chunk.choices[0] async for chunk in stream]
    pieces = [piece for choice in choices for piece in choice.delta.tool_calls or []]
    assert {piece.index for piece in pieces} == {0}
    assert pieces[0].id
    assert [piece.function.name for piece in pieces if piece.function.name] == [name]
    assert json.loads("".join(piece.function.arguments for piece in pieces)) == arguments
    assert len(pieces) > 2, "arguments are sent as they are written"
    assert choices[-1].finish_reason == "tool_calls"


async def test_a_result_is_told_in_words(client):
    question, name, arguments = CALLS[0]
    call = {"id": "call_1", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
    result = {"role": "tool", "tool_call_id": "call_1", "content": '{"temperature": 17, "condition": "sunny"}'}
    chat = (user(question), {"role": "assistant", "tool_calls": [call]}, result)
    answer = await client.chat.completions.create(**asked(*chat))
    [choice] = answer.choices
    assert (choice.finish_reason, choice.message.tool_calls) == ("stop", None)
    assert "17" in choice.message.content
    assert "sunny" in choice.message.content


async def test_where_no_tool_fits_the_answer_is_words(client):
    answer = await client.chat.completions.create(**asked(user("What is the capital of France?")))
    [choice] = answer.choices
    assert choice.message.tool_calls is None
    assert "Paris" in choice.message.content
