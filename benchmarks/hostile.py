"""`make bench-hostile`: latency of a tenant while another tenant attacks the gateway with everything a key allows.

    python -m benchmarks.hostile [--chats 200] [--rounds 4]

A neighbour tenant streams short chats, one after the other: alone, and beside each attack, which is repeated meanwhile.
All rounds together have --chats of them beside each attack, and about as many alone.
Before every attack of every round it streams alone again, so that changes of the machine's speed affect both cases. The
table shows how much longer the neighbour's TTFT is beside each attack, and how the attacks were answered. The exit
status is 1 if its p99 beside an attack exceeds twice its p99 alone, if the engine died, or if one of the neighbour's
chats failed. The attacker is a separate process with the lowest priority, because a real attacker has its own machine;
the CPU time that it still takes is part of the figures. On two slow cores a run takes half an hour.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path

import httpx
import psutil
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.attacks import ATTACKS, Attack, Attacker
from benchmarks.command import run
from benchmarks.server import KEY, Command, free_port, launched
from engine.process.files import default_data_dir
from gateway.terminal.output import print_wide

MODEL = "smollm2-135m-instruct"
NEIGHBOUR_KEY = "sk-demo-globex"
MOST_TIMES = 2.0
"""Largest ratio of the neighbour's p99 beside an attack to its p99 alone."""
LEAST_CHATS = 100
"""Smallest number of chats alone and beside each attack. With fewer, the p99 would be the maximum."""
LOWEST_PRIORITY = 19
"""Niceness of the attacker process."""
PAUSE_SECONDS = 0.15
"""Pause between two of the neighbour's chats, whose tenant may send 600 requests a minute."""


@dataclass
class Phase:
    """The neighbour's latencies, the attacker's answers and the server's peak memory, during an attack or without."""

    name: str
    ttft: list[float] = field(default_factory=list)
    """TTFT of each of the neighbour's chats, in seconds."""
    answers: Counter[str] = field(default_factory=Counter)
    most_bytes: int = 0

    @property
    def p50(self) -> float:
        return statistics.median(self.ttft)

    @property
    def p99(self) -> float:
        return statistics.quantiles(self.ttft, n=100, method="inclusive")[-1]


async def stream_chats(url: str, phase: Phase, count: int) -> None:
    """Stream `count` chats as the neighbour and record their TTFT. Raises RuntimeError if an answer is not complete."""
    headers = {"authorization": f"Bearer {NEIGHBOUR_KEY}"}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=120) as client:
        for _ in range(count):
            messages = [{"role": "user", "content": f"Say {time.time_ns()} words about the sea."}]
            body = {"model": MODEL, "messages": messages, "max_tokens": 8, "stream": True}
            begun = time.perf_counter()
            async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
                lines = answer.aiter_lines()
                async for line in lines:
                    if '"content":"' in line and '"content":""' not in line:
                        phase.ttft.append(time.perf_counter() - begun)
                        break
                rest = [line async for line in lines]
            if answer.status_code != 200 or "data: [DONE]" not in rest:
                raise RuntimeError(f"the neighbour got {answer.status_code} during: {phase.name}")
            await asyncio.sleep(PAUSE_SECONDS)


async def continue_phase(
    phase: Phase, url: str, attack: Callable[[], Awaitable[Counter[str]]] | None, server: psutil.Process, chats: int
) -> None:
    """Stream `chats` more of the neighbour's chats for a phase, and repeat the attack meanwhile. None means no attack.
    Records TTFT, answers to the attack and peak memory in `phase`. Raises RuntimeError if a chat is not complete."""
    neighbour = asyncio.create_task(stream_chats(url, phase, chats))
    while not neighbour.done():
        if attack is None:
            await asyncio.wait([neighbour], timeout=0.5)
        else:
            phase.answers += await attack()
        phase.most_bytes = max(phase.most_bytes, memory(server))
    await neighbour


def attack_once(name: str, url: str, grpc_target: str) -> Counter[str]:
    """Execute an attack once, in the attacker's process. Returns the number of answers of each kind."""
    return asyncio.run(_attack(ATTACKS[name], url, grpc_target))


async def _attack(attack: Attack, url: str, grpc_target: str) -> Counter[str]:
    headers, limits = {"authorization": f"Bearer {KEY}"}, httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=600, limits=limits) as http:
        return await attack(Attacker(http, grpc_target, MODEL, KEY))


async def in_attacker(attacker: Executor, name: str, url: str, grpc_target: str) -> Counter[str]:
    return await asyncio.get_running_loop().run_in_executor(attacker, attack_once, name, url, grpc_target)


def memory(server: psutil.Process) -> int:
    """Return the memory of a server's processes in bytes (PSS, so shared pages count once)."""
    total = 0
    for process in (server, *server.children(recursive=True)):
        try:
            total += process.memory_full_info().pss
        except psutil.NoSuchProcess:
            continue  # a grammar worker that has just been replaced
    return total


async def all_phases(
    url: str, grpc_target: str, server: psutil.Process, arguments: argparse.Namespace, console: Console
) -> list[Phase]:
    """Run all rounds of all attacks. Returns the phases, the one without an attack first."""
    chats, rounds = -(-arguments.chats // arguments.rounds), range(arguments.rounds)
    alone, phases = Phase("alone"), {name: Phase(name) for name in ATTACKS}
    await continue_phase(Phase("warm-up"), url, None, server, 20)
    with (
        ProcessPoolExecutor(1, get_context("spawn"), os.nice, (LOWEST_PRIORITY,)) as attacker,
        Progress(console=console, transient=True) as progress,
    ):
        for _, name in progress.track(list(product(rounds, ATTACKS))):
            await continue_phase(alone, url, None, server, -(-chats // len(ATTACKS)))
            attack = partial(in_attacker, attacker, name, url, grpc_target)
            await continue_phase(phases[name], url, attack, server, chats)
    return [alone, *phases.values()]


def slowed(phases: list[Phase]) -> list[str]:
    """Return a message for each attack beside which the neighbour's p99 was too long."""
    alone = phases[0]
    return [
        f"beside {phase.name} the neighbour's p99 TTFT is {phase.p99 * 1e3:.0f} ms, alone {alone.p99 * 1e3:.0f} ms:"
        f" more than {MOST_TIMES:g} times as long"
        for phase in phases[1:]
        if phase.p99 > MOST_TIMES * alone.p99
    ]


def table(phases: list[Phase]) -> Table:
    alone = phases[0]
    found = Table(title="a neighbour's TTFT beside each attack")
    found.add_column("beside")
    for column in ("chats", "p50 ms", "x", "p99 ms", "x", "memory MiB"):
        found.add_column(column, justify="right")
    found.add_column("the attacker's answers")
    for phase in phases:
        answers = ", ".join(f"{answer}: {count}" for answer, count in phase.answers.most_common(4))
        figures = [f"{phase.p50 * 1e3:.0f}", f"{phase.p50 / alone.p50:.2f}"]
        figures += [f"{phase.p99 * 1e3:.0f}", f"{phase.p99 / alone.p99:.2f}", f"{phase.most_bytes >> 20}"]
        found.add_row(phase.name, str(len(phase.ttft)), *figures, answers)
    return found


def bench(arguments: argparse.Namespace, console: Console, scratch: Path) -> None:
    http_port, grpc_port = free_port(), free_port()
    words = [sys.executable, "-m", "gateway", "serve", "--data-dir", str(arguments.data_dir)]
    words += ["--http-port", str(http_port), "--grpc-port", str(grpc_port)]
    url = f"http://127.0.0.1:{http_port}"
    with launched(Command(words, url, "/ready"), scratch / "server.log") as process:
        server = psutil.Process(process.pid)
        engines = {child.pid for child in server.children() if "engine.serve.server" in child.cmdline()}
        target = f"127.0.0.1:{grpc_port}"
        phases = asyncio.run(all_phases(url, target, server, arguments, console))
        if not engines <= {child.pid for child in server.children()}:
            raise RuntimeError(f"the engine died; its log is {scratch / 'server.log'}")
    print_wide(table(phases))
    if too_slow := slowed(phases):
        raise RuntimeError("; ".join(too_slow))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.hostile", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-dir", type=Path, default=default_data_dir(os.environ))
    parser.add_argument("--chats", type=int, default=200, help="alone and beside each attack (default: %(default)s)")
    parser.add_argument(
        "--rounds", type=int, default=4, help="in which all attacks are repeated (default: %(default)s)"
    )
    arguments = parser.parse_args()
    if arguments.chats < LEAST_CHATS or arguments.rounds < 1:
        parser.error(f"--chats must be at least {LEAST_CHATS}, and --rounds at least 1")
    run(partial(bench, arguments))


if __name__ == "__main__":
    main()
