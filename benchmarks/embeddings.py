"""`make bench-embeddings`: latencies of chats beside texts to embed.

    python -m benchmarks.embeddings [--lane batch] [--rounds 3] [--cores 0,1] [--json FILE]

In each round, the same chats arrive three times: alone, beside texts to embed, and beside prompts of the same lengths
whose answers have one token. Texts and prompts are sent without a pause, CLIENTS requests of TEXTS of them at a time,
so that the engine always has some. The difference between the last two is what a vector costs a chat beyond a prompt.
"""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from rich.table import Table

from benchmarks.peers import MODEL, loralane
from benchmarks.runner import CORES, DATA_DIR, JSON, Run, benchmark, option, stamp, table
from benchmarks.server import pinned, running
from gateway.serve.process import run_loop
from lab.bench.client import LANE_FIELDS, Target
from lab.bench.drive import drive
from lab.bench.measure import LaneResults, report
from lab.bench.plan import Plan
from lab.bench.run import warm_up
from lab.bench.spec import LaneSpec, Lengths
from lab.bench.stream import Stream
from lab.demo.dense import dense_folder

CHATS = "interactive"
CLIENTS, TEXTS = 4, 4
LENGTHS = Lengths(64, 256)
"""Tokens of each text or prompt."""
HEAD_START = 1.0
"""Seconds that texts or prompts are sent before the first chat."""
ROUTES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "texts": ("/v1/embeddings", {}),
    "prompts": ("/v1/completions", {"max_tokens": 1, "ignore_eos": True}),
}
"""Path and further fields of the requests beside the chats, by what they consist of."""
FIGURES = (
    ("TTFT p50", "ttft", "p50"),
    ("TTFT p99", "ttft", "p99"),
    ("ITL p50", "itl", "p50"),
    ("ITL p99", "itl", "p99"),
)
"""Rows of the table: label, latency and percentile."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The chats of one round under one condition, and the tokens a second of the texts or prompts beside them."""

    chats: LaneResults
    tokens_per_second: float = 0.0


class SideTraffic:
    """Sends texts or prompts to the server while it is `running`, and counts the tokens of those that were answered.
    Each is different, so that no cache helps."""

    def __init__(self, target: Target, kind: str, lane: str, seed: int) -> None:
        path, self._fields = ROUTES[kind]
        self._field = "input" if kind == "texts" else "prompt"
        self._url, self._lane = target.base + path, LANE_FIELDS.get(lane, {})
        self._headers, self._random = target.headers, random.Random(seed)
        self.tokens = 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with httpx.AsyncClient(headers=self._headers, timeout=600) as client:
            senders = [asyncio.create_task(self._send_forever(client)) for _ in range(CLIENTS)]
            try:
                yield
            finally:
                for sender in senders:
                    sender.cancel()
                ends = await asyncio.gather(*senders, return_exceptions=True)
        for failure in ends:
            if not isinstance(failure, asyncio.CancelledError):
                raise RuntimeError(f"a request beside the chats failed: {failure}")

    async def _send_forever(self, client: httpx.AsyncClient) -> None:
        while True:
            texts = [self._text() for _ in range(TEXTS)]
            body = {"model": MODEL, self._field: texts, **self._fields, **self._lane}
            answer = await client.post(self._url, json=body)
            answer.raise_for_status()
            self.tokens += sum(map(len, texts))

    def _text(self) -> list[int]:
        return [self._random.randrange(1000, 30_000) for _ in range(LENGTHS.draw(self._random))]


async def measure(target: Target, plan: Plan, beside: SideTraffic | None) -> Measured:
    """Send the chats of `plan`, alone or beside other traffic. Raises RuntimeError if any request fails."""
    if beside is None:
        return Measured(_chats(await drive(target, plan.items())))
    async with beside.running():
        await asyncio.sleep(HEAD_START)
        loop, before = asyncio.get_running_loop(), beside.tokens
        began = loop.time()
        chats = _chats(await drive(target, plan.items()))
        return Measured(chats, (beside.tokens - before) / (loop.time() - began))


def _chats(streams: Sequence[Stream]) -> LaneResults:
    results = report(CHATS, streams)
    if results.errors:
        raise RuntimeError(f"chats failed: {results.errors}")
    return results


def rounds(run: Run, target: Target) -> dict[str, list[Measured]]:
    """Return the measurements of each round by condition: alone, and beside each kind of ROUTES."""
    arguments = run.options
    chats = LaneSpec(CHATS, arguments.chats, arguments.rate, inputs=Lengths(24, 96), outputs=Lengths(48, 48))
    found: dict[str, list[Measured]] = {kind: [] for kind in ("alone", *ROUTES)}
    warm = Plan((MODEL,), (chats,)).warmup(arguments.warmup)
    run_loop(warm_up(target, warm, 600))
    turns = [(number, kind) for number in range(arguments.rounds) for kind in found]
    for turn, (number, kind) in enumerate(run.track(turns)):
        plan = Plan((MODEL,), (chats,), seed=number, prompts=turn)
        beside = None if kind == "alone" else SideTraffic(target, kind, arguments.lane, turn)
        found[kind].append(run_loop(measure(target, plan, beside)))
    return found


def compared(found: Mapping[str, Sequence[Measured]], lane: str) -> Table:
    rows = []
    for label, latency, percentile in FIGURES:
        values = [_latency(each, latency, percentile) for each in found.values()]
        rows.append((label, *(f"{value * 1000:.1f}" for value in values), _ratio(values[1], values[2])))
    texts, prompts = (statistics.median(one.tokens_per_second for one in found[kind]) for kind in ROUTES)
    rows.append(("tokens/s beside", "", f"{texts:,.0f}", f"{prompts:,.0f}", _ratio(texts, prompts)))
    columns, caption = "| alone | beside texts | beside prompts | texts / prompts", "medians of the rounds; ms"
    return table(f"Chats beside texts to embed in the {lane} lane", columns, rows, caption=caption)


def _ratio(texts: float, prompts: float) -> str:
    """Return the ratio of two figures as text. It is empty if the engine was too busy to answer any prompts."""
    return f"{texts / prompts:.2f}x" if prompts else ""


def _latency(each: Sequence[Measured], latency: str, percentile: str) -> float:
    """Return the median over the rounds of one percentile of a latency, in seconds."""
    return statistics.median(getattr(getattr(one.chats, latency), percentile) for one in each)


@benchmark(
    CORES,
    option("--lane", "batch", "of texts and prompts", choices=sorted(LANE_FIELDS)),
    option("--rounds", 3),
    option("--chats", 24, "in each round, under each condition"),
    option("--rate", 0.7, "of chats, a second"),
    option("--warmup", 16, "chats sent before"),
    JSON,
    DATA_DIR,
)
def bench(run: Run) -> None:
    cores, lane = run.options.cores, run.options.lane
    peer = loralane(dense_folder("embedded", run.options.data_dir, run.console), run.scratch, cores, {})
    with pinned(run.client_cores), running(peer.command, run.scratch / "loralane.log") as url:
        found = rounds(run, Target(url, peer.key))
    run.show(compared(found, lane), {**stamp(), "cores": sorted(cores), "lane": lane, "rounds": found})


if __name__ == "__main__":
    bench.main()
