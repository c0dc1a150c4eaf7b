"""`make bench-many-adapters`: thousands of adapters of different ranks behind one engine.

    python -m benchmarks.many_adapters [--adapters 2000] [--repeat 7] [--cores 0,1] [--keep FOLDER] [--json FILE]

Adapters have ranks of 4 to 64, with a probability proportional to 1/rank, on all seven projections. One run measures:

    throughput   requests over all adapters (Zipf, s = 1) against the same requests for one adapter, scheduled FCFS
    memory       whether host memory stays within its bound
    listing      how long listing all adapters takes under load
    waiting      whether requests for adapters on the device wait while other adapters are read from disk
    cold         time to first token with an adapter in host memory against one on the device
    twice        TTFT with twice as many adapters as the device holds, against a device that holds them all
"""

from __future__ import annotations

import argparse
import hashlib
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from benchmarks.peers import PATIENT, loralane
from benchmarks.runner import CORES, DATA_DIR, JSON, Figure, Run, benchmark, figures_table, option
from benchmarks.server import pinned, running
from benchmarks.workload import answered, requests
from lab.bench.client import Target
from lab.bench.measure import report
from lab.bench.plan import BenchRequest
from lab.bench.stream import Stream
from lab.demo.dense import dense_folder
from lab.random_adapters import write_adapters
from lab.traffic.synthetic import Zipf

RANKS = (4, 8, 16, 32, 64)
ADMIN_KEY = "sk-bench-admin"
CONCURRENCY = 32
LISTINGS, LISTING_EVERY_S = 20, 0.5
FEW, GAP_S = 16, 0.35
BESIDE = 64
PAIRS = 24
"""Number of adapters that are measured cold and warm."""


@dataclass(frozen=True, slots=True)
class Server:
    """A running loralane server, as the `target` of requests, and a client of its admin API."""

    target: Target
    admins: httpx.Client

    def admin(self, path: str) -> Any:
        return self.admins.get(path).raise_for_status().json()

    def adapters(self) -> dict[str, dict[str, Any]]:
        return {adapter["name"]: adapter for adapter in self.admin("/admin/v1/adapters")["adapters"]}

    def metric(self, name: str) -> float:
        lines = self.admins.get("/metrics").text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))

    def run(self, items: Sequence[BenchRequest], concurrency: int | None = CONCURRENCY) -> list[Stream]:
        """Send requests, at most `concurrency` at once (None: each at its time). Raises RuntimeError if one fails."""
        return answered(self.target, items, concurrency)


def draw_ranks(count: int, seed: int) -> list[int]:
    """Draw `count` ranks with a probability proportional to 1/rank: 4 half of the time, 64 one time in thirty."""
    return random.Random(seed).choices(RANKS, [1 / rank for rank in RANKS], k=count)


def spread(items: Sequence[BenchRequest], names: Sequence[str], seed: int) -> list[BenchRequest]:
    """Return the same requests, each for an adapter drawn from `names` by Zipf's law."""
    zipf = Zipf(len(names), 1.0, random.Random(seed))
    return [replace(item, model=names[zipf()]) for item in items]


def one_against_all(
    server: Server, folders: Mapping[str, Path], ranks: Sequence[int], arguments: argparse.Namespace
) -> list[Figure]:
    """Measure requests for one adapter and for all adapters in turn, `arguments.repeat` times, each time with newly
    drawn adapters; also reads from disk meanwhile, host memory in use, and listing under load. The speed of a shared
    machine varies by a tenth from minute to minute, so many short turns are more accurate than a few long ones."""
    names = list(folders)
    items = requests(names[:1], arguments.requests)
    one = [replace(item, model=names[ranks.index(8)]) for item in items]
    server.run(spread(requests(names[:1], arguments.requests, seed=1), names, seed=1))
    fetches = server.metric("loralane_adapter_fetches_total")
    alone, mixed, asked = [], [], []
    for seed in range(2, 2 + arguments.repeat):
        drawn = spread(items, names, seed)
        warm_page_cache(folders[item.model] for item in drawn)
        alone.append(report("one", server.run(one)).output_tokens_per_second)
        mixed.append(report("all", server.run(drawn)).output_tokens_per_second)
        asked.append(len({item.model for item in drawn}))
    fetches = (server.metric("loralane_adapter_fetches_total") - fetches) / arguments.repeat
    ratios = [rate / of for rate, of in zip(mixed, alone, strict=True)]
    ratio = statistics.median(ratios)
    used, total = (server.metric(f"loralane_adapter_host_{which}_bytes") for which in ("used", "total"))
    return [
        Figure("tokens/s, one adapter of rank 8", statistics.median(alone)),
        Figure(f"tokens/s, {statistics.median(asked):.0f} adapters asked for", statistics.median(mixed)),
        Figure(f"of one adapter's ({min(ratios):.2f} to {max(ratios):.2f})", ratio, ">= 0.9", ratio >= 0.9),
        Figure("adapters read from disk meanwhile", fetches),
        Figure("host memory used / bound", used / total, "<= 1", used <= total),
        listing_under_load(server, drawn),
    ]


def warm_page_cache(folders: Iterable[Path]) -> None:
    """Read the adapters' files so that the page cache has them: 13 GB of adapters may not stay in memory, and the
    disk's speed is not to be measured."""
    for folder in set(folders):
        for file in folder.iterdir():
            file.read_bytes()


def listing_under_load(server: Server, items: Sequence[BenchRequest]) -> Figure:
    """Measure how long listing all adapters takes while `items` run. It is separate because it lowers throughput."""
    with ThreadPoolExecutor(1) as pool:
        listing = pool.submit(listing_seconds, server)
        server.run(items)
        typical = listing.result()
    return Figure("list of all adapters under load, p50 (ms)", typical * 1e3, "<= 50", typical <= 0.05)


def beside_loads(server: Server, folders: Mapping[str, Path]) -> list[Figure]:
    """Measure requests for adapters on the device, first beside more such requests, then beside loads from disk.
    Returns no figures if all adapters fit in host memory."""
    warm = list(folders)[:CONCURRENCY]
    server.run(requests(warm, len(warm), seed=4))
    on_disk = [name for name, adapter in server.adapters().items() if adapter["tier"] == "disk"][:BESIDE]
    if not on_disk:
        return []  # all adapters fit in host memory
    warm_page_cache(folders[name] for name in on_disk)
    own = at_times(requests(warm, BESIDE, seed=5), 0.0)
    calm, busy = (
        server.run(sorted(own + at_times(requests(others, BESIDE, seed=6), GAP_S / 2), key=lambda item: item.at), None)
        for others in (warm, on_disk)
    )
    before, after, read = (
        report("", [stream for stream in streams if (stream.item in own) is is_own])
        for streams, is_own in ((calm, True), (busy, True), (busy, False))
    )
    if not (before.ttft and before.itl and after.ttft and after.itl and read.ttft):
        raise RuntimeError("no request had two tokens")
    ttft, itl = after.ttft.p50 / before.ttft.p50, after.itl.p99 / before.itl.p99
    return [
        Figure("TTFT p50 beside requests whose adapter is there (ms)", before.ttft.p50 * 1e3),
        Figure("TTFT p50 of requests whose adapter is read from disk (ms)", read.ttft.p50 * 1e3),
        Figure("TTFT p50 beside those / beside the others", ttft, "<= 1.2", ttft <= 1.2),
        Figure("ITL p99, the same", itl, "<= 1.5", itl <= 1.5),
    ]


def at_times(items: Sequence[BenchRequest], start: float) -> list[BenchRequest]:
    """Return the requests cut to 16 output tokens, one every GAP_S seconds from `start`, so that they do not queue."""
    return [replace(item, at=start + index * GAP_S, max_tokens=16) for index, item in enumerate(items)]


def listing_seconds(server: Server) -> float:
    """Return the median seconds to receive the list of all adapters, a megabyte of JSON, without parsing it."""
    took = []
    for _ in range(LISTINGS):
        began = time.perf_counter()
        answer = server.admins.get("/admin/v1/adapters")
        took.append(time.perf_counter() - began)
        answer.raise_for_status()
        time.sleep(LISTING_EVERY_S)
    return statistics.median(took)


def cold_against_warm(server: Server) -> list[Figure]:
    """Measure the first token for some adapters in host memory, one request at a time: for each adapter one cold, then
    three warm. Returns no figures if all adapters fit on the device."""
    host = [name for name, adapter in server.adapters().items() if adapter["tier"] == "host"][:PAIRS]
    if not host:
        return []  # all adapters fit on the device
    cold, warm = [], []
    for name in host:
        cold.append(first_token(server, name))
        warm.append(statistics.median(first_token(server, name) for _ in range(3)))
    adapters = server.adapters()
    copies = [adapters[name]["last_load_seconds"] for name in host]
    extra = statistics.median(c - w for c, w in zip(cold, warm, strict=True))
    limit = max(0.010, 1.2 * statistics.median(copies))
    return [
        Figure("first token, warm (ms)", statistics.median(warm) * 1e3),
        Figure("copy to the device (ms)", statistics.median(copies) * 1e3),
        Figure("first token from host memory - warm (ms)", extra * 1e3, f"<= {limit * 1e3:.0f}", extra <= limit),
    ]


def first_token(server: Server, model: str) -> float:
    rng = random.Random(time.perf_counter_ns())
    item = BenchRequest(model, tuple(rng.randrange(1000, 40_000) for _ in range(64)), 4)
    (stream,) = server.run([item])
    return stream.times[0] - stream.sent


def twice_what_fits(
    start: Callable[[int], AbstractContextManager[Server]], names: Sequence[str], count: int
) -> list[Figure]:
    items, medians = requests(names, count // 2, seed=3), []
    random.Random(3).shuffle(items)
    items = at_times(items, 0.0)
    for slots in (len(names), len(names) // 2):
        with start(slots) as server:
            server.run([replace(item, at=0.0) for item in items[: len(names)]])
            streams = server.run(items, concurrency=None)
            medians.append(statistics.median(stream.times[0] - stream.sent for stream in streams))
    ratio = medians[1] / medians[0]
    return [Figure(f"median TTFT, {len(names)} adapters with room for half / all", ratio, "<= 2", ratio <= 2)]


@contextmanager
def serve(
    arguments: argparse.Namespace,
    model: Path,
    scratch: Path,
    folders: Mapping[str, Path],
    *,
    lanes: Mapping[str, Any] | None = None,
    **engine: Any,
) -> Iterator[Server]:
    """Run a loralane server with these adapters until the block ends. `lanes` is the section of the configuration,
    None for the usual goals of latency; `engine` adds engine settings."""
    place = Path(tempfile.mkdtemp(dir=scratch))
    preload = {name: str(path) for name, path in folders.items()}
    admin = {"keys": [f"sha256:{hashlib.sha256(ADMIN_KEY.encode()).hexdigest()}"]}
    extra = {"adapters": {"preload": preload}, "engine": engine, "admin": admin, "lanes": lanes or {}}
    peer = loralane(model, place, arguments.cores, extra)
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    with running(peer.command, place / "log") as url, httpx.Client(base_url=url, headers=headers, timeout=60) as admins:
        yield Server(Target(url, peer.key), admins)


@benchmark(
    CORES,
    option("--adapters", 2000),
    option("--requests", 128),
    option("--repeat", 7, "times one adapter and all are run in turn"),
    option("--host-gb", 2.0, "host memory for packed adapters"),
    option("--keep", Path, "write the adapters here (13 GB for 2,000) and keep them"),
    JSON,
    DATA_DIR,
)
def bench(run: Run) -> None:
    options, scratch = run.options, run.scratch
    model = dense_folder("embedded", options.data_dir, run.console)
    ranks = draw_ranks(options.adapters, seed=0)
    with run.progress() as progress:
        task = progress.add_task("writing adapters", total=len(ranks))
        place = options.keep or scratch / "adapters"
        folders = write_adapters(model, place, ranks, on_written=lambda: progress.advance(task))
    few = write_adapters(model, scratch / "few", [8] * FEW, seed=1)
    start = partial(serve, options, model, scratch)
    figures: list[Figure] = []
    with run.console.status(f"starting with {len(folders)} adapters") as status, pinned(run.client_cores):
        began = time.perf_counter()
        with start(folders, host_adapter_gb=options.host_gb, lanes=PATIENT) as server:
            figures.append(Figure("ready after (s)", time.perf_counter() - began))
            status.update("one adapter against all")
            figures += one_against_all(server, folders, ranks, options)
        status.update("the same with the usual goals of latency")
        with start(folders, host_adapter_gb=options.host_gb) as server:
            status.update("beside loads")
            figures += beside_loads(server, folders)
            status.update("cold against warm")
            figures += cold_against_warm(server)
        status.update("twice what fits")
        figures += twice_what_fits(lambda slots: start(few, max_resident_adapters=slots), list(few), options.requests)
    run.show(figures_table("Many adapters", figures), figures)


if __name__ == "__main__":
    bench.main()
