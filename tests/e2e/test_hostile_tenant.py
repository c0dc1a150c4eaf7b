"""Every attack that a tenant's key allows, on a real gateway and a real engine, while another tenant streams."""

import asyncio

import httpx
import psutil
import pytest

from benchmarks.attacks import ATTACKS, GRAMMARS, Attacker
from tests.e2e.test_serving import settled

pytestmark = pytest.mark.asyncio(loop_scope="session")

PATIENCE_SECONDS = 300
MOST_GROWTH_BYTES = 1 << 30
"""Of all processes together: the prefix cache and the kernels' scratch are among it, and each grammar worker may have
64 MiB; a single one of the grammars took more than two gigabytes where nothing bounded it."""


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


async def streams(client, model, ends):
    """Stream chats until `ends` is set. Returns how many were answered in whole."""
    number = 0
    while not ends.is_set():
        messages = [{"role": "user", "content": f"Say {number} words about the sea."}]
        stream = await client.chat.completions.create(model=model, messages=messages, max_tokens=6, stream=True)
        finish = [chunk.choices[0].finish_reason async for chunk in stream]
        assert finish[-1] in ("stop", "length")
        number += 1
    return number


async def test_no_attack_of_a_tenant_reaches_its_neighbour(server, client_of, models):
    url, key, ends = f"http://127.0.0.1:{server.http_port}", "sk-demo-acme", asyncio.Event()
    engine, before = server.supervisor.pid, memory()
    headers, limits = {"authorization": f"Bearer {key}"}, httpx.Limits(max_connections=None)
    answered, most = {}, before
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=PATIENCE_SECONDS, limits=limits) as http:
        attacker = Attacker(http, f"127.0.0.1:{server.grpc_port}", models[0], key)
        neighbour = asyncio.create_task(streams(client_of("sk-demo-globex"), models[0], ends))
        for name, attack in ATTACKS.items():
            async with asyncio.timeout(PATIENCE_SECONDS):
                answered[name] = await attack(attacker)
            most = max(most, memory())
            assert not neighbour.done(), f"the neighbour failed during: {name}"
        ends.set()
        assert await neighbour > 0
    assert set(answered["grammars that crash"]) <= {"400", "400 invalid_value"}
    assert {status[:3] for status in answered["grammars that cost"]} <= {"400", "429"}
    assert answered["a batch of grammars that crash"] == {
        "batch completed": 1,
        "lines done": 1,
        "lines failed": len(GRAMMARS),
    }
    assert answered["malformed protobuf"] == {"INVALID_ARGUMENT": 1}
    assert {status[:3] for status in answered["a flood with n = 4"]} <= {"200", "429", "503"}
    assert server.supervisor.pid == engine
    assert most - before < MOST_GROWTH_BYTES
    await settled(server)
