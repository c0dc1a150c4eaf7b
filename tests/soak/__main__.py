"""`make soak MINUTES=30`: uses a server in every way for a while, and checks that its resource use does not grow.

    python -m tests.soak [--minutes 30] [--round-s 30] [--gateways 1] [--threads 1] [--out build/soak] [--seed 0]

Each round sends chats and batch work in both lanes over HTTP and gRPC. Adapters are loaded, replaced and unloaded while
they are in use; clients disconnect, read slowly, send invalid requests or exceed their limits; administrators read the
admin API. In every other round a hostile tenant mounts the attacks of `make attack` at random, which a neighbour tenant
must not notice. After each round, when no request runs, everything that could grow is read. The trend over rounds is
judged.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, TaskID

from benchmarks.runner import run
from benchmarks.server import launched
from engine.process.files import default_data_dir
from gateway.terminal.output import print_wide
from lab.demo.dense import dense_folder
from tests.attack.server import Server
from tests.soak.attacks import Attacks, attacks_on
from tests.soak.gauges import Gauges, Reading
from tests.soak.house import ADMIN_KEY, House, prepare
from tests.soak.people import busy_round, crowd_of
from tests.soak.report import Run, draw, table
from tests.soak.verdict import Finding, judge, unexpected

WARM_SHARE, WARM_SECONDS = 0.25, 300.0
"""Warm-up, in which caches, pools and allocators fill: this fraction of the run, but at most this many seconds."""
QUIET_SECONDS, SETTLE_SECONDS = 60.0, 1.5
"""Longest wait after a round until all requests have ended, and the pause after that for deferred clean-up."""
SAMPLE_SECONDS = 2.0
ROUNDS = 40
ROUND_SECONDS = (8.0, 30.0)


class Soak:
    """A soak run against a server that is ready."""

    def __init__(
        self, house: House, gauges: Gauges, attacks: Attacks, seconds: float, round_seconds: float, seed: int
    ) -> None:
        self._house, self._gauges, self._attacks, self._seed = house, gauges, attacks, seed
        self.seconds, self._round_seconds = seconds, round_seconds
        self._began = time.monotonic()
        self.outcomes: Counter[str] = Counter()
        self.at_rest: list[tuple[float, Reading]] = []
        self.busy: list[tuple[float, Reading]] = []

    @property
    def age(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self._began

    async def run(self, progress: Progress) -> None:
        """Run rounds until the time is up. Raises RuntimeError if requests still run QUIET_SECONDS after one."""
        bar = progress.add_task("warming up", total=self.seconds)
        watching = asyncio.create_task(self._watch(progress, bar))
        number, crowd = 0, await crowd_of(self._house)
        while self.age < self.seconds:
            number += 1
            work = busy_round(self._house, self._round_seconds, self._seed + number, crowd)
            self.outcomes += await self._attacks.beside(work, attacking=number % 2 == 0)
            await self._rest()
            self.at_rest.append((self.age, await asyncio.to_thread(self._gauges.read)))
        watching.cancel()
        await asyncio.wait([watching])

    async def _rest(self) -> None:
        deadline = time.monotonic() + QUIET_SECONDS
        while True:
            now = await asyncio.to_thread(self._gauges.server)
            if not now["running"] + now["waiting"] + now["kv pages"]:
                break
            if time.monotonic() > deadline:
                raise RuntimeError(f"{QUIET_SECONDS:g} s after all users have gone, there are still {now}")
            await asyncio.sleep(0.2)
        await asyncio.sleep(SETTLE_SECONDS)

    async def _watch(self, progress: Progress, bar: TaskID) -> None:
        while True:
            reading = await asyncio.to_thread(self._gauges.read)
            self.busy.append((self.age, reading))
            memory = ", ".join(
                f"{name[:-8]} {value:,.0f}" for name, value in reading.items() if name.endswith("PSS MiB")
            )
            what = f"{len(self.at_rest)} rounds, {self.outcomes.total():,} acts; MiB: {memory}"
            progress.update(bar, completed=min(self.age, self.seconds), description=what)
            await asyncio.sleep(SAMPLE_SECONDS)


def failures_of(findings: Sequence[Finding], strange: Sequence[str]) -> list[str]:
    grown = [f"{one.what}: {one.at_first:,.1f} to {one.at_last:,.1f}" for one in findings if not one.is_met]
    return [*grown, *strange]


def soak(arguments: argparse.Namespace, console: Console, scratch: Path) -> None:
    """Run the soak test, write its report, and exit: with status 1 if a series fails its check or an act ended
    unexpectedly, else 0. Raises ValueError if the run is too short to judge."""
    seconds = arguments.minutes * 60
    low, high = ROUND_SECONDS
    round_seconds = arguments.round_s or min(max(seconds / ROUNDS, low), high)
    arguments.out.mkdir(parents=True, exist_ok=True)
    model = dense_folder("embedded", arguments.data_dir, console)
    house, command = prepare(scratch, model, gateways=arguments.gateways, threads=arguments.threads)
    log = arguments.out / "server.log"
    with (
        launched(command, log) as process,
        attacks_on(house, arguments.seed) as attacks,
        Progress(console=console) as progress,
    ):
        gauges, server = Gauges(process.pid, house.url, house.data_dir, ADMIN_KEY), Server(process.pid, house.url)
        work, lasting = Soak(house, gauges, attacks, seconds, round_seconds, arguments.seed), server.processes()
        started = datetime.now(UTC).isoformat(timespec="seconds")
        asyncio.run(work.run(progress))
        died = [f"processes ended: {lasting} are {server.processes()} now"] if server.processes() != lasting else []
        kinds = gauges.kinds_of_keys()
        gauges.close()
    warm_from = min(seconds * WARM_SHARE, WARM_SECONDS)
    findings = judge([(at, reading) for at, reading in work.at_rest if at > warm_from])
    failures = [*failures_of(findings, unexpected(work.outcomes)), *died, *attacks.failures()]
    seen = Run(started, arguments.minutes, warm_from, work.at_rest, work.busy, work.outcomes, kinds, findings, failures)
    seen.write(arguments.out)
    draw(seen, arguments.out / "soak.png")
    print_wide(table(findings))
    for failure in failures:
        console.print(f"FAILED {failure}", style="red", markup=False)
    console.print(f"{work.outcomes.total():,} acts; readings and picture are in {arguments.out}")
    sys.exit(1 if failures else 0)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--round-s", type=float, help="seconds of a round; default: a fortieth of the run, 8 to 30")
    parser.add_argument("--gateways", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1, help="of the engine; more than are free make it crawl")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("build/soak"), help="folder of what is written")
    parser.add_argument("--data-dir", type=Path, default=default_data_dir(os.environ))
    run(partial(soak, parser.parse_args()))


if __name__ == "__main__":
    main()
