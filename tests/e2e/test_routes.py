"""Every policy of virtual models with a real engine: its base model, an adapter, and a second gateway as upstream."""

import asyncio
from collections import Counter
from dataclasses import replace
from typing import NamedTuple

import grpc
import httpx
import pytest
import pytest_asyncio

from gateway.config.routes import read_routes
from gateway.config.upstreams import UpstreamConfig
from gateway.pb import generation_pb2 as pb
from gateway.pb.generation_pb2_grpc import GenerationStub
from gateway.redis.server import store_url
from gateway.requests.service import Gateway
from gateway.serve.app import built_gateway
from gateway.serve.backends import Backends, ModelPlace
from gateway.serve.endpoints import listening
from gateway.serve.launch import Launch
from gateway.serve.start_bar import StartBar
from gateway.serve.stopping import Stop
from gateway.virtual_models.features import NAMES
from gateway.virtual_models.router import RouterFile, encode_router

pytestmark = pytest.mark.asyncio(loop_scope="session")

BASE, ADAPTER, CLOUD, AWAY = "smollm2-135m-instruct", "pirate", "cloud", "away"
DIMENSIONS = 576
KEY, ADMIN = "sk-demo-acme", "sk-demo-admin"
SHORT = "What is the capital of France?"
LONG = "What is the capital of the country whose flag is blue, white and red, and whose people speak French?"
ROUTES = {
    "canary": {"policy": "split", "weights": {BASE: 0, ADAPTER: 1}, "shadow": {"member": BASE, "share": 1.0}},
    "tiers": {"policy": "lane", "interactive": BASE, "batch": ADAPTER},
    "elsewhere": {"policy": "fallback", "members": [CLOUD, BASE]},
    "safe": {"policy": "fallback", "members": [AWAY, ADAPTER]},
    "sure": {"policy": "cascade", "members": [ADAPTER, BASE], "accept": {"logprob": -5.0, "valid": True}},
    "doubtful": {"policy": "cascade", "members": [ADAPTER, CLOUD], "accept": {"logprob": -1e-9}},
    "agreed": {"policy": "cascade", "members": [ADAPTER, AWAY, BASE], "accept": {"agreement": True}},
    "smart": {"policy": "learned", "small": ADAPTER, "large": BASE, "patience": 600.0},
}
"""The learned route waits for its vector even on a machine that is busy with other tests."""
CASES = [
    ("canary", SHORT, "default", ADAPTER),
    ("tiers", SHORT, "default", BASE),
    ("tiers", SHORT, "flex", ADAPTER),
    ("elsewhere", SHORT, "default", CLOUD),
    ("safe", SHORT, "default", ADAPTER),
    ("sure", SHORT, "default", ADAPTER),
    ("doubtful", SHORT, "default", CLOUD),
    ("smart", SHORT, "default", ADAPTER),
    ("smart", LONG, "default", BASE),
]
"""Routes, questions, service tiers, and the members that answer."""


def write_router(path):
    """Write a router for which the small member suffices if a question has less than some 55 characters. It reads a
    vector of the prompt, which decides nothing."""
    count, length = len(NAMES) + DIMENSIONS, NAMES.index("log_question_characters")
    mean, weights = [0.0] * count, [0.0] * count
    mean[length], weights[length] = 4.0, -50.0
    shape = {"embedder": BASE, "dimensions": DIMENSIONS, "features": list(NAMES), "scale": [1.0] * count}
    path.write_bytes(encode_router(RouterFile(**shape, mean=mean, weights=weights, intercept=0.0, threshold=0.5)))
    return path


class Place(NamedTuple):
    """A gateway that serves."""

    gateway: Gateway
    http_port: int
    grpc_port: int


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def place(server, demo, smollm2, tmp_path_factory):
    """A gateway with all routes and a store of its own, over the engine of the gateway of the other tests. Its
    upstreams are that gateway, and a port on which none is."""
    folder = tmp_path_factory.mktemp("routes")
    routes = ROUTES | {"smart": ROUTES["smart"] | {"router": str(write_router(folder / "router.json"))}}
    there = UpstreamConfig(f"http://127.0.0.1:{server.http_port}/v1", "cheer", "sk-demo-globex")
    upstreams = {CLOUD: there, AWAY: replace(there, url="http://127.0.0.1:9/v1", retries=0, failures=1000)}
    acme = demo.tenants["acme"]
    tenants = demo.tenants | {"acme": replace(acme, tenant=replace(acme.tenant, upstreams=("*",)))}
    config = replace(demo, routes=read_routes(routes, {}, folder), upstreams=upstreams, tenants=tenants)
    engines = {BASE: ModelPlace(server.engines.targets, smollm2)}
    async with (
        store_url(folder) as store,
        built_gateway(Launch(config, smollm2, folder), Backends(store, engines), StartBar.hidden()) as app,
        listening(app.servers, Stop(), shared=False) as ports,
    ):
        yield Place(app.gateway, ports[0].http, ports[0].grpc)


def over_http(place, model, question, tier):
    """Return the member that answered, its text, and the usage of its answer."""
    body = {"model": model, "messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 40}
    url = f"http://127.0.0.1:{place.http_port}/v1/chat/completions"
    headers = {"authorization": f"Bearer {KEY}"}
    response = httpx.post(url, json=body | {"service_tier": tier}, headers=headers, timeout=600)
    assert response.status_code == 200, response.text
    answer = response.json()
    member = response.headers.get("x-loralane-model", model)
    assert member == answer.get("x_loralane", {}).get("model", model)
    return member, answer["choices"][0]["message"]["content"], answer["usage"]["completion_tokens"]


def over_grpc(place, model, question, tier):
    request = pb.GenerateRequest(
        model=model,
        chat=pb.Chat(messages=[pb.ChatMessage(role="user", content=question)]),
        sampling=pb.SamplingParams(temperature=0, max_tokens=40),
        lane=pb.LANE_BATCH if tier == "flex" else pb.LANE_UNSPECIFIED,
    )
    with grpc.insecure_channel(f"127.0.0.1:{place.grpc_port}") as channel:
        generate = GenerationStub(channel).Generate
        answer, call = generate.with_call(request, metadata=(("authorization", f"Bearer {KEY}"),), timeout=600)
    member = dict(call.initial_metadata())["x-loralane-model"]
    return member, answer.choices[0].text, answer.usage.completion_tokens


async def charged(place):
    """Return the completion tokens that are charged to the tenant, by member."""
    async with asyncio.timeout(120):
        while place.gateway.active:
            await asyncio.sleep(0.02)
    url = f"http://127.0.0.1:{place.http_port}/admin/v1/usage"
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {ADMIN}"}) as http:
        report = (await http.get(url, params={"group_by": "tenant,adapter"})).json()
    lines = [line for line in report["usage"] if line["tenant"] == "acme"]
    return Counter({line["adapter"]: line["completion_tokens"] for line in lines})


@pytest.mark.parametrize("ask", [over_http, over_grpc])
async def test_every_policy_answers_with_a_member_and_charges_what_members_computed(place, server, ask):
    own = {name: await asyncio.to_thread(over_http, place, name, SHORT, "default") for name in (BASE, ADAPTER)}
    own[CLOUD] = await asyncio.to_thread(over_http, server, "cheer", SHORT, "default")
    texts, tokens = ({name: answer[part] for name, answer in own.items()} for part in (1, 2))
    assert len(set(texts.values())) == 3
    before, expected = await charged(place), Counter()
    for route, question, tier, member in CASES:
        answered, text, used = await asyncio.to_thread(ask, place, route, question, tier)
        assert answered == member, route
        assert question == LONG or text == texts[member], route
        expected[member] += used
        expected[ADAPTER] += tokens[ADAPTER] if route == "doubtful" else 0
    assert await charged(place) - before == expected
    before = await charged(place)
    answered, _, _ = await asyncio.to_thread(ask, place, "agreed", SHORT, "default")
    more = await charged(place) - before
    assert answered in (ADAPTER, BASE)
    assert more[ADAPTER] > tokens[ADAPTER], "both samples are charged"
    assert set(more) == {ADAPTER, answered}
