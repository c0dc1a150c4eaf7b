"""Memory that a thread has freed goes back to the machine."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

from gateway.serve import memory

SCRIPT = """
import asyncio
from gateway.serve.memory import memory_given_back, resident_bytes

def work():
    pieces = [bytes([number % 250]) * 2000 for number in range(60_000)]  # on glibc's heap of this thread
    return bytes([1]) * 2000  # which keeps the heap from shrinking by itself

async def main():
    async with memory_given_back(seconds=0.05, growth=16 * 2**20):
        before = resident_bytes()
        task = asyncio.create_task(asyncio.to_thread(work))
        await asyncio.sleep(0)
        kept = await task
        async with asyncio.timeout(20):
            while resident_bytes() > before + 16 * 2**20:
                await asyncio.sleep(0.05)

asyncio.run(main())
"""


def test_what_a_thread_has_freed_is_given_back():
    """In a process of its own, whose size nothing else changes."""
    subprocess.run([sys.executable, "-c", SCRIPT], check=True, timeout=60)


async def test_a_process_that_does_not_grow_is_left_alone(monkeypatch: pytest.MonkeyPatch):
    trimmed: list[int] = []
    sizes = [100, 110, 105, 150, 139, 90, 131]
    monkeypatch.setattr(memory, "resident_bytes", lambda: sizes.pop(0) if sizes else 100)
    task = asyncio.create_task(memory._give_back(lambda: trimmed.append(1), 0.0, 40))
    while sizes or len(trimmed) < 2:
        await asyncio.sleep(0.01)
    task.cancel()
    assert len(trimmed) == 2  # at 150 and 131 bytes
