"""Sends requests to one upstream, and reads its streams within bounds of time and size."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager
from typing import TypeVar

import httpx
import structlog
from msgspec.structs import replace

from engine.core.fairness.shares import Shares
from engine.core.messages.requests import Lane
from gateway.config.upstreams import UpstreamConfig
from gateway.core.errors import MAX_QUOTED, ApiError, Fault, unavailable, unsupported_parameter
from gateway.core.tenants import Tenant
from gateway.requests.types import Chat, GenerateRequest, GenerationChunk
from gateway.upstreams import bodies, vectors, wire
from gateway.upstreams.breaker import SharedBreaker
from gateway.upstreams.vectors import Vectors
from gateway.upstreams.wire import CallNumbers, TooLong, UpstreamFailed

MAX_LINE_BYTES = 2**20
"""Maximum size of one line of a stream."""
ERROR_BYTES = 16_384
"""Bytes of an error's body that are read."""
RETRY_SECONDS = 0.25
"""Pause before the first retry; each further one doubles it."""
REFUSALS = (400, 413, 422)
"""Statuses that say that the request itself is wrong. It is not sent again unchanged, and does not count as a failure
of the upstream."""
TRANSIENT = (408, 429)
"""Statuses below 500 for which the request is sent again."""
DONE = b"[DONE]"

T = TypeVar("T")
Reader = Callable[[httpx.Response], AsyncGenerator[T, None]]
"""Reads the parts of an answer (the events of a stream, or all vectors at once) from a response with status 200. Raises
UpstreamFailed."""

log = structlog.get_logger("upstreams")


class UpstreamClient:
    """An `Upstream` over HTTP."""

    def __init__(
        self,
        name: str,
        config: UpstreamConfig,
        *,
        transport: httpx.AsyncBaseTransport | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`transport` replaces the network in tests. `clock` returns monotonic seconds."""
        self.name, self.model = name, config.model
        self._config = config
        self._breaker = SharedBreaker(config.failures, config.pause_s, clock)
        self._running = Shares()
        """Requests in progress by tenant."""
        self._limit_field = wire.LIMIT
        """Field for the maximum number of output tokens in the bodies of chats: LIMIT, or NEWER_LIMIT once the upstream
        has asked for that."""
        timeout = httpx.Timeout(config.idle_timeout_s, connect=config.connect_timeout_s)
        headers = {"accept-encoding": "identity"} | ({"authorization": f"Bearer {config.key}"} if config.key else {})
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=config.max_requests)
        self._http = httpx.AsyncClient(
            headers=headers, timeout=timeout, limits=limits, transport=transport, trust_env=False
        )

    def is_ready(self, tenant: Tenant) -> bool:
        return not self._breaker.is_shut(tenant.name) and self._has_room(tenant)

    def permits(self, tenant: Tenant, lane: Lane) -> bool:
        return self._config.permits(self.name, tenant, lane)

    def check(self, request: GenerateRequest, tenant: Tenant) -> None:
        bodies.check(request)
        self._check_ready(tenant)

    def _has_room(self, tenant: Tenant) -> bool:
        """Return whether the upstream may get another request of a tenant now: fewer than `max_requests` are in
        progress, or the tenant has none, or it stays within its share of them, so that slow requests of one tenant do
        not keep the others out."""
        return self._running.admits(tenant.name, 1, self._config.max_requests)

    def _check_ready(self, tenant: Tenant) -> None:
        if not self._has_room(tenant):
            most = self._config.max_requests
            raise unavailable(Fault.LANE_QUEUE_FULL, f"{self.name} has {most} requests in progress, its maximum")
        if self._breaker.is_shut(tenant.name):
            raise self._paused()

    def _paused(self) -> ApiError:
        return unavailable(Fault.UPSTREAM_UNAVAILABLE, f"{self.name} has failed and is not asked for a while")

    async def close(self) -> None:
        await self._http.aclose()

    async def stream(self, request: GenerateRequest, tenant: Tenant) -> AsyncGenerator[GenerationChunk, None]:
        self._check_ready(tenant)  # again: others may have begun meanwhile
        if not self._breaker.allows(tenant.name):
            raise self._paused()
        self._running.add(tenant.name, tenant.weight, 1)
        try:
            async with aclosing(self._answer(request)) as chunks:
                async for chunk in chunks:
                    if chunk.usage is not None:  # not sooner, or an upstream that always breaks off would stay in use
                        self._breaker.succeeded(tenant.name)
                    yield chunk
        except UpstreamFailed as error:
            if error.is_counted:
                self._breaker.failed(tenant.name)
            else:
                self._breaker.given_up(tenant.name)
            log.warning("upstream_failed", upstream=self.name, reason=str(error))
            raise unavailable(Fault.UPSTREAM_UNAVAILABLE, f"{self.name} failed: {error}") from error
        except BaseException:
            self._breaker.given_up(tenant.name)
            raise
        finally:
            self._running.remove(tenant.name, 1)

    async def _answer(self, request: GenerateRequest) -> AsyncGenerator[GenerationChunk, None]:
        """Yield the chunks of all answers. Raises like `_begun`."""
        name, num_answers = self._config.model, len(request.prompts) * request.n
        if request.pooling is not None:
            async with aclosing(self._vectors(request)) as chunks:
                async for chunk in chunks:
                    yield chunk
            return
        path = "chat/completions" if isinstance(request.prompts[0], Chat) else "completions"
        async with (
            self._begun(path, bodies.body_of(request, name, self._limit_field), self._read_events) as events,
            aclosing(self._chunks(events, num_answers)) as chunks,
        ):
            async for chunk in chunks:
                yield chunk

    async def _vectors(self, request: GenerateRequest) -> AsyncGenerator[GenerationChunk, None]:
        """Yield the chunks of a request for vectors. Raises like `_begun`, and ApiError (UNSUPPORTED_PARAMETER) if the
        answer is too long or has vectors of another length."""
        try:
            body = vectors.body_of(request, self._config.model)
            async with self._begun("embeddings", body, self._read_vectors) as found:
                yield GenerationChunk(0)
                async for answer in found:
                    for chunk in vectors.chunks_of(answer, request):
                        yield chunk
        except TooLong as error:
            yield GenerationChunk(0)  # the upstream has read the prompts, which are therefore charged
            most, field = self._config.max_response_bytes, request.prompt_field(0).split("[")[0]
            why = f"is too much for {self.name}, whose answer has more than {most} bytes; send fewer texts at once"
            raise unsupported_parameter(field, why) from error

    @asynccontextmanager
    async def _begun(self, path: str, body: wire.Json, read: Reader[T]) -> AsyncIterator[AsyncIterator[T]]:
        """Send a request, with retries until the first part of an answer has come, and yield the parts of the answer as
        `read` yields them. Raises UpstreamFailed, and ApiError if the upstream refuses the request itself."""
        async with AsyncExitStack() as stack:
            for left in range(self._config.retries, -1, -1):
                try:
                    async with AsyncExitStack() as own, asyncio.timeout(self._config.first_token_timeout_s):
                        parts = await own.enter_async_context(self._sent(path, body, read))
                        first = await anext(parts, None)
                        stack.push_async_exit(own.pop_all())
                    break
                except TimeoutError:
                    if not left:
                        message = f"no answer within {self._config.first_token_timeout_s:g} s"
                        raise UpstreamFailed(message) from None
                except UpstreamFailed as error:
                    if not left or not error.is_transient:
                        raise
                await asyncio.sleep(RETRY_SECONDS * 2 ** (self._config.retries - left))
            if first is None:
                raise UpstreamFailed("an empty answer")
            yield _after(first, parts)

    @asynccontextmanager
    async def _sent(self, path: str, body: wire.Json, read: Reader[T]) -> AsyncIterator[AsyncIterator[T]]:
        """Send a request once, and yield what `read` yields of the answer. Raises like `_begun`."""
        with _failures():
            async with self._http.stream("POST", self._config.endpoint(path), json=body) as response:
                if response.status_code != 200:
                    raise await self._refused(response, body)
                if response.headers.get("content-encoding", "").strip().lower() not in ("", "identity"):
                    raise UpstreamFailed("a compressed answer, which was not asked for", is_transient=False)
                async with aclosing(read(response)) as parts:
                    yield parts

    async def _refused(self, response: httpx.Response, body: wire.Json) -> Exception:
        """Return the exception for a status that is not 200. If the upstream refuses LIMIT and asks for NEWER_LIMIT,
        move the limit to that field in `body` and in later requests; the exception then allows a retry."""
        status, text = response.status_code, b""
        if status not in REFUSALS:
            return UpstreamFailed(f"HTTP {status}", is_transient=status >= 500 or status in TRANSIENT)
        async for piece in response.aiter_raw():
            text += piece
            if len(text) > ERROR_BYTES:
                break
        if wire.LIMIT in body and wire.wants_newer_limit(text[:ERROR_BYTES]):
            self._limit_field = wire.NEWER_LIMIT
            body[wire.NEWER_LIMIT] = body.pop(wire.LIMIT)
            return UpstreamFailed(f"it wants {wire.NEWER_LIMIT}")
        return wire.refusal(status, text[:ERROR_BYTES], MAX_QUOTED)

    async def _read_vectors(self, response: httpx.Response) -> AsyncGenerator[Vectors, None]:
        """Read the whole body of a response and yield the embeddings in it. Raises UpstreamFailed if it is too long or
        has none."""
        text = bytearray()
        with _failures():
            async for piece in response.aiter_raw():
                text += piece
                if len(text) > self._config.max_response_bytes:
                    raise TooLong
        yield vectors.read_vectors(bytes(text))

    async def _read_events(self, response: httpx.Response) -> AsyncGenerator[wire.Event, None]:
        """Yield the server-sent events of a response up to [DONE]. Raises UpstreamFailed if the response is no such
        stream, ends before [DONE], or is too long."""
        if not response.headers.get("content-type", "").startswith("text/event-stream"):
            raise UpstreamFailed("an answer that is no stream", is_transient=False)
        line, total = bytearray(), 0
        with _failures():
            async for piece in response.aiter_raw():
                total += len(piece)
                line += piece
                if total > self._config.max_response_bytes or len(line) > MAX_LINE_BYTES + len(piece):
                    raise TooLong
                if b"\n" not in piece:
                    continue
                *lines, rest = bytes(line).split(b"\n")
                line = bytearray(rest)
                for each in lines:
                    if not each.startswith(b"data:"):
                        continue
                    data = each.removeprefix(b"data:").strip()
                    if data == DONE:
                        return
                    yield wire.read_event(data)
        raise UpstreamFailed("an answer that was cut off")

    async def _chunks(
        self, events: AsyncIterator[wire.Event], num_answers: int
    ) -> AsyncGenerator[GenerationChunk, None]:
        """Yield the chunks of all answers. The last one, which has the usage, is held back until the stream ends,
        because the usage comes after it."""
        last: GenerationChunk | None = None
        usage: wire.Usage | None = None
        unfinished = set(range(num_answers))
        calls: defaultdict[int, CallNumbers] = defaultdict(CallNumbers)
        yield GenerationChunk(0)
        async for event in events:
            usage = event.usage or usage
            for choice in event.choices:
                chunk = wire.chunk_of(choice, num_answers, calls)
                if chunk.answer not in unfinished:
                    continue
                if chunk.finish_reason is not None:
                    unfinished.remove(chunk.answer)
                if unfinished or chunk.finish_reason is None:
                    yield chunk
                else:
                    last = chunk
        if last is None:
            raise UpstreamFailed("an answer without an end")
        yield replace(last, usage=wire.usage_of(usage))


async def _after(first: T, rest: AsyncIterator[T]) -> AsyncIterator[T]:
    yield first
    async for part in rest:
        yield part


@contextmanager
def _failures() -> Iterator[None]:
    """Turn errors of the network in the block into UpstreamFailed, whose text has no URL and no header."""
    try:
        yield
    except (httpx.HTTPError, httpx.StreamError) as error:
        raise UpstreamFailed(type(error).__name__) from error


@asynccontextmanager
async def open_upstreams(configs: Mapping[str, UpstreamConfig]) -> AsyncIterator[dict[str, UpstreamClient]]:
    """Yield a client for each upstream, by name. On exit their connections are closed."""
    clients = {name: UpstreamClient(name, config) for name, config in configs.items()}
    try:
        yield clients
    finally:
        for client in clients.values():
            await client.close()
