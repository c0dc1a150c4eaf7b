"""`make bench-clients`: `loralane bench serve` beside `vllm bench serve`, against one running gateway.

    python -m benchmarks.clients --vllm-python PATH [--cores 0,1] [--pairs 3] [--requests 30] [--rate 1.5] [--json FILE]

Both clients send the same chats, at nearly regular times, to the same server, in pairs whose order alternates. A ratio
is the median of those of the pairs; beside it stand the lowest and the highest. The spread is the largest run of a
client over its smallest: two clients that differ by less agree.

The gateway sends an answer's role as soon as the engine has taken the request. vLLM's client takes this event for the
first token, and a gap for each event, even of those that arrive together. So the figures below `from events` are
computed from the times of events that both clients write, alike: the role is no token, and what arrives together is one
arrival. `TTFT` and `TPOT` above them are as reported. Runs before the first pair, which count for nothing, let the
server learn how long its steps take.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.table import Table

from benchmarks.peers import MODEL, loralane
from benchmarks.runner import (
    CORES,
    DATA_DIR,
    JSON,
    VLLM,
    PeerError,
    Ratio,
    Run,
    benchmark,
    in_turn,
    option,
    stamp,
    table,
)
from benchmarks.server import KEY, running
from lab.bench.dataset import OWN_TEXTS, plain_text
from lab.bench.plan import Plan
from lab.bench.spec import parse_lane
from lab.demo.dense import dense_folder

VLLM_CLIENT = """
import argparse
from vllm.benchmarks.serve import add_cli_args, main
parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
"""`vllm bench serve` without vLLM's command line, which does not start from the CPU wheel."""
CV = 0.05
"""Coefficient of variation of the gaps between arrivals."""
TOGETHER_S = 1e-4
"""Seconds below which two events are taken to have arrived together."""
WARMUP = 4
WARM_RUNS = 2
LABELS = {
    "request_throughput": "requests/s",
    "output_throughput": "output tokens/s",
    "total_token_throughput": "tokens/s of prompts and answers",
    "mean_ttft_ms": "TTFT mean, ms",
    "mean_tpot_ms": "TPOT mean, ms",
    **{
        f"{statistic}_{name}_ms": f"{label} {statistic}, ms, from events"
        for name, label in (
            ("first", "first token"),
            ("each", "time per token"),
            ("gap", "gap"),
            ("last", "last token"),
        )
        for statistic in ("mean", "p50", "p99")
    },
}
"""Field of a result -> its name in the table."""
Result = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Job:
    """The work of both clients: they send the chats of a file to a server, `rate` a second."""

    url: str
    chats: Path
    requests: int
    rate: float
    out: Path
    """File that the result is written to, and read from again."""


def ours(job: Job) -> Result:
    """Run `loralane bench serve`, and return its result in vLLM's form. Raises RuntimeError if it fails."""
    lane = f"default:n={job.requests},rate={job.rate},cv={CV}"
    words = [sys.executable, "-m", "gateway", "bench", "serve", "--url", job.url, "--key", KEY, "--models", MODEL]
    words += ["--endpoint", "chat", "--dataset", str(job.chats), "--lanes", lane, "--warmup", str(WARMUP)]
    return from_events(_result([*words, "--vllm-json", str(job.out)], {}, job.out), has_role=False)


def vllm(python: Path, tokenizer: Path, job: Job) -> Result:
    """Run vLLM's client, and return its result. Raises RuntimeError if it fails."""
    words = [str(python), "-c", VLLM_CLIENT, "--backend", "openai-chat", "--base-url", job.url]
    words += ["--endpoint", "/v1/chat/completions", "--model", MODEL, "--tokenizer", str(tokenizer)]
    words += ["--dataset-name", "custom", "--dataset-path", str(job.chats), "--custom-output-len", "-1"]
    words += [
        "--skip-chat-template",
        "--disable-shuffle",
        "--num-prompts",
        str(job.requests),
        "--num-warmups",
        str(WARMUP),
    ]
    words += ["--request-rate", str(job.rate), "--burstiness", str(CV**-2), "--ignore-eos", "--temperature", "0"]
    words += ["--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,90,95,99"]
    words += ["--save-result", "--save-detailed", "--result-dir", str(job.out.parent)]
    env = {"OPENAI_API_KEY": KEY, "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
    return from_events(_result([*words, "--result-filename", job.out.name], env, job.out), has_role=True)


def _result(words: Sequence[str], env: Mapping[str, str], out: Path) -> Result:
    done = subprocess.run(words, env={**os.environ, **env}, capture_output=True, text=True)
    if done.returncode or not out.exists():
        raise RuntimeError(f"{words[0]} failed with status {done.returncode}:\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(out.read_text())
    if found["failed"] or found["completed"] == 0:
        raise RuntimeError(f"{words[0]}: {found['failed']} requests failed")
    return found


def from_events(found: Result, *, has_role: bool) -> Result:
    """Return a result with latencies computed from the times of events, in milliseconds: of the first and the last
    token, of each token after the first, and of the gaps between arrivals. `has_role` says that the first event of each
    answer is its role."""
    firsts, each, gaps = [], [], []
    for first, own, last, tokens in zip(
        found["ttfts"], found["itls"], found["latencies"], found["output_lens"], strict=True
    ):
        until = first + own[0] if has_role and own else first
        firsts.append(until)
        gaps += [gap for gap in own[has_role:] if gap >= TOGETHER_S]
        each += [(last - until) / (tokens - 1)] if tokens > 1 else []
    samples = {"first": firsts, "each": each, "gap": gaps, "last": found["latencies"]}
    return {**found, **{name: value for key, values in samples.items() for name, value in _in_ms(key, values)}}


def _in_ms(key: str, seconds: Sequence[float]) -> list[tuple[str, float]]:
    values = 1000 * np.array(seconds or [0.0])
    p50, p99 = map(float, np.percentile(values, (50, 99)))
    return [(f"mean_{key}_ms", float(values.mean())), (f"p50_{key}_ms", p50), (f"p99_{key}_ms", p99)]


def write_chats(path: Path, requests: int, lane: str = "default:in=32-128,out=16-48") -> None:
    """Write a data set that both clients read, of prompts that the project makes."""
    plan = Plan((MODEL,), (parse_lane(f"{lane},n={requests}"),), dataset=OWN_TEXTS)
    rows = ({"prompt": plain_text(item.messages), "output_tokens": item.max_tokens} for item in plan.items())
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def compared(pairs: Sequence[tuple[Result, Result]]) -> Table:
    """Return both clients' medians, and their ratios, from pairs of results: loralane's and vLLM's."""
    rows = []
    for name, label in LABELS.items():
        mine, theirs = ([float(pair[side][name]) for pair in pairs] for side in (0, 1))
        ratio = Ratio.of(mine, theirs)
        cells = [f"{value:.{places}f}" for own in (mine, theirs) for value, places in _middle_and_spread(own)]
        rows.append((label, *cells, f"{ratio.median:.3f}", f"{ratio.least:.3f} to {ratio.most:.3f}"))
    title = f"Clients of one server, medians of {len(pairs)} runs each"
    return table(title, "| loralane | spread | vLLM | spread | ratio | of pairs", rows)


def _middle_and_spread(values: Sequence[float]) -> tuple[tuple[float, int], ...]:
    """Return the median, and the largest value over the smallest, each with its decimal places."""
    return (median(values), 2), (max(values) / min(values), 3)


@benchmark(VLLM, CORES, option("--pairs", 3), option("--requests", 30), option("--rate", 1.5), JSON, DATA_DIR)
def bench(run: Run) -> None:
    options, scratch, pairs = run.options, run.scratch, []
    if options.vllm_python is None:
        raise PeerError("--vllm-python or LORALANE_VLLM_PYTHON must name a Python that has vLLM")
    model, chats = dense_folder("embedded", options.data_dir, run.console), scratch / "chats.jsonl"
    write_chats(chats, options.requests)
    with running(loralane(model, scratch, options.cores, {}).command, scratch / "server.log") as url:
        for _ in run.track(range(WARM_RUNS), "warming up"):
            ours(Job(url, chats, options.requests, options.rate, scratch / "warm.json"))
        for pair in run.track(range(options.pairs), "pairs"):
            job = Job(url, chats, options.requests, options.rate, scratch / f"{pair}.json")
            clients = [partial(ours, job), partial(vllm, options.vllm_python, model, job)]
            results = {side: clients[side]() for side in in_turn((0, 1), pair)}
            pairs.append((results[0], results[1]))
    run.show(compared(pairs), {**stamp(), "pairs": pairs})


if __name__ == "__main__":
    bench.main()
