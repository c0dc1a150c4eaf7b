"""`make bench-batches`: how many lines of a batch one gateway process runs per second.

    python -m benchmarks.batches [--lines 20000] [--tokens 16] [--cores 0,1,2,3] [--rounds 3]

It runs one gateway process on one core, with limits and batches in a Valkey and files in a folder, over an engine that
takes no time. The engine, Valkey and client have a core each.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from statistics import median

import httpx
import msgspec

from benchmarks.gateway import MESSAGES
from benchmarks.gateway_peers import Cores, Station, loralane
from benchmarks.hammer import numbered
from benchmarks.peers import MODEL
from benchmarks.runner import DATA_DIR, Run, benchmark, option
from benchmarks.server import pinned
from lab.demo.dense import dense_folder

ENDPOINT = "/v1/chat/completions"
POLL_SECONDS = 0.1
FIRST, LAST = 0.1, 0.9
"""Fractions of the lines between which time is measured, to exclude the work before and after dispatching."""


def requests(lines: int, tokens: int) -> bytes:
    """Return a batch input file of `lines` different chats, whose answers have `tokens` tokens."""
    body = {"model": MODEL, "messages": MESSAGES, "max_tokens": tokens}
    texts = ({"custom_id": f"{number}", "method": "POST", "url": ENDPOINT, "body": body} for number in range(lines))
    return b"\n".join(numbered(msgspec.json.encode(text)) for text in texts)


def lines_per_second(client: httpx.Client, text: bytes, lines: int) -> float:
    """Run one batch; returns the lines completed per second, measured from a tenth to nine tenths of its lines. Raises
    RuntimeError if the batch does not complete or one of its lines fails."""
    file = client.post("/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", text)}).raise_for_status()
    wish = {"input_file_id": file.json()["id"], "endpoint": ENDPOINT, "completion_window": "1h"}
    batch = client.post("/v1/batches", json=wish).raise_for_status().json()
    seen: list[tuple[float, int]] = []
    while batch["status"] in ("validating", "in_progress", "finalizing"):
        time.sleep(POLL_SECONDS)
        batch = client.get(f"/v1/batches/{batch['id']}").raise_for_status().json()
        seen.append((time.perf_counter(), batch["request_counts"]["completed"]))
    if batch["status"] != "completed" or batch["request_counts"]["completed"] != lines:
        raise RuntimeError(f"the batch is {batch['status']} with {batch['request_counts']}")
    measured = [(when, done) for when, done in seen if FIRST * lines <= done <= LAST * lines]
    (began, before), (ended, after) = measured[0], measured[-1]
    return (after - before) / (ended - began)


def measure(station: Station, lines: int, tokens: int, rounds: int) -> list[float]:
    headers = {"authorization": f"Bearer {station.key}"}
    with httpx.Client(base_url=station.url, headers=headers, timeout=60) as client:
        return [lines_per_second(client, requests(lines, tokens), lines) for _ in range(rounds)]


def _cores(text: str) -> Cores:
    return Cores(*map(int, text.split(",")))


@benchmark(
    option("--lines", 20_000),
    option("--tokens", 16, "of each answer"),
    option("--cores", "0,1,2,3", "gateway, engine, Valkey, client", type=_cores),
    option("--rounds", 3),
    DATA_DIR,
)
def bench(run: Run) -> None:
    options = run.options
    model = dense_folder("embedded", options.data_dir, run.console)
    with ExitStack() as stack:
        station = stack.enter_context(loralane(model, run.scratch, options.cores))
        stack.enter_context(pinned(frozenset((options.cores.client,))))
        found = measure(station, options.lines, options.tokens, options.rounds)
        memory = station.memory_mib
    told = ", ".join(f"{each:,.0f}" for each in found)
    run.console.print(f"lines/s of one gateway process: {median(found):,.0f} ({told}); {memory:,.0f} MiB at the end")


if __name__ == "__main__":
    bench.main()
