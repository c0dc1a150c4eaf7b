"""Conversations that the server keeps, with OpenAI's client and a real engine."""

import asyncio

import openai
import pytest

pytestmark = pytest.mark.asyncio(loop_scope="session")


def fields(models, text, **more):
    return {"model": models[0], "input": text, "max_output_tokens": 12, "temperature": 0, **more}


async def ended(client, response_id):
    while (found := await client.responses.retrieve(response_id)).status in ("queued", "in_progress"):
        await asyncio.sleep(0.05)
    return found


async def test_a_kept_conversation_is_the_one_that_is_sent_again(client, models):
    """The prefix cache serves the earlier turns, as for a conversation in `input`."""
    question = "Tell me about the sea, the ships that sail on it, and the people who live by it."
    first = await client.responses.create(**fields(models, question, store=True))
    kept = await client.responses.create(**fields(models, "And the sky?", previous_response_id=first.id))
    sent = [{"role": "user", "content": question}, *(item.to_dict() for item in first.output)]
    again = await client.responses.create(**fields(models, [*sent, {"role": "user", "content": "And the sky?"}]))
    assert (kept.output_text, kept.usage.input_tokens) == (again.output_text, again.usage.input_tokens)
    assert kept.usage.input_tokens_details.cached_tokens > 0
    await client.responses.delete(first.id)
    with pytest.raises(openai.BadRequestError):
        await client.responses.create(**fields(models, "And the sky?", previous_response_id=first.id))


async def test_a_background_response_is_that_of_a_foreground_one(client, models):
    made = await client.responses.create(**fields(models, "Why is grass green?", background=True))
    assert made.status == "queued"
    found = await ended(client, made.id)
    asked = await client.responses.create(**fields(models, "Why is grass green?"))
    assert (found.output_text, found.status) == (asked.output_text, asked.status)
    endless = fields(models, "Write a long story.", background=True) | {"max_output_tokens": 1500}
    running = await client.responses.create(**endless)
    assert (await client.responses.cancel(running.id)).status == "cancelled"
    assert (await client.responses.retrieve(running.id)).status == "cancelled"
    [item] = (await client.responses.input_items.list(running.id)).data
    assert item.content[0].text == "Write a long story."
