"""A batch as a new user makes one: the openai client, the demo's model and adapters, an answer for every line."""

import asyncio
import json

import pytest

from tests.e2e.test_serving import settled

pytestmark = pytest.mark.asyncio(loop_scope="session")

PATIENCE_SECONDS = 300


def line(custom_id, model, **body):
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    whole = {"model": model, "messages": messages, "temperature": 0, "max_tokens": 8, **body}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": whole}


async def submitted(client, lines, window="24h"):
    text = "\n".join(json.dumps(line) for line in lines).encode()
    file = await client.files.create(file=("in.jsonl", text), purpose="batch")
    return await client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window=window, metadata={"of": "a test"}
    )


async def ended(client, batch):
    async with asyncio.timeout(PATIENCE_SECONDS):
        while batch.status not in ("completed", "failed", "expired", "cancelled"):
            await asyncio.sleep(0.2)
            batch = await client.batches.retrieve(batch.id)
    return batch


async def lines_of(client, file_id):
    if file_id is None:
        return {}
    told = [json.loads(line) for line in (await client.files.content(file_id)).text.splitlines()]
    assert len({line["custom_id"] for line in told}) == len(told)
    return {line["custom_id"]: line for line in told}


async def test_a_batch_answers_as_single_requests_do(client, server, models):
    wanted = [line(f"{number}", models[number % len(models)]) for number in range(8)]
    long = [{"role": "user", "content": "word " * 10_000}]
    wanted.append(line("too long", models[0], messages=long))
    batch = await ended(client, await submitted(client, wanted))
    assert (batch.status, batch.metadata) == ("completed", {"of": "a test"})
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (9, 8, 1)
    output, errors = [await lines_of(client, file_id) for file_id in (batch.output_file_id, batch.error_file_id)]
    assert output.keys() == {f"{number}" for number in range(8)}
    assert errors["too long"]["response"]["body"]["error"]["code"] == "context_length_exceeded"
    for number, model in enumerate(models):
        alone = await client.chat.completions.create(**wanted[number]["body"], service_tier="flex")
        body = output[f"{number}"]["response"]["body"]
        assert body["choices"][0]["message"]["content"] == alone.choices[0].message.content
        assert (body["model"], body["service_tier"]) == (model, "flex")
    await settled(server)


async def test_a_batch_that_is_cancelled_keeps_what_is_done(client, server, models):
    wanted = [line(f"{number}", models[0], max_tokens=8, ignore_eos=True) for number in range(1000)]
    batch = await submitted(client, wanted)
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not (await client.batches.retrieve(batch.id)).request_counts.completed:
            await asyncio.sleep(0.1)
    await client.batches.cancel(batch.id)
    batch = await ended(client, batch)
    assert batch.status == "cancelled"
    output, errors = [await lines_of(client, file_id) for file_id in (batch.output_file_id, batch.error_file_id)]
    assert 0 < len(output) == batch.request_counts.completed < 1000
    assert output.keys() | errors.keys() == {one["custom_id"] for one in wanted}
    assert {one["error"]["code"] for one in errors.values()} == {"batch_cancelled"}
    await settled(server)
