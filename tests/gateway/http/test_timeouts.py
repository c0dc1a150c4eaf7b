"""Time limits that a caller sets over HTTP, in the body and in headers, on every endpoint that generates."""

import asyncio
import json

import pytest
from fakes import BASE, GatewayApp, build_gateway_app

BODIES = {
    "/v1/chat/completions": {"model": BASE, "messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"model": BASE, "prompt": "hi", "max_tokens": 20},
    "/v1/responses": {"model": BASE, "input": "hi"},
    "/v1/embeddings": {"model": BASE, "input": "hi"},
    "/v1/rerank": {"model": BASE, "query": "hi", "documents": ["ho"]},
    "/v1/score": {"model": BASE, "text_1": "hi", "text_2": "ho"},
}
LATE = "there was no complete answer before the deadline"
STALLED = "there was no token for 0.3 s"
every_path = pytest.mark.parametrize("path", BODIES)
generating_path = pytest.mark.parametrize("path", list(BODIES)[:3])
choices_path = pytest.mark.parametrize("path", list(BODIES)[:2])


@pytest.fixture
async def gateway_app(tmp_path) -> GatewayApp:
    """A gateway whose engine stops after the first token."""
    gateway_app = await build_gateway_app(tmp_path)
    gateway_app.engine.go_on = asyncio.Event()
    return gateway_app


async def post(gateway_app, path, headers=None, **fields):
    async with gateway_app.client() as client:
        return await client.post(path, json=BODIES[path] | fields, headers=headers)


@generating_path
@pytest.mark.parametrize(
    ("headers", "fields", "message"),
    [
        ({}, {"timeout": 0.3}, LATE),
        ({"x-request-timeout": "0.3"}, {}, LATE),
        ({"x-request-timeout": "60"}, {"timeout": 0.3}, LATE),
        ({"x-request-timeout": "0.3"}, {"timeout": 60}, LATE),
        ({}, {"stall_timeout": 0.3}, STALLED),
        ({"x-stall-timeout": "0.3"}, {}, STALLED),
        ({"x-stall-timeout": "60"}, {"stall_timeout": 0.3}, STALLED),
        ({"x-stall-timeout": "0.3", "x-request-timeout": "60"}, {"stall_timeout": 60}, STALLED),
    ],
)
async def test_the_sooner_limit_of_body_and_headers_ends_the_request(gateway_app, path, headers, fields, message):
    response = await post(gateway_app, path, headers, **fields)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["message"]) == (504, "deadline_exceeded", message)
    await gateway_app.assert_empty()
    assert list(gateway_app.engine.ends.values()) == ["aborted"]


@choices_path
@pytest.mark.parametrize(("fields", "message"), [({"timeout": 0.3}, LATE), ({"stall_timeout": 0.3}, STALLED)])
async def test_a_stream_that_is_late_ends_with_the_error(gateway_app, path, fields, message):
    response = await post(gateway_app, path, stream=True, n=2, **fields)
    *_, error, done, rest = response.text.split("\n\n")
    assert (response.status_code, done, rest) == (200, "data: [DONE]", "")
    assert json.loads(error.removeprefix("data: "))["error"]["message"] == message
    await gateway_app.assert_empty()
    assert list(gateway_app.engine.ends.values()) == ["aborted"] * 2


@every_path
@pytest.mark.parametrize("header", ["x-request-timeout", "x-stall-timeout"])
@pytest.mark.parametrize("value", ["0", "-1", "soon", "nan", "inf", "86401", "5s", "\xff", "9" * 400])
async def test_a_header_that_is_no_number_of_seconds_is_refused_by_name(gateway_app, path, header, value):
    response = await post(gateway_app, path, {header: value.encode("latin-1")})
    assert (response.status_code, response.json()["error"]["param"]) == (400, header)
    assert gateway_app.engine.requests == []
    await gateway_app.assert_empty()


@every_path
async def test_the_time_in_which_the_body_comes_counts(gateway_app, path):
    async def slowly():
        yield json.dumps(BODIES[path]).encode()
        await asyncio.sleep(0.2)

    async with gateway_app.client() as client:
        response = await client.post(path, content=slowly(), headers={"x-request-timeout": "0.1"})
    assert response.status_code == 504
    assert gateway_app.engine.requests == []
    await gateway_app.assert_empty()


@choices_path
async def test_limits_that_are_not_reached_change_nothing(gateway_app, path):
    gateway_app.engine.go_on = None
    limits = {"timeout": 60, "stall_timeout": 60}
    told = [await post(gateway_app, path, seed=1, **fields) for fields in ({}, limits)]
    texts = [response.json()["choices"] for response in told]
    assert texts[0] == texts[1]
    await gateway_app.assert_empty()
