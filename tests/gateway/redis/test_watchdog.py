"""The watch over the embedded Valkey and its disk: what is ill goes on, what is silent is restarted."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import structlog
from redis.exceptions import RedisError

from gateway.core.space import Disk
from gateway.redis import server as store
from gateway.redis import watchdog as watching
from gateway.redis.watchdog import Ballast, Pulse, Watchdog

MIB = 2**20
PATIENCE_SECONDS = 60.0
HANGS_UP = b""


@contextmanager
def answering(path: Path, *answers: bytes) -> Iterator[list[int]]:
    """A server that gives these answers, in order, and yields how often it was asked on each connection."""
    asked: list[int] = []
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def serve() -> None:
            left = list(answers)
            while left:
                with suppress(OSError), listener.accept()[0] as connection:
                    asked.append(0)
                    while left and connection.recv(64):
                        asked[-1] += 1
                        if (answer := left.pop(0)) == HANGS_UP:
                            break
                        connection.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield asked
    thread.join(PATIENCE_SECONDS)


def watchdog_of(pulse: object, restarts: list[str]) -> Watchdog:
    return Watchdog(pulse, SimpleNamespace(look=lambda: None), lambda: restarts.append("restarted"))


class Answers:
    """A pulse that gives these answers, or raises them."""

    def __init__(self, *answers: str | OSError) -> None:
        self._answers = list(answers)

    def ping(self) -> str:
        answer = self._answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    def close(self) -> None:
        pass


def test_one_connection_serves_all_checks_and_is_made_anew_when_it_breaks(tmp_path):
    path = tmp_path / "socket"
    with answering(path, b"+PONG\r\n", b"-MISCONF Errors\r\n", HANGS_UP, b"+PONG\r\n") as asked:
        pulse = Pulse(path)
        assert [pulse.ping(), pulse.ping(), pulse.ping()] == ["", "MISCONF Errors", ""]
        pulse.close()
    assert asked == [3, 1]


def test_no_answer_is_an_error_and_so_is_no_server(tmp_path, monkeypatch):
    monkeypatch.setattr(watching, "ANSWER_SECONDS", 0.05)
    with pytest.raises(OSError, match="No such file"):
        Pulse(tmp_path / "absent").ping()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "silent"))
        listener.listen()
        with pytest.raises(TimeoutError):
            Pulse(tmp_path / "silent").ping()


def test_an_ill_server_is_told_once_for_each_reason_and_never_restarted():
    restarts: list[str] = []
    full, loading = "MISCONF Errors writing to the AOF file", "LOADING the dataset"
    watchdog = watchdog_of(Answers("", *[full] * 20, loading, loading, "", ""), restarts)
    with structlog.testing.capture_logs() as logs:
        for _ in range(25):
            watchdog.check()
    assert [(line["event"], line.get("reason")) for line in logs] == [
        ("valkey_ill", full),
        ("valkey_ill", loading),
        ("valkey_well", None),
    ]
    assert restarts == []


def test_only_silence_that_lasts_restarts_a_server():
    restarts: list[str] = []
    silence, refusal = TimeoutError("timed out"), ConnectionRefusedError(errno.ECONNREFUSED, "refused")
    watchdog = watchdog_of(Answers(silence, silence, "", silence, refusal, silence, ""), restarts)
    for number in range(7):
        watchdog.check()
        assert len(restarts) == (number >= 5)


def test_a_lack_of_descriptors_says_nothing_about_the_server():
    restarts: list[str] = []
    lack = OSError(errno.EMFILE, "Too many open files")
    watchdog = watchdog_of(Answers(*[lack] * 10, ""), restarts)
    with structlog.testing.capture_logs() as logs:
        for _ in range(11):
            watchdog.check()
    assert [line["event"] for line in logs] == ["valkey_ill", "valkey_well"]
    assert restarts == []


def test_the_ballast_is_made_where_there_is_room_and_freed_where_there_is_none(tmp_path):
    free = [1024 * MIB]
    disk = Disk(tmp_path, measure=lambda folder: SimpleNamespace(total=1024 * MIB, free=free[0]))
    path = tmp_path / "ballast"
    ballast = Ballast(path, disk)
    ballast.look()
    assert path.stat().st_blocks * 512 >= watching.BALLAST_BYTES
    for left, is_kept in ((9 * MIB, True), (7 * MIB, False), (200 * MIB, False), (287 * MIB, False), (289 * MIB, True)):
        free[0] = left
        ballast.look()
        assert path.exists() == is_kept, left
    ballast.remove()
    ballast.remove()
    assert not path.exists()


async def test_a_valkey_that_cannot_save_goes_on_and_heals(tmp_path, monkeypatch):
    """A folder where its snapshot should be makes it refuse writes and PING, as a full disk does."""
    monkeypatch.setattr(watching, "CHECK_SECONDS", 0.02)
    in_the_way = tmp_path / "valkey" / "dump.rdb"
    with structlog.testing.capture_logs() as logs:
        async with store.open_store(tmp_path) as client:
            first = (await client.info("server"))["process_id"]
            await client.set("before", "1")
            in_the_way.mkdir()
            await client.config_set("save", "3600 1000000")
            await client.bgsave()
            await until(lambda: written(client), False)
            await asyncio.sleep(20 * watching.CHECK_SECONDS)
            assert await client.get("before") == b"1"
            in_the_way.rmdir()
            await client.bgsave()
            await until(lambda: written(client), True)
            await asyncio.sleep(5 * watching.CHECK_SECONDS)
            assert (await client.info("server"))["process_id"] == first
    told = [line for line in logs if line["event"].startswith("valkey")]
    assert [line["event"] for line in told] == ["valkey_ill", "valkey_well"]
    assert told[0]["reason"].startswith("MISCONF")


async def test_a_valkey_that_stands_still_is_restarted(tmp_path, monkeypatch):
    monkeypatch.setattr(watching, "CHECK_SECONDS", 0.02)
    monkeypatch.setattr(watching, "ANSWER_SECONDS", 0.2)
    async with store.open_store(tmp_path) as client:
        first = (await client.info("server"))["process_id"]
        os.kill(first, signal.SIGSTOP)

        async def other() -> bool:
            with suppress(RedisError):
                return (await client.info("server"))["process_id"] != first
            return False

        await until(other, True)


async def written(client) -> bool:
    """Return whether the server accepts a write."""
    try:
        return bool(await client.set("written", "1"))
    except RedisError:
        return False


async def until(question, answer: bool) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while await question() != answer:
            await asyncio.sleep(0.02)
