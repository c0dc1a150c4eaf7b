"""`make bench-hostile`: what a tenant feels while another tenant attacks the gateway with everything a key allows.

    python -m benchmarks.hostile [--seconds 20]

A neighbour streams short chats, one after the other: alone, and beside each attack, which is repeated for as long. The
table says how much longer its TTFT is then, and how the attacks were answered. The exit status is 1 if a process died
or if one of the neighbour's chats failed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import httpx
import psutil
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.attacks import ATTACKS, Attack, Attacker
from benchmarks.command import run
from benchmarks.server import KEY, Command, free_port, launched
from engine.paths import default_data_dir
from gateway.outputs import print_wide

MODEL = "smollm2-135m-instruct"
NEIGHBOUR_KEY = "sk-demo-globex"
PAUSE_SECONDS = 0.15
"""Between two of the neighbour's chats: its limit is 600 requests a minute."""


@dataclass
class Phase:
    """What the neighbour felt, and how the attacker was answered, during one attack."""

    name: str
    ttft: list[float] = field(default_factory=list)
    """Seconds of each of the neighbour's chats."""
    answers: Counter[str] = field(default_factory=Counter)
    most_bytes: int = 0

    @property
    def p50(self) -> float:
        return statistics.median(self.ttft)

    @property
    def p99(self) -> float:
        return statistics.quantiles(self.ttft, n=100, method="inclusive")[-1]


async def stream_chats(url: str, phase: Phase, ends: asyncio.Event) -> None:
    """Raises RuntimeError if a chat is not answered in whole."""
    headers = {"authorization": f"Bearer {NEIGHBOUR_KEY}"}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=120) as client:
        while not ends.is_set():
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


async def one_phase(
    name: str, attack: Attack | None, attacker: Attacker, server: psutil.Process, seconds: float
) -> Phase:
    phase, ends = Phase(name), asyncio.Event()
    neighbour = asyncio.create_task(stream_chats(str(attacker.http.base_url), phase, ends))
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not neighbour.done():
        if attack is None:
            await asyncio.sleep(0.5)
        else:
            phase.answers += await attack(attacker)
        phase.most_bytes = max(phase.most_bytes, memory(server))
    ends.set()
    await neighbour
    return phase


def memory(server: psutil.Process) -> int:
    """Return the bytes of a server's processes; pages that they share count once."""
    total = 0
    for process in (server, *server.children(recursive=True)):
        try:
            total += process.memory_full_info().pss
        except psutil.NoSuchProcess:
            continue  # a grammar worker that has just been replaced
    return total


async def all_phases(
    url: str, grpc_target: str, server: psutil.Process, seconds: float, console: Console
) -> list[Phase]:
    headers, limits = {"authorization": f"Bearer {KEY}"}, httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=600, limits=limits) as http:
        attacker = Attacker(http, grpc_target, MODEL, KEY)
        with Progress(console=console, transient=True) as progress:
            phases = []
            for name, attack in progress.track([("warm-up", None), ("alone", None), *ATTACKS.items()]):
                phases.append(
                    await one_phase(name, attack, attacker, server, seconds / 4 if name == "warm-up" else seconds)
                )
    return phases[1:]


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
        engines = {child.pid for child in server.children() if "engine.server" in child.cmdline()}
        target = f"127.0.0.1:{grpc_port}"
        phases = asyncio.run(all_phases(url, target, server, arguments.seconds, console))
        if not engines <= {child.pid for child in server.children()}:
            raise RuntimeError(f"the engine died; its log is {scratch / 'server.log'}")
    print_wide(table(phases))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.hostile", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-dir", type=Path, default=default_data_dir(os.environ))
    parser.add_argument("--seconds", type=float, default=20.0, help="of each phase (default: %(default)s)")
    run(partial(bench, parser.parse_args()))


if __name__ == "__main__":
    main()
