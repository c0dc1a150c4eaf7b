"""Several gateways take up another configuration while they run: real processes, a real Valkey, a fake engine."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from engine.config import EngineConfig
from engine.demo import DEMO_ADAPTERS
from gateway.config.lanes import InteractiveLane, LanesConfig
from gateway.config.sections import (
    AdaptersConfig,
    AdminConfig,
    GrpcConfig,
    HttpConfig,
    ObservabilityConfig,
    RedisConfig,
    TenantConfig,
)
from gateway.config.whole import Config
from gateway.core.limits import Limits
from gateway.core.tenants import Tenant, hash_key
from gateway.serve.addresses import Ports
from gateway.serve.fleet import Fleet, running_fleet
from gateway.serve.launch import Launch
from gateway.serve.single import running

ACME, GLOBEX, ADMIN = (f"sk-{name}-0123456789" for name in ("acme", "globex", "admin"))
BASE, TAKEN = "smollm2-135m-instruct", "taken"
"""TAKEN is an alias, so that no adapter may be called that. The engines of these tests load any folder."""
GOAL = f'loralane_slo_goal_seconds{{goal="ttft",lane="interactive",model_name="{BASE}"}} 0.125'
PROCESSES = 2
ASKED = 12
"""Connections, enough to meet every process."""


def tenant(name, key, **limits):
    return TenantConfig(Tenant(name, limits=Limits(**limits)), (hash_key(key),))


BEFORE = Config(
    engine=EngineConfig(model="", num_pages=2000, max_model_len=1000),
    adapters=AdaptersConfig(preload={"pirate": DEMO_ADAPTERS["pirate"]}),
    tenants={"acme": tenant("acme", ACME)},
    redis=RedisConfig(timeout_ms=30_000.0),
    http=HttpConfig(port=0, drain_seconds=0.5),
    grpc=GrpcConfig(port=0),
    admin=AdminConfig((hash_key(ADMIN),)),
    observability=ObservabilityConfig(request_log=False),
)
AFTER = replace(
    BEFORE,
    adapters=AdaptersConfig(preload={"cheer": DEMO_ADAPTERS["cheer"], TAKEN: Path("/nowhere/at/all")}),
    lanes=LanesConfig(InteractiveLane(ttft_s=0.125)),
    tenants={"acme": tenant("acme", ACME, tokens_per_minute=4321), "globex": tenant("globex", GLOBEX)},
)


@asynccontextmanager
async def alone(launch):
    async with running(launch) as app:
        yield app


@asynccontextmanager
async def together(launch):
    async with running_fleet(replace(launch, config=replace(launch.config, gateways=PROCESSES))) as fleet:
        yield fleet


async def asked(app, path, key, **body):
    """Answers of connections of their own."""
    headers = {"authorization": f"Bearer {key}", "connection": "close"}
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{app.http_port}", headers=headers, timeout=60) as http:
        if body:
            return await asyncio.gather(*(http.post(path, json=body) for _ in range(ASKED)))
        return await asyncio.gather(*(http.get(path) for _ in range(ASKED)))


async def names(app, key):
    """What every process serves."""
    return [{model["id"] for model in answer.json().get("data", ())} for answer in await asked(app, "/v1/models", key)]


async def chats(app, key, model):
    message = {"role": "user", "content": "hi"}
    return await asked(app, "/v1/chat/completions", key, model=model, max_tokens=2, messages=[message])


async def until_all(look, wanted):
    """Registries tell the other gateways within moments."""
    async with asyncio.timeout(60):
        while not all(map(wanted, await look())):
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("serving", [alone, together])
async def test_adapters_lanes_limits_and_tenants_are_taken_up_while_it_serves(smollm2, tmp_path, serving):
    launch = Launch(BEFORE, smollm2, tmp_path, ("engine.serve.server", "--fake"))
    async with serving(launch) as app:
        assert {answer.status_code for answer in await chats(app, GLOBEX, "pirate")} == {401}
        await asked(app, "/admin/v1/adapters/pirate/aliases", ADMIN, alias=TAKEN)
        failed = await app.apply(AFTER)
        assert failed.keys() == {TAKEN}
        await until_all(lambda: names(app, GLOBEX), {"pirate", "cheer"}.issubset)
        await until_all(lambda: chats(app, GLOBEX, "cheer"), lambda answer: answer.status_code == 200)
        for answer in await chats(app, ACME, "pirate"):  # named no more, and served until it is unloaded
            assert (answer.status_code, answer.headers["x-ratelimit-limit-tokens"]) == (200, "4321")
        for answer in await asked(app, "/metrics", ADMIN):
            assert GOAL in answer.text


async def test_gateways_that_are_starting_meanwhile_or_come_later_begin_with_what_can_be_served(smollm2, tmp_path):
    launch = Launch(BEFORE, smollm2, tmp_path, ("engine.serve.server", "--fake"))
    async with together(launch) as fleet:
        await asked(fleet, "/admin/v1/adapters/pirate/aliases", ADMIN, alias=TAKEN)
        victim, later = fleet.members
        victim._process.kill()
        async with asyncio.timeout(60):
            while victim.serving.is_set():
                await asyncio.sleep(0.01)
        assert (await fleet.apply(AFTER)).keys() == {TAKEN}
        async with asyncio.timeout(60):
            while not victim.serving.is_set():
                await asyncio.sleep(0.05)
        await until_all(lambda: chats(fleet, GLOBEX, "cheer"), lambda answer: answer.status_code == 200)
        for answer in await asked(fleet, "/metrics", ADMIN):
            assert GOAL in answer.text
        later._process.kill()
        async with asyncio.timeout(60):
            while not (later.restarts and later.serving.is_set()):
                await asyncio.sleep(0.05)
        for answer in await chats(fleet, ACME, "cheer"):
            assert (answer.status_code, answer.headers["x-ratelimit-limit-tokens"]) == (200, "4321")


class Deckhand:
    """A member of a fleet, of which nothing is asked but what it is to begin with the next time."""

    def __init__(self, preload, answer=frozenset({("tone", "its weights are missing")})):
        self.preload = preload
        self.answer = answer
        self.serving = asyncio.Event()
        self.serving.set()

    async def apply_settings(self, config):
        self.preload = config.adapters.preload

    async def seed(self):
        return None if self.answer is None else dict(self.answer)


class Shore:
    def promise_all(self, config):
        pass


async def test_where_an_adapter_cannot_be_served_gateways_go_on_with_the_one_before():
    old, new = Path("/adapters/tone"), Path("/adapters/broken")
    members = [Deckhand({"tone": old}) for _ in range(PROCESSES)]
    fleet = Fleet(members, Shore(), ports=(Ports(1, 2),))
    await fleet.apply(replace(BEFORE, adapters=AdaptersConfig(preload={"tone": new, "poet": new})))
    assert [member.preload for member in members] == [{"tone": old, "poet": new}] * PROCESSES


async def test_another_gateway_seeds_when_the_first_one_ends_meanwhile():
    tone = Path("/adapters/tone")
    members = [Deckhand({}, answer=None), Deckhand({})]
    fleet = Fleet(members, Shore(), ports=(Ports(1, 2),))
    failed = await fleet.apply(replace(BEFORE, adapters=AdaptersConfig(preload={"tone": tone})))
    assert failed == {"tone": "its weights are missing"}
