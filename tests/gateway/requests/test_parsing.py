"""Long bodies are parsed in one thread, in which tenants take turns."""

import asyncio
import threading

import pytest

from gateway.core.errors import ApiError, invalid_request
from gateway.requests.turns import LOOP_BYTES, ParsingTurns


async def test_only_long_bodies_are_parsed_in_a_thread():
    turns = ParsingTurns()
    here = threading.get_ident()
    assert await turns.run("acme", LOOP_BYTES, threading.get_ident) == here
    others = {await turns.run("acme", LOOP_BYTES + 1, threading.get_ident) for _ in range(3)}
    assert len(others) == 1 and here not in others


async def test_a_refusal_comes_from_the_thread():
    def refuse() -> None:
        raise invalid_request("no")

    with pytest.raises(ApiError):
        await ParsingTurns().run("acme", LOOP_BYTES + 1, refuse)


async def test_tenants_take_turns():
    turns, order, go = ParsingTurns(), [], threading.Event()

    def parse(name: str) -> None:
        go.wait(60)
        order.append(name)

    def begin(tenant: str, number: int, size: int = LOOP_BYTES + 1) -> asyncio.Task[None]:
        return asyncio.create_task(turns.run(tenant, size, lambda: parse(f"{tenant} {number}")))

    tasks = [begin("acme", number) for number in range(4)]
    await asyncio.sleep(0)
    tasks.append(begin("globex", 0))
    await asyncio.sleep(0)
    go.set()
    await asyncio.gather(*tasks)
    assert order.index("globex 0") <= 1
