"""A network partition between a gateway and an engine while answers are streamed: both sides notice it, the answers
go on elsewhere, and no token is told twice once the network has healed."""

from __future__ import annotations

import asyncio

import pytest
from local_engines import Answer, ask, until

from engine.rpc.target import EngineTarget
from tests.chaos.proxy import Proxy
from tests.engine.rpc.test_transport import free_port

LENGTH = 600
"""Tokens of answers under way when the network is cut off. They must last for longer than it takes to notice that."""
SHORT = 60


@pytest.fixture
def quick_pings(monkeypatch):
    """Ping ten times as often as in production, so that the test takes seconds."""
    monkeypatch.setattr("engine.rpc.transport.PING_MS", 500)
    monkeypatch.setattr("engine.rpc.transport.CONNECT_MS", 500)


@pytest.fixture
async def far(engines):
    """Yield the engine `far`, and the proxy in front of its TCP port."""
    port = free_port()
    engine = engines.start("far", address=f"127.0.0.1:{port}")
    proxy = Proxy(("127.0.0.1", port))
    proxied = EngineTarget(f"127.0.0.1:{await proxy.listen_tcp()}")
    engine.target = proxied
    yield engine, proxy
    await proxy.close()


@pytest.mark.slow
async def test_answers_leave_an_engine_behind_a_partition_and_no_token_comes_twice(quick_pings, engines, far):
    engine, proxy = far
    pool = await engines.pool("far", "near")
    answers = [Answer(pool, ask(f"r{i}", length=LENGTH)) for i in range(12)]
    await until(lambda: all(len(answer.tokens) > 20 for answer in answers))
    assert {answer.engines[0] for answer in answers} == {"far", "near"}
    proxy.hold()
    await until(lambda: pool.overviews()[0].state == "connecting")  # the gateway has noticed
    await until(lambda: not engine.engine.state.sequences)  # the engine has noticed, and has cancelled the requests
    theirs = sum(answer.engines[0] == "far" for answer in answers)
    assert engine.engine.state.counters.generated_tokens < theirs * LENGTH
    for answer in answers:
        await answer.whole()
        assert answer.engines in (["far", "near"], ["near"])
    again = [Answer(pool, ask(f"again{i}", length=SHORT)) for i in range(4)]
    proxy.resume()
    await asyncio.wait_for(pool.wait_serving(2), 30)
    again += [Answer(pool, ask(f"later{i}", length=SHORT)) for i in range(12)]
    for answer in again:
        await answer.whole()
    assert "far" in {name for answer in again for name in answer.engines}


@pytest.mark.slow
async def test_answers_return_to_the_only_engine_after_the_partition_and_no_token_comes_twice(
    quick_pings,
    engines,
    far,
):
    _, proxy = far
    pool = await engines.pool("far")
    answers = [Answer(pool, ask(f"r{i}", length=LENGTH)) for i in range(12)]
    await until(lambda: all(len(answer.tokens) > 20 for answer in answers))
    proxy.hold()
    await until(lambda: not pool.ready)
    proxy.resume()
    for answer in answers:
        await answer.whole()
        assert len(answer.places) == 2
