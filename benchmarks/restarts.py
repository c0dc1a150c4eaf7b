"""`make bench-restarts`: checks that streams survive the end of their engine process.

    python -m benchmarks.restarts [--streams 200] [--kills 20] [--stops 3] [--restarts 3]

The demo in fp32 first answers a number of different requests undisturbed: over HTTP and gRPC, from the base and the
adapters, greedy, sampled with a seed, constrained by a schema, and with two answers at once. Then the same requests are
repeated while the engine is killed, stopped by SIGSTOP, and terminated by SIGTERM. Every text must be the same as
before, no request may fail, and the charged usage must be the sum over the answers. Otherwise the exit status is 1.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil
import yaml
from rich.table import Table

from benchmarks.runner import Run, benchmark, option, table
from benchmarks.server import Command, free_port, launched
from gateway.core.tenants import hash_key
from gateway.pb import generation_pb2 as pb
from gateway.pb import generation_pb2_grpc as pb_grpc

MODELS = ("smollm2-135m-instruct", "pirate", "cheer", "json")
DEMO = Path(__file__).parents[1] / "engine" / "demo"
KEY, ADMIN_KEY, TENANT = "sk-restarts", "sk-restarts-admin", "restarts"
SCHEMA = {"type": "object", "properties": {"answer": {"type": "string", "maxLength": 40}}, "required": ["answer"]}
AT_ONCE = 12
LENGTH = 40
"""Largest number of tokens in an answer. It takes some two seconds beside eleven others, in which an engine or two may
end."""
CALM_SECONDS = (1.0, 3.0)
"""Range of the pause from when an engine is ready to when it is ended."""
TIMEOUT = 300.0
FAULTS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP, "restarted": signal.SIGTERM}


@dataclass(frozen=True)
class Ask:
    """A test request, whose number determines its protocol, model, sampling and number of answers."""

    number: int

    @property
    def over_grpc(self) -> bool:
        return self.number % 4 == 3

    @property
    def has_schema(self) -> bool:
        return self.number // 4 % 4 == 2

    @property
    def body(self) -> dict[str, Any]:
        kind, number = self.number // 4 % 4, self.number
        body: dict[str, Any] = {
            "model": MODELS[number % len(MODELS)],
            "messages": [{"role": "user", "content": f"Tell me something about the number {number}."}],
            "max_tokens": LENGTH,
            "temperature": 0.0 if kind in (0, 2) else 0.8,
            "seed": number,
        }
        if self.has_schema and not self.over_grpc:
            schema = {"name": "answer", "schema": SCHEMA, "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        return body | ({"n": 2} if kind == 3 else {})


@dataclass
class Tally:
    """Results of all requests. `seconds` has the duration of each, and `complaints` what went wrong, as text."""

    texts: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """Texts of the undisturbed answers, by request number."""
    answered: int = 0
    tokens: int = 0
    """Sum of prompt and completion tokens that the answers report."""
    seconds: list[float] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def note(self, ask: Ask, texts: tuple[str, ...], tokens: int, seconds: float) -> None:
        self.answered += 1
        self.tokens += tokens
        self.seconds.append(seconds)
        if self.texts.setdefault(ask.number, texts) != texts:
            self.complaints.append(f"request {ask.number}: {texts} instead of {self.texts[ask.number]}")


async def over_http(http: httpx.AsyncClient, ask: Ask) -> tuple[tuple[str, ...], int]:
    """Send a request over HTTP. Returns the texts of its answers and the sum of its prompt and completion tokens.
    Raises RuntimeError if the request is refused or its stream ends in an error."""
    texts, tokens = [""] * ask.body.get("n", 1), 0
    body = ask.body | {"stream": True, "stream_options": {"include_usage": True}}
    async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
        if answer.status_code != 200:
            raise RuntimeError(f"{answer.status_code} {(await answer.aread()).decode()}")
        async for line in answer.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise RuntimeError(str(event["error"]))
            for choice in event["choices"]:
                texts[choice["index"]] += choice["delta"].get("content") or ""
            tokens = (event.get("usage") or {}).get("total_tokens", tokens)
    return tuple(texts), tokens


async def over_grpc(stub: Any, ask: Ask) -> tuple[tuple[str, ...], int]:
    """Send a request over gRPC. Returns the texts of its answers and the sum of its prompt and completion tokens.
    Raises AioRpcError if it fails."""
    body, texts, tokens = ask.body, [""] * ask.body.get("n", 1), 0
    chat = pb.Chat(messages=[pb.ChatMessage(**message) for message in body["messages"]])
    sampling = pb.SamplingParams(max_tokens=LENGTH, temperature=body["temperature"], seed=body["seed"])
    held = {"structured_outputs": pb.StructuredOutputs(json=json.dumps(SCHEMA))} if ask.has_schema else {}
    request = pb.GenerateRequest(model=body["model"], chat=chat, sampling=sampling, n=len(texts), **held)
    async for chunk in stub.GenerateStream(request, metadata=[("authorization", f"Bearer {KEY}")], timeout=TIMEOUT):
        texts[chunk.choice.index] += chunk.choice.text
        if chunk.HasField("usage"):
            tokens = chunk.usage.prompt_tokens + chunk.usage.completion_tokens
    return tuple(texts), tokens


class Callers:
    """Send `streams` different requests in turn, again and again, AT_ONCE at a time; `tally` receives the results."""

    def __init__(self, http: httpx.AsyncClient, channel: grpc.aio.Channel, tally: Tally, streams: int) -> None:
        self._http = http
        self._stub = pb_grpc.GenerationStub(channel)
        self._tally = tally
        self._streams = streams
        self._next = 0

    async def ask_until(self, is_over: Callable[[int], bool], on_answer: Callable[[], None]) -> None:
        """Send requests, from the first on, until `is_over` returns True for the number of requests begun. `on_answer`
        is called after each answer or failure."""
        self._next = 0
        await asyncio.gather(*(self._one_caller(is_over, on_answer) for _ in range(AT_ONCE)))

    async def _one_caller(self, is_over: Callable[[int], bool], on_answer: Callable[[], None]) -> None:
        while not is_over(self._next):
            ask = Ask(self._next % self._streams)
            self._next += 1
            begun = time.perf_counter()
            try:
                coming = over_grpc(self._stub, ask) if ask.over_grpc else over_http(self._http, ask)
                self._tally.note(ask, *await coming, time.perf_counter() - begun)
            except (RuntimeError, httpx.HTTPError, grpc.aio.AioRpcError) as error:
                self._tally.complaints.append(f"request {ask.number}: {type(error).__name__} {error}"[:300])
            on_answer()


def engine_of(server: psutil.Process) -> psutil.Process | None:
    for child in server.children():
        with suppress(psutil.NoSuchProcess):  # the process may end at this moment
            if "engine.serve.server" in child.cmdline():
                return child
    return None


async def is_replaced(server: psutil.Process, before: int) -> bool:
    engine = engine_of(server)
    return engine is not None and engine.pid != before


async def has_answered(tally: Tally, count: int) -> bool:
    return tally.answered + len(tally.complaints) >= count


async def is_ready(http: httpx.AsyncClient) -> bool:
    return (await http.get("/ready")).status_code == 200


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Wait until a condition is true. Raises TimeoutError after `TIMEOUT` seconds."""
    async with asyncio.timeout(TIMEOUT):
        while not await condition():  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def disturb(
    server: psutil.Process, http: httpx.AsyncClient, faults: list[str], tally: Tally, on_fault: Callable[[], None]
) -> list[float]:
    """End engine after engine, by one of FAULTS each. Returns the seconds from each fault until the next engine was
    ready. The pauses between faults are so long that no request outlives more than three engines."""
    seconds = []
    for fault in faults:
        before = tally.answered
        await asyncio.sleep(random.uniform(*CALM_SECONDS))
        await until(partial(has_answered, tally, before + AT_ONCE))
        engine = engine_of(server)
        assert engine is not None
        begun = time.perf_counter()
        engine.send_signal(FAULTS[fault])
        await until(partial(is_replaced, server, engine.pid))
        await until(partial(is_ready, http))
        seconds.append(time.perf_counter() - begun)
        on_fault()
    return seconds


def write_config(path: Path, http_port: int, grpc_port: int) -> None:
    demo = yaml.safe_load((Path(__file__).parents[1] / "configs" / "demo.yaml").read_text())
    demo["engine"]["dtype"] = "float32"
    demo["tenants"] = {TENANT: {"keys": [f"sha256:{hash_key(KEY)}"]}}
    demo["admin"] = {"keys": [f"sha256:{hash_key(ADMIN_KEY)}"]}
    demo["http"]["port"], demo["grpc"]["port"] = http_port, grpc_port
    demo["adapters"]["preload"] = {name: str(DEMO / "adapters" / name) for name in MODELS[1:]}
    demo["model"]["chat_template"] = str(DEMO / "chat_template.jinja")
    path.write_text(yaml.safe_dump(demo))


async def used_tokens(http: httpx.AsyncClient) -> int:
    """Return the sum of prompt and completion tokens that the only tenant has been charged for."""
    answer = await http.get("/admin/v1/usage", headers={"authorization": f"Bearer {ADMIN_KEY}"})
    total = answer.raise_for_status().json()["total"]
    return int(total["prompt_tokens"] + total["completion_tokens"])


async def bench_all(run: Run, server: psutil.Process, url: str, target: str) -> tuple[Tally, list[str], list[float]]:
    tally, options = Tally(), run.options
    faults = ["killed"] * options.kills + ["stopped"] * options.stops + ["restarted"] * options.restarts
    random.shuffle(faults)
    headers = {"authorization": f"Bearer {KEY}"}
    async with (
        httpx.AsyncClient(base_url=url, headers=headers, timeout=TIMEOUT) as http,
        grpc.aio.insecure_channel(target) as channel,
    ):
        callers, used_before = Callers(http, channel, tally, options.streams), await used_tokens(http)
        with run.progress() as progress:
            task = progress.add_task("undisturbed", total=options.streams)
            await callers.ask_until(lambda begun: begun >= options.streams, partial(progress.advance, task))
            task = progress.add_task("while engines end", total=len(faults))
            disturbing = asyncio.create_task(disturb(server, http, faults, tally, partial(progress.advance, task)))
            await callers.ask_until(lambda begun: disturbing.done() and begun >= options.streams, lambda: None)
        seconds = await disturbing
        used = await used_tokens(http) - used_before
        if used != tally.tokens:
            tally.complaints.append(f"{used} tokens were charged, and the answers say {tally.tokens}")
    return tally, faults, seconds


def summary(tally: Tally, faults: list[str], seconds: list[float], streams: int) -> Table:
    rows = []
    for fault in FAULTS:
        own = [took for name, took in zip(faults, seconds, strict=True) if name == fault]
        if own:
            rows.append((fault, str(len(own)), f"{statistics.median(own):.1f}", f"{max(own):.1f}"))
    title = f"{tally.answered - streams:,} streams while engines ended; each text as undisturbed"
    return table(title, "the engine was | times | replaced and ready after, median s | most s", rows)


@benchmark(
    option("--data-dir", Path, "default: a new one, in which the model is prepared first"),
    option("--streams", 200, "different requests"),
    option("--kills", 20),
    option("--stops", 3, "by SIGSTOP"),
    option("--restarts", 3, "by SIGTERM"),
    option("--seed", 1, "of the faults' order and times"),
)
def bench(run: Run) -> None:
    options, scratch = run.options, run.scratch
    random.seed(options.seed)
    http_port, grpc_port = free_port(), free_port()
    write_config(scratch / "config.yaml", http_port, grpc_port)
    words = [sys.executable, "-m", "gateway", "serve", "--config", str(scratch / "config.yaml")]
    url = f"http://127.0.0.1:{http_port}"
    command = Command([*words, "--data-dir", str(options.data_dir or scratch / "data")], url, "/ready")
    with launched(command, scratch / "server.log") as process:
        working = bench_all(run, psutil.Process(process.pid), url, f"127.0.0.1:{grpc_port}")
        tally, faults, seconds = asyncio.run(working)
    run.show(summary(tally, faults, seconds, options.streams))
    for complaint in tally.complaints[:20]:
        run.console.print(complaint, markup=False, soft_wrap=True)
    run.console.print(f"{len(tally.complaints)} complaints")
    if tally.complaints:
        raise SystemExit(1)


if __name__ == "__main__":
    bench.main()
