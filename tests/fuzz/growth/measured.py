"""A target under measurement: its process, its neighbour's, and what a case costs them."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import grpc
import psutil

from tests.fuzz.growth.beside import PACE_SECONDS
from tests.fuzz.growth.requests import Request
from tests.fuzz.growth.wire import Ending, send

ROOT = Path(__file__).parents[3]
START_SECONDS = 120.0
CALM_SECONDS = 5.0
"""How long memory may take to go back after an answer."""
LOOK_SECONDS = 0.25
ALONE_SECONDS = 0.5
ANSWER_SECONDS = 60.0
"""How long the target's loop may take to say how it is."""
WARM_UPS = 3


class Lost(Exception):
    """The target does not answer any more, or its process has ended."""


class Figures(NamedTuple):
    """What a case has cost."""

    ending: Ending
    hold: float
    """Seconds of the longest time for which the gateway's loop did not turn."""
    where: str
    kept: int
    """Bytes that the gateway's process, or one of its workers, has more than before, once it is calm."""
    gap: float
    """Seconds of the neighbour's longest wait for an event."""
    cpu: float
    """Seconds that the target's processes have computed."""
    seconds: float

    def slowed(self, alone: float) -> float:
        """Return by which factor the neighbour's longest wait was longer than its longest `alone`, in seconds. What
        the target's processes cannot have caused, as they have computed less, is the machine's."""
        return 1.0 + min(max(self.gap - alone, 0.0), self.cpu) / alone


class Measured:
    """A running target with a neighbour."""

    def __init__(self, process: asyncio.subprocess.Process, http: str, channel: grpc.aio.Channel) -> None:
        self.process, self.http, self.channel = process, http, channel
        self._gaps: list[tuple[float, float]] = []
        self.broken: list[str] = []
        """What was wrong with streams of the neighbour's, and with the target's end."""

    async def cost(self, request: Request, seconds: float, most_kept: int) -> Figures:
        """Send a request and measure what it costs. Raises Lost.

        Memory beyond `most_kept` is waited for, CALM_SECONDS at most.
        """
        await self.hold()
        before, computed, begun = self.memory(), self.computed(), time.monotonic()
        ending = await send(self.http, self.channel, request, seconds)
        took = time.monotonic() - begun
        hold, where = await self.hold()
        cpu = self.computed() - computed
        kept = await self.kept(before, most_kept)
        return Figures(ending, hold, where, kept, self.longest_gap(begun, begun + took), cpu, took)

    async def alone(self) -> float:
        """Return the longest wait of the neighbour's in a while without cases, in seconds."""
        begun = time.monotonic()
        await asyncio.sleep(ALONE_SECONDS)
        return max(self.longest_gap(begun, begun + ALONE_SECONDS), PACE_SECONDS)

    async def hold(self) -> tuple[float, str]:
        """Return the longest hold of the loop since the last call, and where. Raises Lost."""
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                self.process.stdin.write(b"\n")
                said = json.loads(await self.process.stdout.readline())
                return said["seconds"], said["where"]
        except (TimeoutError, OSError, ValueError) as error:
            raise Lost(f"the target's process does not answer (exit code {self.process.returncode})") from error

    def memory(self) -> dict[int, int]:
        """Return the resident bytes of the gateway's process and of each of its grammar workers, by process id."""
        found = {}
        with suppress(psutil.Error):
            top = psutil.Process(self.process.pid)
            for process in (top, *top.children(recursive=True)):
                with suppress(psutil.Error):  # a worker that has just been replaced
                    found[process.pid] = process.memory_info().rss
        return found

    def computed(self) -> float:
        """Return the seconds that the gateway's process and its workers have computed so far."""
        total = 0.0
        with suppress(psutil.Error):
            top = psutil.Process(self.process.pid)
            for process in (top, *top.children(recursive=True)):
                with suppress(psutil.Error):
                    total += sum(process.cpu_times()[:2])
        return total

    async def kept(self, before: dict[int, int], most: int) -> int:
        until = time.monotonic() + CALM_SECONDS
        while (kept := self._grown(before)) > most and time.monotonic() < until:
            await asyncio.sleep(LOOK_SECONDS)
        return kept

    def _grown(self, before: dict[int, int]) -> int:
        return max((now - before[pid] for pid, now in self.memory().items() if pid in before), default=0)

    def longest_gap(self, since: float, until: float) -> float:
        """Return the longest wait of the neighbour's that ended in this time, or just after it. 0: there was none."""
        gaps = [gap for at, gap in self._gaps if since <= at <= until + 2 * PACE_SECONDS]
        del self._gaps[:-1000]
        return max(gaps, default=0.0)

    async def listen(self, neighbour: asyncio.subprocess.Process) -> None:
        """Note what the neighbour sees, as long as it streams."""
        assert neighbour.stdout is not None
        async for line in neighbour.stdout:
            said = json.loads(line)
            if "error" in said:
                self.broken.append(said["error"])
            else:
                self._gaps.append((said["at"], said["gap"]))


def send_options() -> list[tuple[str, int]]:
    """Return options of a gRPC channel that refuses nothing itself."""
    sizes = ("grpc.max_send_message_length", "grpc.max_receive_message_length")
    return [*((name, -1) for name in sizes), ("grpc.max_metadata_size", 2**24)]


@asynccontextmanager
async def measured(warm_up: Sequence[Request] = ()) -> AsyncIterator[Measured]:
    """Start a target, and end it with the block. It has answered the requests of `warm_up` a few times.

    What it leaves behind at its end is noted in `broken`.
    """
    async with _process("tests.fuzz.growth.target", stdin=True) as process:
        assert process.stdout is not None
        addresses = json.loads(await asyncio.wait_for(process.stdout.readline(), START_SECONDS))
        async with (
            grpc.aio.insecure_channel(addresses["grpc"], options=send_options()) as channel,
            _process("tests.fuzz.growth.beside", addresses["http"]) as neighbour,
        ):
            target = Measured(process, addresses["http"], channel)
            listening = asyncio.create_task(target.listen(neighbour))
            for request in [*warm_up] * WARM_UPS:
                await send(target.http, channel, request, START_SECONDS)
            yield target
            listening.cancel()
        target.broken += await _end(process)


async def _end(process: asyncio.subprocess.Process) -> list[str]:
    """End a target by the end of its input. Returns what is wrong with its end, in words."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.close()
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            said = await process.stdout.read()
            await process.wait()
    except TimeoutError:
        return ["the target did not end with its input"]
    if process.returncode == 0 and said.endswith(b'{"left": 0}\n'):
        return []
    return [f"the target ended with {process.returncode} and said {said[-300:]!r}"]


@asynccontextmanager
async def _process(module: str, *arguments: str, stdin: bool = False) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run a module until the end of the block, at which it is killed if it still runs."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", module, *arguments, cwd=ROOT, stdin=pipe if stdin else None, stdout=pipe, limit=2**20
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
