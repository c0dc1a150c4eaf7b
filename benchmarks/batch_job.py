"""`make bench-batch-job`: a batch job beside interactive chats, and a batch file of the largest size.

    python -m benchmarks.batch_job [--lines 10000] [--adapters 50] [--cores 0,1] [--json FILE]

It uses the official `openai` client as its documentation describes: upload, create, poll, download. It measures:

    volume      50,000 lines in nearly 200 MB: seconds to upload and to check them, the memory growth meanwhile, and
                whether a bad line 49,999 is reported with its number
    workflow    a job over many adapters: whether every line is answered once, and lines and tokens per second
    beside      TTFT of interactive requests alone and beside that job, against the lane's goal
"""

from __future__ import annotations

import argparse
import json
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import psutil
from openai import OpenAI
from openai.types import Batch
from rich.progress import Progress

from benchmarks.peers import loralane
from benchmarks.runner import CORES, DATA_DIR, JSON, Figure, Run, benchmark, figures_table, option
from benchmarks.server import launched, pinned
from benchmarks.workload import answered
from engine.core.config import INTERACTIVE_GOALS
from lab.bench.client import Target
from lab.bench.measure import report
from lab.bench.plan import BenchRequest
from lab.demo.dense import dense_folder
from lab.random_adapters import write_adapters

RANK = 8
MIB = 2**20
VOLUME_LINES, VOLUME_BYTES = 50_000, 200 * 10**6
BAD_LINE = 49_999
POLL_S, SAMPLE_S, GAP_S = 0.25, 0.05, 1.0
TOPICS = ("rivers", "mountains", "planets", "birds", "bridges", "trees", "poems", "trains", "spices", "lakes")


class Memory:
    """Records the peak memory of a server's processes except engine and store, in MiB above its initial value."""

    def __init__(self, pid: int) -> None:
        self._server = psutil.Process(pid)
        self._idle = self._held()
        self.most = 0.0

    def watch(self, stopped: threading.Event) -> None:
        while not stopped.wait(SAMPLE_S):
            self.most = max(self.most, self._held() - self._idle)

    def _held(self) -> float:
        """Return the sum of the processes' unshared memory (USS) in MiB. Shared library pages do not grow."""
        total = 0
        for process in (self._server, *self._server.children(recursive=True)):
            try:
                words = " ".join(process.cmdline())
                if "engine.serve.server" not in words and "valkey" not in words:
                    total += process.memory_full_info().uss
            except psutil.NoSuchProcess:
                continue
        return total / MIB


@contextmanager
def watched(pid: int) -> Iterator[Memory]:
    memory, stopped = Memory(pid), threading.Event()
    thread = threading.Thread(target=memory.watch, args=(stopped,))
    thread.start()
    try:
        yield memory
    finally:
        stopped.set()
        thread.join()


def chat_line(index: int, model: str, content: str, max_tokens: int) -> dict[str, Any]:
    body = {"model": model, "messages": [{"role": "user", "content": content}], "max_tokens": max_tokens}
    return {"custom_id": f"line-{index}", "method": "POST", "url": "/v1/chat/completions", "body": body}


def write_lines(path: Path, lines: Iterator[dict[str, Any]]) -> Path:
    with path.open("wb") as file:
        for line in lines:
            file.write(msgspec.json.encode(line) + b"\n")
    return path


def volume_lines(model: str, bad: int | None) -> Iterator[dict[str, Any]]:
    """Yield lines that together are nearly as large as a file may be; line `bad` (from 1; None: no line) is invalid."""
    filler = "x" * (VOLUME_BYTES // VOLUME_LINES - 220)
    for number in range(1, VOLUME_LINES + 1):
        line = chat_line(number, model, f"{number} {filler}", 1)
        yield line | {"body": {"model": model}} if number == bad else line


def submit(client: OpenAI, path: Path) -> tuple[Batch, float]:
    """Upload a batch input file and create a job. Returns the job and the seconds that the upload alone took."""
    began = time.perf_counter()
    with path.open("rb") as file:
        uploaded = client.files.create(file=file, purpose="batch")
    took = time.perf_counter() - began
    return client.batches.create(
        input_file_id=uploaded.id, endpoint="/v1/chat/completions", completion_window="24h"
    ), took


def wait(client: OpenAI, batch: Batch, until: Callable[[Batch], bool]) -> Batch:
    while not until(batch):
        time.sleep(POLL_S)
        batch = client.batches.retrieve(batch.id)
    return batch


def is_over(batch: Batch) -> bool:
    return batch.status in ("completed", "failed", "expired", "cancelled")


def volume(client: OpenAI, model: str, pid: int, scratch: Path) -> list[Figure]:
    """Measure upload and check of the largest file, the growth of the server's memory (process `pid`) meanwhile, and
    whether the bad line of a second file is reported. Raises RuntimeError if the good file is refused."""
    good = write_lines(scratch / "good.jsonl", volume_lines(model, None))
    bad = write_lines(scratch / "bad.jsonl", volume_lines(model, BAD_LINE))
    with watched(pid) as memory:
        batch, upload = submit(client, good)
        began = time.perf_counter()
        batch = wait(client, batch, lambda batch: batch.status != "validating")
        checked = time.perf_counter() - began
    if batch.status != "in_progress":
        raise RuntimeError(f"{VOLUME_LINES} good lines came to {batch.status}: {batch.errors}")
    wait(client, client.batches.cancel(batch.id), is_over)
    refused = wait(client, submit(client, bad)[0], is_over)
    errors = refused.errors.data if refused.errors and refused.errors.data else []
    found = [error.line for error in errors] == [BAD_LINE]
    size = good.stat().st_size / 10**6
    return [
        Figure(f"upload of {size:.0f} MB (s)", upload),
        Figure(f"check of {VOLUME_LINES:,} lines (s)", checked, "<= 10", checked <= 10),
        Figure("memory meanwhile, above idle (MiB)", memory.most, "< 100", memory.most < 100),
        Figure(f"bad line {BAD_LINE:,} reported", float(found), "1", found),
    ]


def job_lines(models: Sequence[str], count: int, max_tokens: int) -> Iterator[dict[str, Any]]:
    """Yield `count` chat lines that use the models in turn and whose prompts begin alike."""
    rng = random.Random(0)
    for index in range(count):
        content = f"Say one short thing about {rng.choice(TOPICS)} number {rng.randrange(1000)}."
        yield chat_line(index, models[index % len(models)], content, max_tokens)


def chats(count: int) -> list[BenchRequest]:
    """Return `count` interactive requests to the base model, one every GAP_S seconds, with prompts of their own."""
    rng = random.Random(time.time_ns())
    prompts = [tuple(rng.randrange(1000, 40_000) for _ in range(rng.randrange(24, 96))) for _ in range(count)]
    return [BenchRequest("base", prompt, 8, "interactive", index * GAP_S) for index, prompt in enumerate(prompts)]


def people(target: Target, count: int) -> Any:
    """Send `count` interactive chats; returns their TTFT percentiles in seconds. Raises RuntimeError if one fails."""
    found = report("chats", answered(target, chats(count))).ttft
    if found is None:
        raise RuntimeError("no chat was answered")
    return found


def workflow(
    client: OpenAI,
    target: Target,
    models: Sequence[str],
    arguments: argparse.Namespace,
    scratch: Path,
    progress: Progress,
) -> list[Figure]:
    path = write_lines(scratch / "job.jsonl", job_lines(models, arguments.lines, arguments.max_tokens))
    alone = people(target, arguments.chats)
    began = time.perf_counter()
    batch, _ = submit(client, path)
    batch = wait(client, batch, lambda batch: batch.status != "validating")
    with ThreadPoolExecutor(1) as pool:
        beside = pool.submit(people, target, arguments.chats)
        batch = followed(client, batch, progress)
        seconds = time.perf_counter() - began
        ttft = during(beside)
    answers = [json.loads(line) for line in client.files.content(str(batch.output_file_id)).iter_lines()]
    ids = [answer["custom_id"] for answer in answers]
    exact = sorted(ids) == sorted(f"line-{index}" for index in range(arguments.lines))
    tokens = sum(answer["response"]["body"]["usage"]["total_tokens"] for answer in answers)
    goal = INTERACTIVE_GOALS.ttft_s
    return [
        Figure(f"{arguments.lines:,} lines over {len(models)} adapters (s)", seconds),
        Figure("lines/s", arguments.lines / seconds),
        Figure("prompt and output tokens/s", tokens / seconds),
        Figure("every line answered, once", float(exact), "1", exact and batch.status == "completed"),
        Figure("chats: TTFT p50 alone (ms)", alone.p50 * 1e3),
        Figure("chats: TTFT p99 alone (ms)", alone.p99 * 1e3),
        Figure("chats: TTFT p50 beside the job (ms)", ttft.p50 * 1e3),
        Figure("chats: TTFT p99 beside the job (ms)", ttft.p99 * 1e3, f"<= {goal * 1e3:.0f}", ttft.p99 <= goal),
    ]


def followed(client: OpenAI, batch: Batch, progress: Progress) -> Batch:
    total = batch.request_counts.total if batch.request_counts else 0
    task = progress.add_task("lines", total=total)
    while not is_over(batch):
        time.sleep(POLL_S)
        batch = client.batches.retrieve(batch.id)
        counts = batch.request_counts
        progress.update(task, completed=counts.completed + counts.failed if counts else 0)
    return batch


def during(beside: Future[Any]) -> Any:
    """Return the chats' result, asked for when the job has ended. Raises RuntimeError if some chats have not ended."""
    if beside.done():
        return beside.result()
    raise RuntimeError("the job was over before the chats were: more --lines, or fewer --chats")


@benchmark(
    CORES,
    option("--lines", 10_000),
    option("--adapters", 50),
    option("--max-tokens", 4, "of each line"),
    option("--chats", 100, "interactive requests, one a second"),
    option("--skip-volume", False, "leave the largest file out"),
    JSON,
    DATA_DIR,
)
def bench(run: Run) -> None:
    options, scratch = run.options, run.scratch
    model = dense_folder("embedded", options.data_dir, run.console)
    folders = write_adapters(model, scratch / "adapters", [RANK] * options.adapters)
    preload = {name: str(path) for name, path in folders.items()}
    extra = {"adapters": {"preload": preload}, "engine": {"prefix_caching": True}}
    peer = loralane(model, scratch, options.cores, extra)
    with (
        run.progress() as progress,
        pinned(run.client_cores),
        launched(peer.command, scratch / "log") as process,
    ):
        client = OpenAI(base_url=f"{peer.command.url}/v1", api_key=peer.key, timeout=600)
        figures = [] if options.skip_volume else volume(client, next(iter(folders)), process.pid, scratch)
        figures += workflow(client, Target(peer.command.url, peer.key), list(folders), options, scratch, progress)
    run.show(figures_table("Batches", figures), figures)


if __name__ == "__main__":
    bench.main()
