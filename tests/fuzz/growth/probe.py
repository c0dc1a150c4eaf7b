"""Measures for how long a process keeps an event loop of its own from turning, on a machine that others use, too."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NamedTuple

TICK_SECONDS = 0.001
LOOK_SECONDS = 0.01
"""Time after which a loop that has not turned is looked at, and between two looks."""
IDLE = (
    "threading.py",
    "selectors.py",
    "queue.py",
    "socket.py",
    "probe.py",
    "growth/target.py",
    "concurrent/futures/thread.py",
)
"""Files in which a thread that has nothing to do waits."""
ROOT = str(Path(__file__).parents[3])


class Hold(NamedTuple):
    """The longest time for which the loop did not turn, and the lines that were seen to run in such times."""

    seconds: float
    where: str


class LoopProbe:
    """Wakes up in a loop every millisecond, and looks what happened whenever it wakes up late.

    Of a gap between two turns it counts what the loop's thread has computed. It adds what another of Python's threads
    has, which may have held Python's lock, but no more than the gap without the time for which the loop's thread waited
    for a processor. So neither other processes' work nor a loop that sleeps counts, nor do threads of libraries.
    """

    def __init__(self) -> None:
        self._worst = 0.0
        self._seen: Counter[str] = Counter()
        self._turned = time.perf_counter()
        self._ends = threading.Event()

    async def run(self) -> None:
        """Measure the running loop until this is cancelled."""
        threading.Thread(target=self._look, args=(threading.get_ident(),), daemon=True).start()
        threads = _Threads()
        try:
            wall, before = time.perf_counter(), threads.spent()
            while True:
                await asyncio.sleep(TICK_SECONDS)
                now, spent = time.perf_counter(), threads.spent()
                self._worst = max(self._worst, _held(now - wall - TICK_SECONDS, before, spent))
                wall = self._turned = now
                before = spent
        finally:
            self._ends.set()
            threads.close()

    async def take(self) -> Hold:
        """Return the longest hold since the last call, after two more turns of the loop."""
        for _ in range(2):
            await asyncio.sleep(2 * TICK_SECONDS)
        seen = [f"{place} x{count}" for place, count in self._seen.most_common(3)]
        hold = Hold(self._worst, "; ".join(seen))
        self._worst = 0.0
        self._seen.clear()
        return hold

    def _look(self, loop_thread: int) -> None:
        """Note what all threads do whenever the loop has not turned for a while."""
        while not self._ends.wait(LOOK_SECONDS):
            if time.perf_counter() - self._turned > LOOK_SECONDS:
                for thread, frame in sys._current_frames().items():
                    if thread != threading.get_ident() and not _is_idle(frame):
                        self._seen[("loop " if thread == loop_thread else "thread ") + _place(frame)] += 1


class Spent(NamedTuple):
    """Seconds that one thread has computed, and has waited for a processor."""

    computed: float
    waited: float


NOTHING = Spent(0.0, 0.0)


class _Threads:
    """Reads what Python's threads have spent; the calling one is the loop's, and comes first."""

    def __init__(self) -> None:
        self._files: dict[int, int] = {}
        self._own = threading.get_native_id()

    def spent(self) -> dict[int, Spent]:
        """Return it by the threads' ids."""
        found = {}
        for number in (self._own, *[thread.native_id for thread in threading.enumerate()]):
            if number is None or number in found:
                continue
            with suppress(OSError):  # a thread that has just ended
                if number not in self._files:
                    self._files[number] = os.open(f"/proc/self/task/{number}/schedstat", os.O_RDONLY)
                computed, waited, _ = os.pread(self._files[number], 80, 0).split()
                found[number] = Spent(int(computed) / 1e9, int(waited) / 1e9)
        found[self._own] = found[self._own]._replace(computed=time.thread_time())
        return found

    def close(self) -> None:
        for file in self._files.values():
            os.close(file)


def _held(wall: float, before: dict[int, Spent], now: dict[int, Spent]) -> float:
    """Return the seconds of a gap of `wall` seconds in which Python's lock was held, by the loop's thread, which comes
    first, or by the other thread that has computed most."""
    spent = [Spent(*(b - a for a, b in zip(before.get(key, NOTHING), one, strict=True))) for key, one in now.items()]
    loop, other = spent[0], max(spent[1:], default=NOTHING)
    return max(loop.computed, min(wall - loop.waited, loop.computed + other.computed))


def _is_idle(frame: FrameType) -> bool:
    return frame.f_code.co_filename.endswith(IDLE)


def _place(frame: FrameType | None) -> str:
    """Return the innermost line of a stack, and before it the innermost one of this repository."""
    assert frame is not None
    innermost, own = frame, frame
    if innermost.f_code.co_filename.endswith("asyncio/runners.py"):
        return "in no line of Python"  # in a library's code, or waiting for Python's lock
    while own is not None and not own.f_code.co_filename.startswith(ROOT + "/gateway"):
        own = own.f_back  # type: ignore[assignment]
    return _line(innermost) if own is None or own is innermost else f"{_line(own)} > {_line(innermost)}"


def _line(frame: FrameType) -> str:
    file = frame.f_code.co_filename.removeprefix(ROOT + "/").rsplit("site-packages/", 1)[-1].rsplit("lib/python", 1)[-1]
    return f"{file}:{frame.f_lineno} {frame.f_code.co_name}"
