"""Sends cases to a target while a neighbour streams, and says what went wrong."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import httpx
import psutil

from tests.fuzz.cases import Case, GrpcCase, HttpCase, make_case
from tests.fuzz.neighbour import Neighbour, stream_beside

AT_ONCE = 8
TARGETS = {
    "fake": ("tests.fuzz.target", 60.0),
    "demo": ("tests.fuzz.demo_target", 600.0),
    "odd": ("tests.fuzz.odd_target", 120.0),
}
"""For each engine the module that serves it, and the seconds after which a case without an answer hangs: the slowest
takes some 3 s where the engine is fake, two grammars at their limit of work, and minutes where 128 answers are
generated."""
MOST_GROWTH_BYTES = 700 * 2**20
"""Bounds the growth of all processes of the target together, after the first cases: two grammar workers may take 64 MiB
each beyond what they share with the process they were forked from."""
WARM_UP_CASES = 200
LOST_STATUS = "Internal error from Core"
"""grpcio's client says so where it lost the status of a server that ended the call while the client still sent."""
REFUSALS = frozenset(
    (
        grpc.StatusCode.OK,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.ALREADY_EXISTS,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.UNIMPLEMENTED,
    )
)

NO_NUMBER = b"is NaN or infinite"
"""Words of the error for an output that is no number, which an odd model has."""
LAST_EVENTS = {
    "/v1/messages": (b"message_stop\n", b"error\n"),
    "/v1/responses": (b"response.completed\n", b"response.incomplete\n", b"response.failed\n"),
}
"""Names of the events that may end a stream, for paths whose streams do not end with [DONE]."""


@dataclass
class Report:
    """What a run has found so far."""

    seed: int
    engine: str = "fake"
    failures: list[str] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    neighbour: Neighbour = field(default_factory=Neighbour)
    first_bytes: int = 0
    most_bytes: int = 0
    """Memory of the target's processes, after the first cases and at most."""

    def fail(self, number: int, case: object, what: str) -> None:
        again = f"python -m tests.fuzz --engine {self.engine} --seed {self.seed} --case {number}"
        self.failures.append(f"case {number}: {what}\n  {case}\n  again: {again}")


async def run(seed: int, numbers: range, done: Callable[[], None] = lambda: None, engine: str = "fake") -> Report:
    """Send the cases with these numbers to a target with this engine. `done` is called after each of them."""
    report = Report(seed, engine)
    with _started(report) as target:
        async with grpc.aio.insecure_channel(target.grpc) as channel, _client(target) as client:
            waiting = iter(numbers)
            async with stream_beside(target.http, report.neighbour, target.hang_seconds):
                await asyncio.gather(
                    *[_send_all(report, waiting, client, channel, target, done) for _ in range(AT_ONCE)]
                )
    report.failures += report.neighbour.failures
    return report


class _Target:
    """The attacked process and all of its children."""

    def __init__(self, engine: str) -> None:
        module, self.hang_seconds = TARGETS[engine]
        command = [sys.executable, "-m", module]
        root = Path(__file__).parents[2]
        self.process = subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        addresses = json.loads(self.process.stdout.readline())
        self.http, self.grpc = addresses["http"], addresses["grpc"]

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def memory(self) -> int:
        """Return the memory of all its processes in bytes, pages that they share counted once."""
        total = 0
        for process in (top := psutil.Process(self.process.pid), *top.children(recursive=True)):
            try:
                total += process.memory_full_info().pss
            except psutil.Error:
                continue  # a grammar worker that has just been replaced
        return total


@contextmanager
def _started(report: Report) -> Iterator[_Target]:
    """Start a target, end it at the end of the block, and report a bad end."""
    target = _Target(report.engine)
    try:
        yield target
    finally:
        try:
            last, _ = target.process.communicate(timeout=target.hang_seconds)
        except subprocess.TimeoutExpired:
            target.process.kill()
            last, _ = target.process.communicate()
    if target.process.returncode != 0 or not last.endswith(b'{"left": 0}\n'):
        said = last[-2_000:].decode(errors="replace")
        report.failures.append(f"the target ended with {target.process.returncode} and said {said}")


def _client(target: _Target) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=AT_ONCE)
    return httpx.AsyncClient(base_url=target.http, timeout=target.hang_seconds, limits=limits)


async def _send_all(
    report: Report,
    waiting: Iterator[int],
    client: httpx.AsyncClient,
    channel: grpc.aio.Channel,
    target: _Target,
    done: Callable[[], None],
) -> None:
    for number in waiting:
        if not target.alive:
            report.fail(number, "", "the target was dead before this case was sent")
            return
        case = make_case(report.seed, number)
        outcome, trouble = await _send(client, channel, case, target.hang_seconds)
        report.outcomes[outcome] += 1
        if trouble:
            report.fail(number, case, trouble)
        if number % WARM_UP_CASES == 0:
            _look_at_memory(report, number, target)
        done()


async def _send(
    client: httpx.AsyncClient, channel: grpc.aio.Channel, case: Case, hang_seconds: float
) -> tuple[str, str]:
    """Return the outcome in a word, and what is wrong with it; the latter is empty where nothing is."""
    try:
        async with asyncio.timeout(hang_seconds):
            return await (_send_http(client, case) if isinstance(case, HttpCase) else send_grpc(channel, case))
    except TimeoutError:
        return "hang", f"no answer within {hang_seconds:g} s"


def _look_at_memory(report: Report, number: int, target: _Target) -> None:
    used = target.memory() if target.alive else 0
    report.most_bytes = max(report.most_bytes, used)
    report.first_bytes = report.first_bytes or (used if number else 0)
    if report.first_bytes and used > report.first_bytes + MOST_GROWTH_BYTES:
        report.fail(number, "", f"the target's memory grew from {report.first_bytes >> 20} to {used >> 20} MiB")


async def _send_http(client: httpx.AsyncClient, case: HttpCase) -> tuple[str, str]:
    headers = {name.encode(): value.encode("latin-1") for name, value in case.headers.items()}
    try:
        async with client.stream(case.method, case.path, headers=headers, content=case.body) as response:
            body = b""
            async for piece in response.aiter_raw():
                body += piece
                if case.hang_up_after is not None and len(body) > case.hang_up_after:
                    return "hung up", ""
            return f"http {response.status_code}", _wrong_with(case, response, body)
    except httpx.HTTPError as error:
        return "no answer", f"{type(error).__name__}: {error}"


def _wrong_with(case: HttpCase, response: httpx.Response, body: bytes) -> str:
    if response.status_code >= 500 and NO_NUMBER not in body:
        return f"status {response.status_code}: {body[:300]!r}"
    if response.headers.get("content-type", "").startswith("text/event-stream"):
        return "" if _is_whole(case.path, body) else f"a stream ended with {body[-100:]!r}"
    if response.status_code >= 400:
        try:
            if json.loads(body)["error"]["message"]:
                return ""
        except (ValueError, KeyError, TypeError):
            pass
        return f"status {response.status_code} without an error object: {body[:300]!r}"
    return ""


def _is_whole(path: str, body: bytes) -> bool:
    """Return whether the body of a stream has the last event that the protocol of the path prescribes."""
    if path not in LAST_EVENTS:
        return body.endswith(b"data: [DONE]\n\n")
    return body.endswith(b"\n\n") and body.rpartition(b"event: ")[2].startswith(LAST_EVENTS[path])


async def send_grpc(channel: grpc.aio.Channel, case: GrpcCase) -> tuple[str, str]:
    call = _call(channel, case)
    try:
        if not case.server_streams:
            if case.hang_up_after == 0:
                call.cancel()
            await call
        else:
            await _read_stream(call, case.hang_up_after)
    except asyncio.CancelledError:
        if not call.cancelled():
            raise
        return "hung up", ""
    except grpc.aio.AioRpcError as error:
        details = error.details() or ""
        bad = error.code() not in REFUSALS and not (case.client_streams and details == LOST_STATUS)
        bad = bad and NO_NUMBER.decode() not in details
        return f"grpc {error.code().name}", f"{error.code().name}: {error.details()}" if bad else ""
    finally:
        call.cancel()
    return "grpc OK", ""


def _call(channel: grpc.aio.Channel, case: GrpcCase) -> grpc.aio.Call:
    kinds = {
        (False, False): channel.unary_unary,
        (False, True): channel.unary_stream,
        (True, False): channel.stream_unary,
        (True, True): channel.stream_stream,
    }
    method = kinds[case.client_streams, case.server_streams](case.method)
    asked = _each(case.messages) if case.client_streams else case.messages[0]
    return method(asked, metadata=case.metadata)


async def _each(messages: tuple[bytes, ...]) -> AsyncIterator[bytes]:
    for message in messages:
        yield message


async def _read_stream(call: grpc.aio.UnaryStreamCall, most: int | None) -> None:
    seen = 0
    while most is None or seen < most:
        if await call.read() is grpc.aio.EOF:
            return
        seen += 1
