"""Background responses: polled, cancelled from any gateway, and never left running by one that died."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

import gateway_worker
import httpx
import openai
import pytest
from fakes import BASE, PATIENT, FakeEngine, GatewayApp, build_gateway_app, tiny_tokenizer
from redis.asyncio import Redis

from gateway.core.errors import ApiError, Fault
from gateway.requests.route_runner import RouteTable
from gateway.responses import background
from gateway.responses.record import ResponseEntry
from gateway.responses.service import Responses
from gateway.responses.store import ResponseStore, StoreLimits
from gateway.virtual_models.split import Split

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.gateway.conftest", "gateway_worker"])
HELLO = "Hello, world!"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(background, "RENEW_SECONDS", 0.02)


async def build(valkey: Redis, tmp_path, served: Mapping[str, Any] | None = None, **limits: Any) -> GatewayApp:
    responses = Responses(ResponseStore(valkey, StoreLimits(**limits)))
    gateway_app = await build_gateway_app(tmp_path, responses=responses, **(served or {}))
    gateway_app.engine.info.max_model_len = 2048
    return gateway_app


@pytest.fixture
async def gateway_app(valkey, tmp_path) -> AsyncIterator[GatewayApp]:
    gateway_app = await build(valkey, tmp_path)
    yield gateway_app
    await drained(gateway_app)


async def drained(gateway_app: GatewayApp) -> None:
    """Every request has ended once, and no task is left."""
    await until(lambda: none_runs())
    await gateway_app.assert_empty()


async def none_runs() -> bool:
    return not [task for task in asyncio.all_tasks() if task.get_name().startswith("background-")]


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    while not await condition():
        await asyncio.sleep(0.005)


async def begin(gateway_app: GatewayApp, **fields: Any) -> Any:
    async with gateway_app.openai() as client:
        return await client.responses.create(**{"model": BASE, "input": "hi", "background": True} | fields)


async def get(gateway_app: GatewayApp, response_id: str) -> Any:
    async with gateway_app.openai() as client:
        return await client.responses.retrieve(response_id)


async def cancel(gateway_app: GatewayApp, response_id: str) -> Any:
    async with gateway_app.openai() as client:
        return await client.responses.cancel(response_id)


async def ended(gateway_app: GatewayApp, response_id: str) -> Any:
    """Poll as OpenAI's documents have clients do."""
    while (found := await get(gateway_app, response_id)).status in ("queued", "in_progress"):
        await asyncio.sleep(0.005)
    return found


async def running(gateway_app: GatewayApp, **fields: Any) -> str:
    """Begin a response that waits after its first token, and return its id."""
    gateway_app.engine.go_on = asyncio.Event()
    made = await begin(gateway_app, **fields)

    async def runs() -> bool:
        return (await get(gateway_app, made.id)).status == "in_progress" and gateway_app.engine.open == 1

    await until(runs)
    return made.id


async def test_a_response_is_polled_until_it_is_complete(gateway_app):
    gateway_app.engine.admit = asyncio.Event()
    made = await begin(gateway_app, metadata={"a": "b"}, service_tier="flex")
    assert (made.status, made.output, made.usage, made.background) == ("queued", [], None, True)
    assert made.to_dict()["store"] is True
    assert (await get(gateway_app, made.id)).to_dict() == made.to_dict()
    gateway_app.engine.admit.set()
    answer = await ended(gateway_app, made.id)
    assert (answer.status, answer.output_text, answer.created_at) == ("completed", HELLO, made.created_at)
    assert (answer.usage.output_tokens, answer.metadata, answer.service_tier) == (len(HELLO) + 1, {"a": "b"}, "flex")
    assert answer.output[0].id.startswith(f"msg_{made.id.removeprefix('resp_')}")
    assert list(gateway_app.limiter.ends.values()) == [[answer.usage.total_tokens]]
    assert answer.model == BASE


@pytest.mark.parametrize(("model", "queued"), [(BASE, (0.7, 0.8)), ("auto", (None, None))])
async def test_it_says_how_it_is_sampled_as_soon_as_its_model_is_known(model, queued, valkey, tmp_path):
    served = {
        "settings": replace(PATIENT, sampling_defaults={"temperature": 0.7, "top_p": 0.8}),
        "others": {"small": FakeEngine()},
        "routes": RouteTable({"auto": Split({"small": 1})}),
    }
    gateway_app = await build(valkey, tmp_path, served)
    made = await begin(gateway_app, model=model)
    assert (made.status, made.temperature, made.top_p) == ("queued", *queued)
    answer = await ended(gateway_app, made.id)
    assert (answer.status, answer.temperature, answer.top_p) == ("completed", 0.7, 0.8)
    await drained(gateway_app)


async def test_it_counts_if_it_is_refused_or_cancelled_after_tokenizing(gateway_app, monkeypatch):
    """The gateway does not send it again, as it does a line of a batch."""
    async with gateway_app.openai("sk-globex") as client:
        made = await client.responses.create(model=BASE, input="x" * 300, background=True)
        while (await client.responses.retrieve(made.id)).status == "queued":
            await asyncio.sleep(0.005)
    begun = asyncio.Event()

    async def never(*args, **more):
        begun.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(gateway_app.gateway.models.default.tokenizer, "encode_chat", never)
    made = await begin(gateway_app)
    await begun.wait()
    await cancel(gateway_app, made.id)
    await drained(gateway_app)
    assert [asked.tenant for asked in gateway_app.limiter.reserved] == ["globex", "acme"]
    assert gateway_app.limiter.reserved_tokens == 0


async def test_it_is_continued_and_continues(gateway_app):
    first = await begin(gateway_app, input="a")
    await ended(gateway_app, first.id)
    second = await begin(gateway_app, input="b", previous_response_id=first.id)
    await ended(gateway_app, second.id)
    async with gateway_app.openai() as client:
        await client.responses.create(model=BASE, input="c", previous_response_id=second.id)
    text = tiny_tokenizer().decode(gateway_app.engine.requests[-1].prompt_ids, skip_special=False)
    said = [f"<|user|>{word}<|end|><|assistant|>" for word in "abc"]
    assert text == f"{said[0]}{HELLO}<|end|>{said[1]}{HELLO}<|end|>{said[2]}"


async def test_one_that_runs_is_not_continued(gateway_app):
    response_id = await running(gateway_app)
    with pytest.raises(openai.BadRequestError, match="no answer to continue: it is in_progress"):
        await begin(gateway_app, previous_response_id=response_id)
    gateway_app.engine.go_on.set()


async def test_tool_calls_of_a_virtual_model_are_read_as_those_of_the_member_that_answers(valkey, tmp_path):
    small = FakeEngine()
    small.reply = lambda request: '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    served = {"others": {"small": small}, "routes": RouteTable({"auto": Split({"small": 1})})}
    gateway_app = await build(valkey, tmp_path, served)
    gateway_app.gateway.models.default.intake.dialect = (
        None  # the model that stands for the virtual one parses no calls
    )
    made = await begin(gateway_app, model="auto", tools=[{"type": "function", "name": "add", "parameters": {}}])
    answer = await ended(gateway_app, made.id)
    assert (answer.status, answer.output[0].arguments) == ("completed", '{"a": 1}')
    await drained(gateway_app)


async def test_an_incomplete_answer_is_one(gateway_app):
    made = await begin(gateway_app, max_output_tokens=4)
    answer = await ended(gateway_app, made.id)
    assert (answer.status, answer.output_text, answer.incomplete_details.reason) == (
        "incomplete",
        "Hell",
        "max_output_tokens",
    )


@pytest.mark.parametrize(
    ("fields", "code"),
    [({"input": "x" * 3000}, "context_length_exceeded"), ({"model": "pirate"}, "engine_unavailable")],
)
async def test_an_error_becomes_the_responses(gateway_app, fields, code):
    if code == "engine_unavailable":
        gateway_app.engine.fail_after = 3
    made = await begin(gateway_app, **fields)
    failed = await ended(gateway_app, made.id)
    assert (failed.status, failed.error.code, failed.output) == ("failed", code, [])
    with pytest.raises(openai.BadRequestError, match="it is failed"):
        await begin(gateway_app, previous_response_id=made.id)


async def test_a_limit_of_the_tenant_is_an_error_of_the_response(gateway_app):
    async with gateway_app.openai("sk-globex") as client:
        fields = {"model": "pirate", "input": "hi", "background": True, "max_output_tokens": 1000}
        made = await client.responses.create(**fields)
        while (found := await client.responses.retrieve(made.id)).status != "failed":
            await asyncio.sleep(0.005)
        assert found.error.code == "insufficient_quota"
        with pytest.raises(openai.NotFoundError):
            await client.responses.create(**fields | {"model": "poet"})


async def test_what_contradicts_itself_is_refused(gateway_app):
    with pytest.raises(openai.BadRequestError, match="store must not"):
        await begin(gateway_app, store=False)
    assert gateway_app.engine.requests == []


async def test_the_quota_is_checked_first_and_answers_are_charged(valkey, tmp_path):
    gateway_app = await build(valkey, tmp_path, tenant_bytes=5000)
    store = ResponseStore(valkey)
    made = await begin(gateway_app)
    await ended(gateway_app, made.id)
    fields = await valkey.hgetall(f"loralane:response:{{acme}}:{made.id}")
    stored = sum(len(fields[name]) for name in (b"head", b"input", b"output", b"ending"))
    assert await store.use("acme") == 512 + stored
    with pytest.raises(openai.RateLimitError, match="5000 bytes together"):
        await begin(gateway_app, input="x" * 4000)
    await drained(gateway_app)
    assert len(gateway_app.engine.requests) == 1


async def test_an_answer_without_room_is_a_failure(valkey, tmp_path):
    gateway_app = await build(valkey, tmp_path, tenant_bytes=3000)
    made = await begin(gateway_app, include=["message.output_text.logprobs"], top_logprobs=20)
    failed = await ended(gateway_app, made.id)
    assert (failed.status, failed.error.code, failed.output) == ("failed", "insufficient_quota", [])
    assert await ResponseStore(valkey).use("acme") < 3000
    await drained(gateway_app)


@pytest.mark.parametrize("elsewhere", [False, True])
async def test_it_is_cancelled_from_any_gateway(gateway_app, valkey, tmp_path, elsewhere):
    response_id = await running(gateway_app)
    other = await build(valkey, tmp_path) if elsewhere else gateway_app
    for _ in range(2):
        found = await cancel(other, response_id)
        assert (found.status, found.output, found.error) == ("cancelled", [], None)
    await until(none_runs)
    assert list(gateway_app.engine.ends.values()) == ["aborted"]
    assert (await get(gateway_app, response_id)).status == "cancelled"
    [[charged]] = gateway_app.limiter.ends.values()
    assert charged is not None and charged > 0


async def test_what_has_ended_is_not_cancelled(gateway_app):
    made = await begin(gateway_app)
    await ended(gateway_app, made.id)
    assert (await cancel(gateway_app, made.id)).output_text == HELLO
    async with gateway_app.openai() as client:
        other = await client.responses.create(model=BASE, input="hi", store=True)
        with pytest.raises(openai.BadRequestError, match="only a response with background: true"):
            await client.responses.cancel(other.id)
    async with gateway_app.openai("sk-initech") as client:
        with pytest.raises(openai.NotFoundError):
            await client.responses.cancel(made.id)


@pytest.mark.parametrize("elsewhere", [False, True])
async def test_deleting_it_ends_it(gateway_app, valkey, tmp_path, elsewhere):
    response_id = await running(gateway_app)
    other = await build(valkey, tmp_path) if elsewhere else gateway_app
    async with other.openai() as client:
        await client.responses.delete(response_id)
    await until(none_runs)
    assert await valkey.keys("loralane:response:*") == []
    assert await ResponseStore(valkey).use("acme") == 0


async def test_a_response_whose_gateway_stops_has_failed(gateway_app):
    response_id = await running(gateway_app)
    gateway_app.gateway.end_requests()
    failed = await ended(gateway_app, response_id)
    assert (failed.status, failed.error.code) == ("failed", "engine_unavailable")


async def test_an_answer_waits_for_redis(gateway_app, monkeypatch):
    response_id = await running(gateway_app)
    finish, failures = ResponseStore.finish, [1, 2, 3]

    async def away(*args: Any) -> bool:
        if failures:
            failures.pop()
            raise ApiError(Fault.REGISTRY_UNAVAILABLE, "away")
        return await finish(*args)

    monkeypatch.setattr(ResponseStore, "finish", away)
    gateway_app.engine.go_on.set()
    assert (await ended(gateway_app, response_id)).output_text == HELLO
    assert failures == []


async def test_a_lease_that_ran_out_is_a_failure_and_ends_what_still_runs(gateway_app, valkey):
    response_id = await running(gateway_app)
    await valkey.hset(f"loralane:response:{{acme}}:{response_id}", "lease", 1)
    found = await get(gateway_app, response_id)
    while found.status == "in_progress":  # its gateway was quicker to renew it
        await valkey.hset(f"loralane:response:{{acme}}:{response_id}", "lease", 1)
        found = await get(gateway_app, response_id)
    assert (found.status, found.error.code, found.output) == ("failed", "server_error", [])
    await until(none_runs)
    assert list(gateway_app.engine.ends.values()) == ["aborted"]


async def test_only_the_first_end_counts(valkey):
    store = ResponseStore(valkey)
    entry = ResponseEntry(f"resp_{1:032x}", b'{"status": "queued"}', b"[]")
    await store.create("acme", entry)
    assert (await store.cancel("acme", entry.id))["status"] == "cancelled"
    assert not await store.finish("acme", entry.id, "ended", b'{"status": "completed"}', b"[1]", 1)
    assert not await store.renew("acme", entry.id, "in_progress")
    assert (await store.get("acme", entry.id))["status"] == "cancelled"


async def test_draining_waits_and_then_cancels(valkey, tmp_path):
    responses = Responses(ResponseStore(valkey))
    gateway_app = await build_gateway_app(tmp_path, responses=responses)
    gateway_app.engine.go_on = asyncio.Event()
    made = await begin(gateway_app)
    while not gateway_app.engine.requests:
        await asyncio.sleep(0.001)
    draining = asyncio.create_task(responses.background.drain(60))
    gateway_app.engine.go_on.set()
    await draining
    assert (await get(gateway_app, made.id)).status == "completed"
    gateway_app.engine.go_on.clear()
    made = await begin(gateway_app)
    while len(gateway_app.engine.requests) < 2:
        await asyncio.sleep(0.001)
    await responses.background.drain(0)
    await drained(gateway_app)
    assert (await get(gateway_app, made.id)).status in ("queued", "in_progress")


@pytest.mark.slow
async def test_a_killed_gateway_leaves_a_failure(valkey, valkey_server, tmp_path):
    """Another gateway tells it as soon as the lease of the killed one has run out."""
    receiver, sender = FORKS.Pipe(duplex=False)
    options = {
        "redis": valkey_server.connection_url,
        "folder": str(tmp_path),
        "limits": {"acme": {}},
        "pause": 0.5,
        "response_lease_seconds": 0.5,
    }
    process = FORKS.Process(target=gateway_worker.run, args=(options, sender), daemon=True)
    process.start()
    port = await asyncio.to_thread(receiver.recv)
    other = await build(valkey, tmp_path, lease_seconds=0.5)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}/v1/responses") as client:
        client.headers["authorization"] = "Bearer sk-acme"
        made = (await client.post("", json={"model": BASE, "input": "hi", "background": True})).json()
    while (await get(other, made["id"])).status == "queued":
        await asyncio.sleep(0.02)
    assert (await get(other, made["id"])).status == "in_progress"
    process.kill()
    failed = await ended(other, made["id"])
    assert (failed.status, failed.error.code, failed.usage) == ("failed", "server_error", None)
    assert "has ended; send the request again" in failed.error.message
    process.join()
