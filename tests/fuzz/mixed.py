"""`python -m tests.fuzz.mixed`: rounds of mixed requests of three tenants, some of them hostile, to a whole gateway.

After each round the gateway has to be as it was before: its processes keep no more memory and no more descriptors, no
request is open, and the usage of every tenant is the sum of what the answers said.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any, NamedTuple

import grpc
import httpx
import psutil
from google.protobuf.message_factory import GetMessageClass
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tests.fuzz.answers import Tokens, counted, http_body
from tests.fuzz.cases import all_methods
from tests.fuzz.growth.measured import ROOT, send_options
from tests.fuzz.growth.requests import GrpcCall
from tests.fuzz.growth.wire import send
from tests.fuzz.mixed_requests import COUNTED, TENANTS, Sent, batch_lines, make_request, upload

AT_ONCE = 16
HANG_SECONDS = 120.0
CALM_SECONDS = 60.0
SHARE = 0.05
SPARE_BYTES = 16 * 2**20
"""Memory of a process may grow by SHARE of it and so much more from the end of one round to the end of the next."""
SPARE_DESCRIPTORS = 8
"""Idle connections to the store come and go."""
BATCH_SHARE = 0.005
FINAL = ("completed", "failed", "expired", "cancelled")
COMMAND = (sys.executable, "-m", "tests.fuzz.demo_target", "tests.fuzz.instant_engine")


class Costs(NamedTuple):
    """What a kind of the gateway's processes has: resident bytes, and descriptors."""

    memory: int
    descriptors: int


@dataclass
class Round:
    """What was asked and answered so far, in all rounds."""

    seed: int
    failures: list[str] = field(default_factory=list)
    endings: Counter[str] = field(default_factory=Counter)
    used: dict[str, Tokens] = field(default_factory=lambda: dict.fromkeys(TENANTS.values(), Tokens()))
    """What the answers say that each tenant used."""

    def use(self, tenant: str, tokens: Tokens) -> None:
        if tenant:
            self.used[tenant] += tokens


class Gateway:
    """A running gateway, and clients for it."""

    def __init__(self, pid: int, http: str, channel: grpc.aio.Channel, client: httpx.AsyncClient) -> None:
        self.pid, self.http, self.channel, self.client = pid, http, channel, client

    def costs(self) -> dict[str, Costs]:
        """Return what its processes have, by what they are."""
        found: dict[str, Costs] = {}
        top = psutil.Process(self.pid)
        for process in (top, *top.children(recursive=True)):
            with suppress(psutil.Error):
                name = "gateway" if process.pid == self.pid else _name(process)
                before = found.get(name, Costs(0, 0))
                found[name] = Costs(before.memory + process.memory_info().rss, before.descriptors + process.num_fds())
        return found

    async def asked(self, path: str, key: str = "sk-admin") -> Any:
        answer = await self.client.get(path, headers={"authorization": f"Bearer {key}"})
        return answer.raise_for_status().json()

    async def open_requests(self) -> int:
        return int((await self.asked("/admin/v1/requests"))["total"])

    async def usage(self) -> dict[str, Tokens]:
        report = await self.asked("/admin/v1/usage?group_by=tenant")
        return {row["tenant"]: Tokens(row["prompt_tokens"], row["completion_tokens"]) for row in report["usage"]}


def _name(process: psutil.Process) -> str:
    words = process.cmdline()
    return next((word.rsplit(".", 1)[-1] for word in words if word.startswith(("engine.", "tests."))), process.name())


async def run(seed: int, requests: int, rounds: int, hostile: float, done: Callable[[], None] = lambda: None) -> Round:
    """Send so many requests in each round. `done` is called after each request."""
    seen = Round(seed)
    async with _gateway(seen) as gateway:
        before: dict[str, Costs] = {}
        for number in range(rounds):
            await _one_round(gateway, seen, iter(range(number * requests, (number + 1) * requests)), hostile, done)
            before = await _looked_at(gateway, seen, before, number + 1)
    return seen


@asynccontextmanager
async def _gateway(seen: Round) -> AsyncIterator[Gateway]:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*COMMAND, cwd=ROOT, stdin=pipe, stdout=pipe)
    assert process.stdout is not None
    try:
        addresses = json.loads(await process.stdout.readline())
        async with (
            grpc.aio.insecure_channel(addresses["grpc"], options=send_options()) as channel,
            httpx.AsyncClient(base_url=addresses["http"], timeout=HANG_SECONDS) as client,
        ):
            yield Gateway(process.pid, addresses["http"], channel, client)
    finally:
        last, _ = await process.communicate(b"\n")  # closes its input, too
    if process.returncode or not last.endswith(b'{"left": 0}\n'):
        seen.failures.append(f"the gateway ended with {process.returncode} and said {last[-500:]!r}")


async def _one_round(
    gateway: Gateway, seen: Round, numbers: Iterator[int], hostile: float, done: Callable[[], None]
) -> None:
    async def work() -> None:
        for number in numbers:
            await _send(gateway, seen, number, hostile)
            done()

    await asyncio.gather(*(work() for _ in range(AT_ONCE)))


async def _send(gateway: Gateway, seen: Round, number: int, hostile: float) -> None:
    rng = Random(f"batch-{seen.seed}-{number}")
    if rng.random() < BATCH_SHARE:
        ending = await _batch(gateway, seen, rng)
        good = True
    else:
        sent = make_request(seen.seed, number, hostile)
        ending, good = await _answer(gateway, seen, sent), sent.good
    seen.endings[("" if good else "hostile ") + ending] += 1
    if ending.startswith("no answer") or (good and ending not in ("http 200", "grpc OK", "batch completed")):
        seen.failures.append(f"request {number} of seed {seen.seed} ended with {ending}")


async def _answer(gateway: Gateway, seen: Round, sent: Sent) -> str:
    """Send a request and count its usage. Returns how it ended, in words."""
    if isinstance(sent.request, GrpcCall):
        try:
            async with asyncio.timeout(HANG_SECONDS):
                return await _call(gateway, seen, sent.request, sent.tenant)
        except TimeoutError:
            return "no answer"
    ending = await send(gateway.http, gateway.channel, sent.request, HANG_SECONDS)
    if ending.words == "http 200" and sent.request.target.decode("latin-1").split("?")[0] in COUNTED:
        seen.use(sent.tenant, counted(http_body(ending.answer)))
    return ending.words


async def _call(gateway: Gateway, seen: Round, call: GrpcCall, tenant: str) -> str:
    kinds = {
        (False, False): gateway.channel.unary_unary,
        (False, True): gateway.channel.unary_stream,
        (True, False): gateway.channel.stream_unary,
        (True, True): gateway.channel.stream_stream,
    }
    method = kinds[call.client_streams, call.server_streams](call.method)
    asked = iter(call.messages) if call.client_streams else call.messages[0]
    running = method(asked, metadata=call.metadata)
    used = Tokens()
    try:
        if not call.server_streams:
            used = _used(call.method, await running)
        else:
            async for data in running:
                used = Tokens(*map(max, zip(used, _used(call.method, data), strict=True)))
                if "/Watch" in call.method:
                    break
        return "grpc OK"
    except grpc.aio.AioRpcError as error:
        return f"grpc {error.code().name}"
    finally:
        running.cancel()
        seen.use(tenant, used)


def _used(method: str, data: bytes) -> Tokens:
    """Return the usage that a message of an answer speaks of."""
    kind = next(one.output_type for one in all_methods() if method == f"/{one.containing_service.full_name}/{one.name}")
    said: Any = GetMessageClass(kind).FromString(data)
    if kind.name == "JsonResponse":
        return counted(said.json.encode())
    if "usage" in kind.fields_by_name and kind.fields_by_name["usage"].message_type.name == "Usage":
        return Tokens(said.usage.prompt_tokens, said.usage.completion_tokens)
    return Tokens()


async def _batch(gateway: Gateway, seen: Round, rng: Random) -> str:
    """Run a batch from its upload to its results, and delete its files."""
    key, tenant = rng.choice(list(TENANTS.items()))
    headers = {"authorization": f"Bearer {key}"}
    sent = await send(gateway.http, gateway.channel, upload(batch_lines(rng)).with_key(key), HANG_SECONDS)
    file = json.loads(http_body(sent.answer))["id"]
    wanted = {"input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    batch = (await gateway.client.post("/v1/batches", json=wanted, headers=headers)).json()
    until = time.monotonic() + HANG_SECONDS
    while batch["status"] not in FINAL and time.monotonic() < until:
        await asyncio.sleep(0.2)
        batch = await gateway.asked(f"/v1/batches/{batch['id']}", key)
    for written in filter(None, (batch.get("output_file_id"), batch.get("error_file_id"))):
        lines = (await gateway.client.get(f"/v1/files/{written}/content", headers=headers)).text.splitlines()
        for line in map(json.loads, lines):
            seen.use(tenant, counted(json.dumps((line.get("response") or {}).get("body") or {}).encode()))
    for each in filter(None, (file, batch.get("output_file_id"), batch.get("error_file_id"))):
        await gateway.client.delete(f"/v1/files/{each}", headers=headers)
    return f"batch {batch['status']}"


async def _looked_at(gateway: Gateway, seen: Round, before: dict[str, Costs], number: int) -> dict[str, Costs]:
    """Wait for calm, and note what is not as it should be. Returns what the processes have now."""
    wrong: list[str] = []
    until = time.monotonic() + CALM_SECONDS
    while time.monotonic() < until:
        wrong = await _wrong(gateway, seen, before)
        if not wrong:
            break
        await asyncio.sleep(1)
    seen.failures += [f"after round {number}: {what}" for what in wrong]
    return gateway.costs()


async def _wrong(gateway: Gateway, seen: Round, before: dict[str, Costs]) -> list[str]:
    wrong = [f"{count} requests are open" for count in [await gateway.open_requests()] if count]
    usage = await gateway.usage()
    for tenant, used in seen.used.items():
        if usage.get(tenant, Tokens()) != used:
            wrong.append(f"{tenant} is charged for {usage.get(tenant)}, and its answers say {used}")
    for name, now in gateway.costs().items():
        if name in before:
            was = before[name]
            if now.memory > was.memory * (1 + SHARE) + SPARE_BYTES:
                wrong.append(f"{name} grew from {was.memory >> 20} to {now.memory >> 20} MiB")
            if now.descriptors > was.descriptors + SPARE_DESCRIPTORS:
                wrong.append(f"{name} has {now.descriptors} descriptors, and had {was.descriptors}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz.mixed",
        description=__doc__,
        epilog="example: python -m tests.fuzz.mixed --requests 20000 --rounds 2 --hostile 0.1",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--requests", type=int, default=2_000, help="requests of a round (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--hostile", type=float, default=0.1, help="share of hostile ones (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="another seed is another run (default: %(default)s)")
    options = parser.parse_args()
    total = options.requests * options.rounds
    columns = (
        TextColumn("{task.description}"),
        *Progress.get_default_columns()[1:2],
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(f"seed {options.seed}", total=total)
        seen = asyncio.run(
            run(options.seed, options.requests, options.rounds, options.hostile, lambda: progress.advance(task))
        )
    print(*seen.failures, f"endings: {dict(seen.endings.most_common())}", sep="\n")
    print(*(f"{tenant}: {used}" for tenant, used in seen.used.items()), f"failures: {len(seen.failures)}", sep="\n")
    return 1 if seen.failures else 0


if __name__ == "__main__":
    sys.exit(main())
