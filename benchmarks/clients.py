"""`make bench-clients`: `loralane bench serve` beside `vllm bench serve`, against one running gateway.

    python -m benchmarks.clients --vllm-python PATH [--cores 0,1] [--pairs 3] [--requests 30] [--rate 1.5] [--json FILE]

Both clients send the same chats, at nearly regular times, to the same server, in pairs whose order alternates. A ratio
is the median of those of the pairs; beside it stand the lowest and the highest. The spread is the largest run of a
client over its smallest: two clients that differ by less agree.

vLLM counts a gap for each event, and one that holds an answer's role arrives together with the first token. `ITL` is
as each client reports it, and `ITL of arrivals` leaves out vLLM's gaps of events that arrived together.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.command import make_parser, run
from benchmarks.peers import MODEL, PeerError, loralane
from benchmarks.server import KEY, running
from engine.demo.dense import dense_folder
from gateway.bench.dataset import OWN_TEXTS, plain_text
from gateway.bench.document import versions
from gateway.bench.plan import Plan
from gateway.bench.spec import parse_lane
from gateway.terminal.output import print_wide

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
ITL_ARRIVALS = "itl_of_arrivals"
LABELS = {
    "request_throughput": "requests/s",
    "output_throughput": "output tokens/s",
    "total_token_throughput": "tokens/s of prompts and answers",
    **{
        f"{statistic}_{name}_ms": f"{label} {statistic}, ms"
        for name, label in (("ttft", "TTFT"), ("tpot", "TPOT"), ("e2el", "E2E"), ("itl", "ITL"))
        for statistic in ("mean", "p50", "p90", "p99")
    },
    **{f"{statistic}_{ITL_ARRIVALS}_ms": f"ITL of arrivals {statistic}, ms" for statistic in ("mean", "p99")},
}
"""Field of a result -> its name in the table."""
Result = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Job:
    """What both clients do: send the chats of a file to a server, `rate` a second."""

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
    return _result([*words, "--vllm-json", str(job.out)], {}, job.out)


def vllm(python: Path, tokenizer: Path, job: Job) -> Result:
    """Run vLLM's client, and return its result. Raises RuntimeError if it fails."""
    words = [str(python), "-c", VLLM_CLIENT, "--backend", "openai-chat", "--base-url", job.url]
    words += ["--endpoint", "/v1/chat/completions", "--model", MODEL, "--tokenizer", str(tokenizer)]
    words += ["--dataset-name", "custom", "--dataset-path", str(job.chats), "--custom-output-len", "-1"]
    words += ["--skip-chat-template", "--num-prompts", str(job.requests), "--num-warmups", str(WARMUP)]
    words += ["--request-rate", str(job.rate), "--burstiness", str(CV**-2), "--ignore-eos", "--temperature", "0"]
    words += ["--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,90,95,99"]
    words += ["--save-result", "--save-detailed", "--result-dir", str(job.out.parent)]
    env = {"OPENAI_API_KEY": KEY, "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
    return _result([*words, "--result-filename", job.out.name], env, job.out)


def _result(words: Sequence[str], env: Mapping[str, str], out: Path) -> Result:
    done = subprocess.run(words, env={**os.environ, **env}, capture_output=True, text=True)
    if done.returncode or not out.exists():
        raise RuntimeError(f"{words[0]} failed with status {done.returncode}:\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(out.read_text())
    if found["failed"] or found["completed"] == 0:
        raise RuntimeError(f"{words[0]}: {found['failed']} requests failed")
    return with_arrivals(found)


def with_arrivals(found: Result) -> Result:
    """Return a result with the mean and p99 of ITLs between arrivals, without those of events that came together."""
    gaps = [1000 * gap for gaps in found["itls"] for gap in gaps if gap >= TOGETHER_S]
    return {
        **found,
        f"mean_{ITL_ARRIVALS}_ms": float(np.mean(gaps)) if gaps else 0.0,
        f"p99_{ITL_ARRIVALS}_ms": float(np.percentile(gaps, 99)) if gaps else 0.0,
    }


def write_chats(path: Path, requests: int, lane: str = "default:in=32-128,out=16-48") -> None:
    """Write a data set that both clients read, of prompts that the project makes."""
    plan = Plan((MODEL,), (parse_lane(f"{lane},n={requests}"),), dataset=OWN_TEXTS)
    rows = ({"prompt": plain_text(item.messages), "output_tokens": item.max_tokens} for item in plan.items())
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def table(pairs: Sequence[tuple[Result, Result]]) -> Table:
    """Return both clients' medians, and their ratios, from pairs of results: loralane's and vLLM's."""
    found = Table(title=f"Clients of one server, medians of {len(pairs)} runs each")
    for column in ("", "loralane", "spread", "vLLM", "spread", "ratio", "of pairs"):
        found.add_column(column, justify="right" if column else "left")
    for name, label in LABELS.items():
        mine, theirs = ([float(pair[side][name]) for pair in pairs] for side in (0, 1))
        ratios = sorted(a / b for a, b in zip(mine, theirs, strict=True))
        cells = [cell for values in (mine, theirs) for cell in (f"{median(values):.2f}", _spread(values))]
        found.add_row(label, *cells, f"{median(ratios):.3f}", f"{ratios[0]:.3f} to {ratios[-1]:.3f}")
    return found


def _spread(values: Sequence[float]) -> str:
    return f"{max(values) / min(values):.3f}"


def main() -> None:
    parser = make_parser("clients", __doc__)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--requests", type=int, default=30)
    parser.add_argument("--rate", type=float, default=1.5)
    args = parser.parse_args()

    def bench(console: Console, scratch: Path) -> None:
        if args.vllm_python is None:
            raise PeerError("--vllm-python or LORALANE_VLLM_PYTHON must name a Python that has vLLM")
        model, chats, pairs = dense_folder("embedded", args.data_dir, console), scratch / "chats.jsonl", []
        write_chats(chats, args.requests)
        with running(loralane(model, scratch, args.cores, {}).command, scratch / "server.log") as url:
            for pair in track(range(args.pairs), "pairs", console=console):
                job = Job(url, chats, args.requests, args.rate, scratch / f"{pair}.json")
                clients = [lambda job=job: ours(job), lambda job=job: vllm(args.vllm_python, model, job)]
                order = (0, 1) if pair % 2 == 0 else (1, 0)
                results = {side: clients[side]() for side in order}
                pairs.append((results[0], results[1]))
        print_wide(table(pairs))
        if args.json:
            args.json.write_text(json.dumps({"versions": versions(), "pairs": pairs}))

    run(bench)


if __name__ == "__main__":
    main()
