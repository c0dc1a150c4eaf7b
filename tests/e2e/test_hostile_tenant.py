"""Every attack that a tenant's key allows, on a real gateway and a real engine, while another tenant streams."""

import asyncio
import time

import httpx
import psutil
import pytest

from tests.attack.attacker import Attacker
from tests.attack.catalogue import ATTACKS, SMALL
from tests.attack.generations import POISON
from tests.e2e.test_serving import settled

pytestmark = pytest.mark.asyncio(loop_scope="session")

FLOOD = "a flood with n = 4"
PATIENCE_SECONDS = 300
MOST_GROWTH_BYTES = 1 << 30
"""Bounds the growth of all processes together: the prefix cache and the kernels' scratch are among it, and each grammar
worker may have 64 MiB; a single one of the grammars took more than two gigabytes where nothing bounded it."""


def memory():
    """Return the bytes of this process, which is the gateway, and of all its children; shared pages count once."""
    ours = psutil.Process()
    total = 0
    for process in (ours, *ours.children(recursive=True)):
        try:
            total += process.memory_full_info().pss
        except psutil.NoSuchProcess:
            continue  # a grammar worker that was replaced
    return total


async def streams(client, model, ends, done):
    """Stream chats until `ends` is set, each other one with a grammar of its own, and note in `done` those that were
    answered in whole."""
    while not ends.is_set():
        number = len(done)
        messages = [{"role": "user", "content": f"Say {number} words about the sea."}]
        own = {"guided_regex": f"[a-z ]{{1,20}}{number}"} if number % 2 else {}
        stream = await client.chat.completions.create(
            model=model, messages=messages, max_tokens=6, stream=True, extra_body=own
        )
        finish = [chunk.choices[0].finish_reason async for chunk in stream]
        assert finish[-1] in ("stop", "length")
        done.append(number)
        await asyncio.sleep(0.1)  # its limit is 600 requests a minute


async def test_no_attack_of_a_tenant_reaches_its_neighbour(server, client_of, models):
    url, key, ends = f"http://127.0.0.1:{server.http_port}", "sk-demo-acme", asyncio.Event()
    engine, before, done = server.engines.supervisors["engine-0"].pid, memory(), []
    headers, limits = {"authorization": f"Bearer {key}"}, httpx.Limits(max_connections=None)
    answered, most = {}, before
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=PATIENCE_SECONDS, limits=limits) as http:
        attacker = Attacker(http, f"127.0.0.1:{server.grpc_port}", models[0], key)
        neighbour = asyncio.create_task(streams(client_of("sk-demo-globex"), models[0], ends, done))
        for name, attack in SMALL.items():
            already = len(done)
            async with asyncio.timeout(PATIENCE_SECONDS):
                answered[name] = await attack(attacker)
                while len(done) == already and not neighbour.done():
                    await asyncio.sleep(0.05)  # an attack that is over before the neighbour's chat
            most = max(most, memory())
            if neighbour.done():
                await neighbour  # raises what it failed with
        ends.set()
        await neighbour
    assert set(answered["grammars that crash"]) <= {"400", "400 invalid_value"}
    assert {status[:3] for status in answered["grammars that cost"]} <= {"400", "429"}
    assert answered["a batch of grammars that crash"] == {
        "batch completed": 1,
        "lines done": 1,
        "lines failed": len(POISON),
    }
    [refused] = answered["malformed protobuf"]
    assert refused.startswith("INVALID_ARGUMENT: ") and "Error" not in refused
    assert {"200"} <= {status[:3] for status in answered["many grammars at once"]} <= {"200", "429"}
    assert answered["a grammar that grows"] == {"200 guided_regex [DONE]": 1}
    assert answered[FLOOD].keys() == {"200", "503 lane_queue_full"}
    assert server.engines.supervisors["engine-0"].pid == engine
    assert most - before < MOST_GROWTH_BYTES
    assert answered["a key in trailers"].keys() == {"401"}
    assert answered["requests behind an Upgrade"].keys() == {"2 answers"}
    assert SMALL.keys() <= ATTACKS.keys()
    await settled(server)


async def test_requests_at_once_do_not_get_beyond_a_limit(server, models):
    """50 requests of 300 tokens against 1,000 a minute: three are served, and what the bucket gains meanwhile."""
    url, admin = f"http://127.0.0.1:{server.http_port}", {"authorization": "Bearer sk-demo-admin"}
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_SECONDS) as http:
        tenant = {"name": "limited", "limits": {"tokens_per_minute": 1000}}
        (await http.post("/admin/v1/tenants", json=tenant, headers=admin)).raise_for_status()
        made = (await http.post("/admin/v1/keys", json={"tenant": "limited"}, headers=admin)).raise_for_status()
        key = {"authorization": f"Bearer {made.json()['key']}"}
        body = {"model": models[0], "prompt": [5] * 290, "max_tokens": 10, "ignore_eos": True}
        begun = time.monotonic()
        calls = [http.post("/v1/completions", json=body, headers=key) for _ in range(50)]
        statuses = [answer.status_code for answer in await asyncio.gather(*calls)]
        gained = 1000 * (time.monotonic() - begun) / 60
        assert set(statuses) == {200, 429}
        assert 3 <= statuses.count(200) <= (1000 + gained) // 300
        (await http.delete("/admin/v1/tenants/limited", headers=admin)).raise_for_status()
    await settled(server)
