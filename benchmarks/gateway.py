"""`make bench-gateway`: overhead of a gateway per request and per token, compared with LiteLLM's proxy in one run.

    python -m benchmarks.gateway [--litellm-python PATH] [--cores 0,1,2,3] [--rounds 3] [--seconds 5] [--json FILE]

It runs one gateway process on one core, with authentication and limits in a Valkey, over an engine that takes no time,
and LiteLLM's proxy with one worker on the same core, without authentication and limits, over an upstream that takes no
time. Engine or upstream, Valkey and client have a core each where there are four. The two servers take turns, round
after round. A turn measures the latency of one request at a time, without and with the gateway, for half of --seconds
each, then many short requests and many streams for --seconds each.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import astuple, dataclass, fields
from functools import partial
from statistics import median
from typing import Any

import httpx
import msgspec
from rich.table import Table

from benchmarks.gateway_peers import Cores, Station, engine, engine_latencies, litellm, loralane, upstream
from benchmarks.hammer import NUMBER, Shot, shot, strike
from benchmarks.peers import MODEL
from benchmarks.runner import DATA_DIR, JSON, Run, benchmark, option, python_option, stamp, table
from benchmarks.server import pinned
from gateway.serve.process import run_loop
from lab.demo.dense import dense_folder

MESSAGES = [{"role": "user", "content": f"What is the capital of France, and what is it known for? {NUMBER}"}]
"""The prompt. NUMBER makes each request different, because a gateway may cache what it has seen."""
PROMPT_TOKENS = 53
"""Length of the prompt in SmolLM2 tokens, chat template included."""
ANSWER_TOKENS, CONCURRENT = 16, 64
"""Tokens of each answer that is not streamed, and the number of such requests in flight."""
STREAM_TOKENS, STREAMS = 256, 32
PAUSE_SECONDS = 0.5
"""Pause in which the server cleans up abandoned streams."""


@dataclass(frozen=True, slots=True)
class Figures:
    """Measurements of one server, in one round or as the medians of several."""

    requests_per_second: float
    tokens_per_second: float
    whole_ms: float
    """Median latency with one request at a time."""
    added_ms: float
    """`whole_ms` minus the latency of asking the engine or upstream directly."""
    memory_mib: float


ROWS: Mapping[str, tuple[str, str, str]] = {
    "requests_per_second": ("requests/s", f"{CONCURRENT} at once, {ANSWER_TOKENS} tokens each", ">= 10x"),
    "tokens_per_second": ("relayed tokens/s", f"{STREAMS} streams of {STREAM_TOKENS} tokens", ">= 25x"),
    "whole_ms": ("p50 (ms)", f"one at a time, {ANSWER_TOKENS} tokens", ""),
    "added_ms": ("added p50 (ms)", "less that of engine or upstream alone", "<= 0.1x"),
    "memory_mib": ("memory (MiB)", "resident, gateway process", ""),
}


def body(tokens: int, *, stream: bool) -> dict[str, Any]:
    return {"model": MODEL, "messages": MESSAGES, "max_tokens": tokens, "stream": stream}


def measure(station: Station, direct_ms: float, seconds: float, silent_events: int) -> Figures:
    """Measure one server in one round: latency for half of `seconds`, then many requests and many streams for `seconds`
    each. `direct_ms` is the latency of the engine or upstream without a gateway, and `silent_events` the number of
    events of a stream that carry no token."""
    short = shot(station.url, body(ANSWER_TOKENS, stream=False), station.key)
    long = shot(station.url, body(STREAM_TOKENS, stream=True), station.key)
    alone_ms = latency_ms(short, seconds)
    many = strike(short, CONCURRENT, seconds=seconds)
    streams = strike(long, STREAMS, seconds=seconds, silent_events=silent_events)
    time.sleep(PAUSE_SECONDS)
    speeds = many.requests_per_second, streams.events_per_second
    return Figures(*speeds, alone_ms, alone_ms - direct_ms, station.memory_mib)


def latency_ms(target: Shot, seconds: float) -> float:
    """Return the median latency in milliseconds with one request at a time, measured for half of `seconds`."""
    return median(strike(target, 1, seconds=seconds / 2).latencies) * 1000


def silent_events(station: Station) -> int:
    """Stream one answer and return how many of its events carry no token, `[DONE]` included. Raises RuntimeError if
    there is not one event per token."""
    headers = {"authorization": f"Bearer {station.key}"} if station.key else {}
    url = f"{station.url}/v1/chat/completions"
    answer = httpx.post(url, json=body(STREAM_TOKENS, stream=True), headers=headers, timeout=60).raise_for_status()
    events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    told = [msgspec.json.decode(event) for event in events if event != "[DONE]"]
    tokens = sum(bool(chunk["choices"] and chunk["choices"][0]["delta"].get("content")) for chunk in told)
    if tokens != STREAM_TOKENS:
        raise RuntimeError(f"{station.name} sent {tokens} events with text for {STREAM_TOKENS} tokens")
    return len(events) - tokens


def rounds(
    stations: Sequence[tuple[Station, Callable[[], float]]], count: int, seconds: float
) -> dict[str, list[Figures]]:
    """Measure all gateways in turn, `count` rounds, each with measurements of `seconds` as `measure` takes them. Each
    station comes with a function that returns the latency of its engine or upstream alone, in milliseconds. Returns the
    figures of each round by station name."""
    silent = {station.name: silent_events(station) for station, _ in stations}
    found: dict[str, list[Figures]] = {station.name: [] for station, _ in stations}
    for _ in range(count):
        for station, direct_ms in stations:
            found[station.name].append(measure(station, direct_ms(), seconds, silent[station.name]))
    return found


def engine_ms(address: str, seconds: float) -> float:
    return median(run_loop(engine_latencies(address, PROMPT_TOKENS, ANSWER_TOKENS, seconds / 2))) * 1000


def medians(figures: Sequence[Figures]) -> Figures:
    return Figures(*(median(getattr(each, field.name) for each in figures) for field in fields(Figures)))


def compared(outcomes: Mapping[str, Figures]) -> Table:
    rows, others = [], len(outcomes) > 1
    for name, (label, terms, goal) in ROWS.items():
        values = [getattr(figures, name) for figures in outcomes.values()]
        ratio = (f"{values[0] / values[1]:.2f}x", goal) if others else ()
        rows.append((label, terms, *(f"{value:,.2f}" if value < 100 else f"{value:,.0f}" for value in values), *ratio))
    columns = ["", "", *outcomes, *(["ratio", "goal"] if others else [])]
    return table("One gateway process on one core", " | ".join(columns), rows)


def _cores(text: str) -> Cores:
    cores, usable = Cores(*map(int, text.split(","))), os.sched_getaffinity(0)
    if not usable.issuperset(astuple(cores)):
        raise argparse.ArgumentTypeError(f"this process may use the cores {', '.join(map(str, sorted(usable)))}")
    return cores


def _first_cores() -> str:
    """Return four cores that this process may use. Where there are fewer, processes share the last one."""
    usable = sorted(os.sched_getaffinity(0))
    return ",".join(str(usable[min(place, len(usable) - 1)]) for place in range(4))


@benchmark(
    python_option("--litellm-python", "LORALANE_LITELLM_PYTHON"),
    option("--cores", _first_cores(), "of gateway, engine or upstream, Valkey and client", type=_cores),
    option("--rounds", 3),
    option("--seconds", 5.0, "of one measurement"),
    JSON,
    DATA_DIR,
)
def bench(run: Run) -> None:
    options, scratch = run.options, run.scratch
    model = dense_folder("embedded", options.data_dir, run.console)
    cores: Cores = options.cores
    run.tell_of_missing_peer("LiteLLM")
    with ExitStack() as stack:
        address = stack.enter_context(engine(model, scratch, cores))
        ours = stack.enter_context(loralane(model, scratch, cores))
        stations = [(ours, partial(engine_ms, address, options.seconds))]
        if options.litellm_python:
            url = stack.enter_context(upstream(scratch, cores))
            theirs = stack.enter_context(litellm(options.litellm_python, url, scratch, cores))
            direct = shot(url, body(ANSWER_TOKENS, stream=False))
            stations.append((theirs, partial(latency_ms, direct, options.seconds)))
        stack.enter_context(pinned(frozenset((cores.client,))))
        found = rounds(stations, options.rounds, options.seconds)
    document = {**stamp(), "cores": cores, "seconds": options.seconds, "rounds": found}
    run.show(compared({name: medians(figures) for name, figures in found.items()}), document)


if __name__ == "__main__":
    bench.main()
