"""Memory goes back to the operating system after a burst: what is free, and what only the garbage collector frees."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from gateway.serve import memory
from gateway.serve.memory import STEADY_LOOKS, MemoryKeeper, glibc, memory_kept_low

BURST = """
import asyncio, sys
from gateway.serve.memory import MemoryKeeper, glibc, memory_kept_low
from gateway.serve.process import freeze_memory, run_loop

class Node:
    pass

def burst(kind):
    if kind == "free":  # every third block stays, so that the heap's end is in use
        blocks = [bytes(3000) for _ in range(60_000)]
        return blocks[::300]
    for _ in range(40):
        node = Node()
        node.itself, node.data = node, [bytes(3000) for _ in range(1000)]

async def main(kind):
    freeze_memory()
    await asyncio.to_thread(int)  # a gateway has threads
    keeper = MemoryKeeper(glibc())
    async with memory_kept_low() if "kept" in sys.argv else asyncio.timeout(None):
        before = keeper.resident()
        kept = burst(kind)
        most = keeper.resident()
        for _ in range(60 if "kept" in sys.argv else 10):
            if keeper.resident() < before * 1.1 + 2**20:
                break
            await asyncio.sleep(0.5)
        print(most > before * 2, keeper.resident() < before * 1.1 + 2**20)

run_loop(main(sys.argv[1]))
"""

needs_glibc = pytest.mark.skipif(glibc() is None, reason="the memory keeper works with glibc alone")


def after_burst(*arguments: str) -> str:
    """Return whether memory grew in a burst, and whether it came back."""
    ended = subprocess.run([sys.executable, "-c", BURST, *arguments], capture_output=True, text=True, check=True)
    return ended.stdout.strip()


@needs_glibc
@pytest.mark.parametrize("kind", ["free", "garbage"])
def test_memory_goes_back_after_a_burst(kind):
    assert after_burst(kind, "kept") == "True True"


@needs_glibc
async def test_the_loop_does_not_walk_the_heaps(monkeypatch):
    """With 200,000 free blocks, it took 42 ms, four times a second."""
    keeper, walked = MemoryKeeper(glibc()), []
    monkeypatch.setattr(keeper, "used", lambda: walked.append(threading.get_ident()) or 0)
    monkeypatch.setattr(keeper, "resident", lambda: 100 * 2**20)
    for _ in range(3 * STEADY_LOOKS):
        await keeper.look()
    assert 3 <= len(walked) <= 9 and threading.get_ident() not in walked


@needs_glibc
def test_without_the_keeper_it_would_stay():
    assert after_burst("free") == "True False"


async def test_other_c_libraries_are_left_alone(monkeypatch):
    monkeypatch.setattr(memory, "glibc", lambda: None)
    memory.bound_heaps()
    async with memory_kept_low():
        pass
