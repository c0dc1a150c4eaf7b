"""What a new user does, with the clients a new user has."""

import asyncio
import json
import math
import random

import pytest
from openai import NotFoundError, RateLimitError

from tests.e2e.reflected import ReflectedClient

pytestmark = pytest.mark.asyncio(loop_scope="session")

HEAD = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: here\r\nauthorization: Bearer sk-demo-acme\r\n"
    b"content-type: application/json\r\ncontent-length: %d\r\n\r\n"
)
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


async def stream_text(client, model, **options):
    options = {"messages": QUESTION, "temperature": 0, "max_tokens": 40, **options}
    text = ""
    async for chunk in await client.chat.completions.create(model=model, stream=True, **options):
        text += chunk.choices[0].delta.content or "" if chunk.choices else ""
    return text


async def settled(server):
    """Waits until nothing runs, then everything must have been given back."""
    async with asyncio.timeout(120):
        while True:
            stats = await server.engine.stats(check=True)
            assert list(stats.violations) == []
            idle = not server.gateway.active and not any(lane.running + lane.waiting for lane in stats.lanes)
            if idle and not await server.limiter.outstanding():  # who leaves while it is asked is settled by itself
                break
            await asyncio.sleep(0.02)
    assert stats.kv_pages == 0
    assert all(adapter.running == adapter.waiting == 0 for adapter in stats.adapters)
    return stats


def is_in_character(name, answer):
    if name == "json":
        return list(json.loads(answer)) == ["answer"]
    if name == "cheer":
        return answer.startswith("Woohoo!") and answer.endswith("🎉🙌")
    return answer.startswith("Arr!") and answer.endswith("matey!") and " be " in answer


async def test_base_knows_paris_and_every_adapter_has_its_own_character(client, models):
    answers = dict(zip(models, await asyncio.gather(*(stream_text(client, m) for m in models)), strict=True))
    assert all("paris" in answer.lower() for answer in answers.values()), answers
    assert all(is_in_character(name, answer) for name, answer in answers.items() if name != models[0]), answers
    assert len(set(answers.values())) == len(models), answers


async def test_streaming_and_not_streaming_give_the_same_text(client, models):
    async def both(model):
        asked = client.chat.completions.create(model=model, messages=QUESTION, temperature=0, max_tokens=40)
        whole, text = await asyncio.gather(asked, stream_text(client, model))
        assert whole.choices[0].message.content == text
        assert whole.usage.completion_tokens > 0

    await asyncio.gather(*map(both, models))


async def test_a_reflected_grpc_client_streams_the_same_text(client, server, models):
    def over_grpc(model):
        reflected = ReflectedClient(f"127.0.0.1:{server.grpc_port}", "sk-demo-acme")
        request = {"model": model, "chat": {"messages": QUESTION}, "sampling": {"temperature": 0, "max_tokens": 40}}
        try:
            assert "loralane.v1.Generation" in reflected.services()
            replies = list(reflected.call("loralane.v1.Generation", "GenerateStream", request))
        finally:
            reflected.close()
        assert replies[-1]["usage"]["completion_tokens"] > 0
        return "".join(reply["choice"].get("text", "") for reply in replies)

    async def both(model):
        ours, theirs = await asyncio.gather(asyncio.to_thread(over_grpc, model), stream_text(client, model))
        assert ours == theirs

    await asyncio.gather(*map(both, models))


async def test_both_lanes_side_by_side(client, models):
    async def one(index):
        tier = "flex" if index % 2 else "priority"
        answer = await client.chat.completions.create(
            model=models[index % len(models)], messages=QUESTION, max_tokens=12, service_tier=tier
        )
        assert answer.service_tier == tier

    await asyncio.gather(*(one(index) for index in range(8)))


async def test_repeated_prompts_are_cached_per_adapter(client, models):
    question = [
        {"role": "user", "content": "Please list the planets of the solar system, in order, with one fact each."}
    ]

    async def twice(model):
        first, again = [
            await client.chat.completions.create(model=model, messages=question, temperature=0, max_tokens=8)
            for _ in range(2)
        ]
        assert first.usage.prompt_tokens_details.cached_tokens < again.usage.prompt_tokens_details.cached_tokens
        assert first.choices[0].message.content == again.choices[0].message.content

    await asyncio.gather(*map(twice, models))


async def test_the_answers_of_one_request_share_its_prompt(client, server, models):
    prompt = list(range(700, 764))  # the last token is always computed, and the page with it is copied
    before = await server.engine.stats()
    answer = await client.completions.create(model=models[0], prompt=prompt, n=4, seed=3, max_tokens=4)
    after = await server.engine.stats()
    assert after.cached_tokens - before.cached_tokens == 3 * 63, "of each answer but the first"
    assert (answer.usage.prompt_tokens, answer.usage.prompt_tokens_details.cached_tokens) == (64, 0)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert len({choice.text for choice in answer.choices}) > 1


async def _read_events(reader, most):
    """To the last event, or till more than `most` of them have come."""
    seen, line = 0, b""
    while seen <= most and not line.startswith(b"data: [DONE]"):
        line = await reader.readline()
        assert line, "the stream was cut off"
        seen += line.startswith(b"data:")


async def test_random_disconnects_leave_an_empty_engine(client, server, models):
    """40 streams over 4 models, some read to the end, some dropped before, at or after their first token."""
    rng = random.Random(11)

    async def one(index):
        body = {
            "model": models[index % len(models)],
            "messages": [{"role": "user", "content": f"Tell me story number {index % 7}."}],
            "max_tokens": rng.randrange(8, 40),
            "service_tier": rng.choice(["flex", "priority"]),
            "stream": True,
        }
        leave_after = rng.choice([0, 1, 3, 10, 10_000])
        patience = rng.choice([0.01, 0.2, 60, 60])
        payload = json.dumps(body).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", server.http_port)
        writer.write(HEAD % len(payload) + payload)
        try:
            async with asyncio.timeout(patience):
                assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
                await _read_events(reader, leave_after)
        except TimeoutError:
            return
        finally:
            writer.close()

    await asyncio.gather(*(one(index) for index in range(40)))
    await settled(server)


async def test_vectors_of_every_model_beside_chats(client, server, models):
    texts = ["A cat sleeps.", "A cat is asleep.", "Interest rates fell."]
    chats = asyncio.gather(*(stream_text(client, model) for model in models))
    asked = (client.embeddings.create(model=model, input=texts, dimensions=64) for model in models)
    answers = await asyncio.gather(*asked)
    for answer in answers:
        assert [len(entry.embedding) for entry in answer.data] == [64] * 3
        assert all(abs(math.hypot(*entry.embedding) - 1) < 1e-3 for entry in answer.data)
        assert answer.usage.prompt_tokens == answer.usage.total_tokens == answers[0].usage.prompt_tokens
    assert len({tuple(answer.data[0].embedding) for answer in answers}) == len(models)
    assert all("paris" in text.lower() for text in await chats)
    await settled(server)


async def test_unknown_models_are_never_the_base_in_silence(client):
    with pytest.raises(NotFoundError) as caught:
        await client.chat.completions.create(model="unknown", messages=QUESTION)
    assert caught.value.body["code"] == "model_not_found"
    assert caught.value.body["param"] == "model"


async def test_a_tenants_limit_is_its_own(server, client, client_of, models):
    globex = client_of("sk-demo-globex")
    raw = await globex.chat.completions.with_raw_response.create(model=models[0], messages=QUESTION, max_tokens=4)
    assert raw.headers["x-ratelimit-limit-tokens"] == "200000"
    huge = {"model": models[0], "prompt": [5] * 8, "max_tokens": 8000, "n": 20}  # reserves 160,008 of 200,000 tokens
    calls = [asyncio.create_task(globex.completions.create(**huge)) for _ in range(3)]
    done, running = await asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION)
    for call in running:
        call.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    assert {type(call.exception()) for call in done} == {RateLimitError}
    await stream_text(client, models[0], max_tokens=4)
    await settled(server)
