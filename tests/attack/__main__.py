"""`make attack`: mounts every attack of a stranger or a tenant on a running server, and measures what others notice.

    python -m tests.attack [--only TEXT] [--seconds 20] [--calm-seconds 5] [--list]

A neighbour tenant streams short chats: alone before each attack, and beside the attack, which is repeated for
--seconds. First come two controls, a process that computes beside it and a tenant with four honest chats at a time.
Beside every attack, the neighbour's p99 of TTFT and ITL may be twice the largest without one, `GET /health` may take
50 ms, all of the neighbour's chats must be whole and counted once, no process may end, and within 30 s the RSS of each
process must be back within 10 % of what it was. The exit status is 1 if one of these does not hold. The attacker is a
process with the lowest priority, because a real attacker has its own machine; the CPU time that it still takes is part
of the figures.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import httpx
import msgspec
from rich.console import Console
from rich.progress import Progress

from benchmarks.runner import run
from benchmarks.server import launched
from gateway.terminal.output import print_wide
from tests.attack.catalogue import ATTACKS, repeat
from tests.attack.controls import CONTROLS
from tests.attack.neighbour import Neighbour, Seen, neighbour_process
from tests.attack.server import ADMIN, MODEL, Server, command, make_tenant
from tests.attack.verdict import Phase, failures, grown, table

LOWEST_PRIORITY = 19
"""Niceness of the attacker process."""
BACK_SECONDS = 30.0
"""Time after an attack within which memory must be back."""
COUNTED_SECONDS = 30.0
"""Time after an attack within which all requests must have ended and be counted."""
WARM_UP_SECONDS = 10.0


class Run:
    """Mounts attacks on a server and measures them."""

    def __init__(self, server: Server, attacker: Executor, neighbour: Neighbour, key: str) -> None:
        """`key` is the attacker's."""
        self._server, self._attacker, self._neighbour, self._key = server, attacker, neighbour, key

    async def calm(self, seconds: float) -> Seen:
        """Let the neighbour work alone."""
        self._neighbour.begin()
        await asyncio.sleep(seconds)
        return await self._neighbour.end()

    async def attack(self, name: str, seconds: float) -> Phase:
        """Mount one attack beside the neighbour, and wait until the server is as it was, or had time for that."""
        server, phase = self._server, Phase(name, before=self._server.memory())
        counted, processes = await server.usage("neighbour"), server.processes()
        self._neighbour.begin()
        await self._mount(phase, seconds)
        phase.seen = await self._neighbour.end()
        if server.processes() != processes:
            phase.trouble.append(f"processes ended: there were {processes}, there are {server.processes()}")
        phase.trouble += await server.miscounted(counted, phase.seen.usage, COUNTED_SECONDS)
        await self._until_back(phase)
        return phase

    async def _mount(self, phase: Phase, seconds: float) -> None:
        loop, server, most = asyncio.get_running_loop(), self._server, Counter(phase.before)
        words = (phase.name, seconds, server.url, server.grpc_target, self._key, MODEL)
        work = loop.run_in_executor(self._attacker, repeat, *words)
        while not work.done():
            await asyncio.wait([work], timeout=0.5)
            most |= Counter(server.memory())
        phase.most, phase.answers = most, await work

    async def _until_back(self, phase: Phase) -> None:
        deadline = time.monotonic() + BACK_SECONDS
        while True:
            phase.after = self._server.memory()
            if not grown(phase.before, phase.after) or time.monotonic() > deadline:
                return
            await asyncio.sleep(1)


async def run_all(
    server: Server, names: Sequence[str], arguments: argparse.Namespace, console: Console
) -> tuple[Seen, list[Phase]]:
    """Run the named controls and attacks. Returns what the neighbour saw alone, and a phase for each of them."""
    async with httpx.AsyncClient(base_url=server.url, headers=ADMIN, timeout=60) as admin:
        attacker_key, neighbour_key = [await make_tenant(admin, name) for name in ("attacker", "neighbour")]
    alone, phases = Seen(), []
    with (
        ProcessPoolExecutor(1, get_context("spawn"), os.nice, (LOWEST_PRIORITY,)) as attacker,
        neighbour_process(server.url, neighbour_key, MODEL) as neighbour,
        Progress(console=console, transient=True) as progress,
    ):
        work = Run(server, attacker, neighbour, attacker_key)
        await work.calm(WARM_UP_SECONDS)
        for name in progress.track(names, description="attacking"):
            alone.add(await work.calm(arguments.calm_seconds))
            phases.append(await work.attack(name, arguments.seconds))
            console.print(f"{name}: {dict(phases[-1].answers.most_common(4))}", markup=False, highlight=False)
    return alone, phases


def attack(arguments: argparse.Namespace, names: Sequence[str], console: Console, scratch: Path) -> None:
    """Start a server, run the named attacks, and print and write what they did. Exits with status 1 if a bound was
    broken."""
    arguments.out.mkdir(parents=True, exist_ok=True)
    starts, grpc_target = command(scratch)
    with launched(starts, arguments.out / "server.log") as process:
        server = Server(process.pid, starts.url, grpc_target)
        alone, phases = asyncio.run(run_all(server, [*CONTROLS, *names], arguments, console))
    controls, attacks = phases[: len(CONTROLS)], phases[len(CONTROLS) :]
    print_wide(table(alone, controls, attacks))
    document: Mapping[str, object] = {"alone": alone, "controls": controls, "phases": attacks}
    (arguments.out / "attack.json").write_bytes(msgspec.json.encode(document))
    calm = [alone, *(control.seen for control in controls)]
    broken = [sentence for phase in phases for sentence in failures(calm, phase)]
    for sentence in broken:
        console.print(f"FAILED {sentence}", style="red", markup=False)
    sys.exit(1 if broken else 0)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.attack", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="mount only attacks with this text in their names")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each attack (default: %(default)s)")
    parser.add_argument("--calm-seconds", type=float, default=5.0, help="before each attack (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("build/attack"), help="folder of figures and the server's log")
    parser.add_argument("--list", action="store_true", help="print the names of all attacks, and end")
    arguments = parser.parse_args()
    names = [name for name in ATTACKS if arguments.only in name]
    if arguments.list:
        print("\n".join(names))
    elif not names:
        parser.error(f"no attack has {arguments.only!r} in its name; --list prints all")
    else:
        run(partial(attack, arguments, names))


if __name__ == "__main__":
    main()
