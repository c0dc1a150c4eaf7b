"""Anthropic's own client, unchanged but for its address, against a real model and real adapters."""

from contextlib import AsyncExitStack
from importlib import import_module

import pytest
import pytest_asyncio

pytestmark = pytest.mark.asyncio(loop_scope="session")

WEATHER = {
    "name": "get_weather",
    "description": "Get the current weather in a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
QUESTION = {"role": "user", "content": "What is the weather in Paris?"}
GREEDY = {"temperature": 0}
"""Fields that the client has no arguments for."""
PIRATE = {
    "model": "pirate",
    "max_tokens": 24,
    "extra_body": GREEDY,
    "system": "You are a helpful assistant.",
    "messages": [{"role": "user", "content": "How are you?"}],
}


@pytest.fixture(scope="module")
def anthropic():
    """Return the package, imported only by the worker that runs these tests, because that takes two seconds."""
    return import_module("anthropic")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def anthropic_of(server, anthropic):
    """Makes Anthropic's clients by key, and closes them."""
    async with AsyncExitStack() as stack:

        def make(key="sk-demo-acme", **options):
            options = options or {"api_key": key}
            client = anthropic.AsyncAnthropic(base_url=f"http://127.0.0.1:{server.http_port}", max_retries=0, **options)
            stack.push_async_exit(client)
            return client

        yield make


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def message(anthropic_of):
    """Return the message that answers PIRATE."""
    return await anthropic_of().messages.create(**PIRATE)


async def test_a_message_and_its_stream_say_the_same(anthropic_of, message):
    client = anthropic_of()
    assert (message.role, message.model, message.stop_reason) == ("assistant", "pirate", "max_tokens")
    [block] = message.content
    assert block.text
    async with client.messages.stream(**PIRATE) as stream:
        text = "".join([piece async for piece in stream.text_stream])
        final = await stream.get_final_message()
    assert (text, final.content[0].text) == (block.text, block.text)
    prompt = message.usage.input_tokens + message.usage.cache_read_input_tokens
    assert final.usage.input_tokens + final.usage.cache_read_input_tokens == prompt
    assert final.usage.output_tokens == message.usage.output_tokens == 24
    asked = {name: PIRATE[name] for name in ("model", "system", "messages")}
    assert (await client.messages.count_tokens(**asked)).input_tokens == prompt


async def test_a_chat_of_openais_client_has_the_same_answer(message, client):
    said = [{"role": "system", "content": PIRATE["system"]}, *PIRATE["messages"]]
    chat = await client.chat.completions.create(model="pirate", max_tokens=24, temperature=0, messages=said)
    assert chat.choices[0].message.content == message.content[0].text


async def test_a_stop_sequence_ends_the_answer(anthropic_of, message):
    whole = message.content[0].text
    word = whole.split()[3]
    stopped = await anthropic_of().messages.create(**PIRATE, stop_sequences=[word])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", word)
    assert stopped.content[0].text == whole[: whole.index(word)]


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_tool_is_called_and_its_result_told(anthropic_of, streamed):
    client = anthropic_of()
    asked = {"model": "tools", "max_tokens": 100, "extra_body": GREEDY, "tools": [WEATHER]}
    if streamed:
        async with client.messages.stream(**asked, messages=[QUESTION]) as stream:
            message = await stream.get_final_message()
    else:
        message = await client.messages.create(**asked, messages=[QUESTION])
    [call] = message.content
    assert (message.stop_reason, call.type, call.name, call.input) == (
        "tool_use",
        "tool_use",
        "get_weather",
        {"city": "Paris"},
    )
    result = {"type": "tool_result", "tool_use_id": call.id, "content": '{"temperature": 17, "condition": "sunny"}'}
    said = [QUESTION, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    told = await client.messages.create(**asked, messages=said)
    assert told.stop_reason == "end_turn"
    assert "17" in told.content[0].text


async def test_a_tool_that_must_be_called_is_called(anthropic_of):
    choice = {"type": "tool", "name": "get_weather"}
    asked = {"model": "tools", "max_tokens": 100, "extra_body": GREEDY, "tools": [WEATHER], "tool_choice": choice}
    message = await anthropic_of().messages.create(**asked, messages=[{"role": "user", "content": "Hello!"}])
    [call] = message.content
    assert (call.name, set(call.input)) == ("get_weather", {"city"})


async def test_a_bearer_token_is_a_key_too(anthropic_of):
    message = await anthropic_of(auth_token="sk-demo-acme").messages.create(**PIRATE | {"max_tokens": 1})
    assert message.usage.output_tokens == 1


async def test_errors_are_those_that_the_client_knows(anthropic, anthropic_of):
    client, image = anthropic_of(), {"type": "image", "source": {"type": "url", "url": "https://example.com/x.png"}}
    with pytest.raises(anthropic.NotFoundError) as missing:
        await client.messages.create(**PIRATE | {"model": "claude-opus-4"})
    assert missing.value.body["error"]["type"] == "not_found_error"
    assert missing.value.request_id
    with pytest.raises(anthropic.BadRequestError, match="'image' is not supported"):
        await client.messages.create(**PIRATE | {"messages": [{"role": "user", "content": [image]}]})
    with pytest.raises(anthropic.AuthenticationError):
        await anthropic_of("sk-wrong").messages.create(**PIRATE)
    with pytest.raises(anthropic.PermissionDeniedError):
        await anthropic_of("sk-demo-admin").messages.create(**PIRATE)
