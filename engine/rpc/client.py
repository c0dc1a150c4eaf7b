"""EngineClient: the gateway's side of `engine.proto`. It is async because it runs in the gateway's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

import grpc
import structlog
from google.protobuf.message import Message

from engine.core.config import LaneGoals
from engine.core.types import AdapterHash, Lane, LaneMode, Request
from engine.pb import engine_pb2 as pb
from engine.pb import engine_pb2_grpc as pb_grpc
from engine.rpc.stream import Arrivals, EngineUnavailable, PlacedStream
from engine.rpc.target import EngineTarget, EngineTls
from engine.rpc.transport import open_channel
from engine.rpc.wire import GATEWAY, LANE_MODES, LANES, PROTOCOL, event_from_pb, request_to_pb

log = structlog.get_logger("engine.rpc.client")

RECONNECT_SECONDS = 0.1
MISMATCH_SECONDS = 5.0
"""Seconds until an engine is asked again that could not be used."""
STATS_SECONDS = 10.0
"""Timeout in seconds of calls that the engine answers between two steps: an engine whose step takes longer is treated
as unavailable."""
LOAD_SECONDS = 300.0
"""Default timeout in seconds for loading an adapter: for a large model on a slow disk, reading one takes minutes."""
UNLOAD_MARGIN_SECONDS = 30.0
"""Seconds that unloading may take beyond the drain time, to abort the remaining requests and free the adapter."""
REJECTIONS = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.UNKNOWN)
"""Status codes that mean that the engine rejects this adapter. UNKNOWN is an unexpected exception while the adapter was
read; the engine keeps running."""


class AdapterRejected(Exception):
    """The engine refused an adapter, or took too long to read it; the message tells the operator why."""


class LaneRejected(Exception):
    """The engine's scheduling policy has no separate lanes, so that no single lane can be paused or drained."""


class EngineMismatch(Exception):
    """The engine cannot be used by this gateway, and will not be usable until it is started differently."""


class EngineApi(Protocol):
    """The operations that the gateway needs from an engine, whether it is in another process or in this one."""

    info: pb.EngineInfo

    @property
    def ready(self) -> bool:
        """Return whether the client is connected to an engine whose model is loaded."""

    async def wait_ready(self) -> None:
        """Wait until `ready` is true, without a time limit."""

    def generate(self, request: Request, session: str = "") -> PlacedStream:
        """Submit a request at once and return the stream of its events. The caller must close the stream, for example
        with `contextlib.aclosing`. Requests with the same `session`, unless it is empty, go to the same engine where
        there are several. Raises EngineUnavailable if the engine is not ready."""

    def fate(self, life: str) -> pb.PreviousLife | None:
        """Return how the engine process with the id `life` ended, as far as its successor has told. None means that
        this is not known yet."""

    async def learn_fate(self, life: str) -> pb.PreviousLife:
        """Wait, without a time limit, until it is known how an engine process ended, and return it."""

    async def load_adapter(self, path: str) -> pb.AdapterInfo:
        """Load the adapter folder at `path`, so that requests may use the adapter, and return its hash, rank and sizes.

        Raises:
            AdapterRejected: the adapter cannot be served, or took too long to read.
            EngineUnavailable: the engine is gone or does not answer.
        """

    async def unload_adapter(self, adapter_hash: AdapterHash, drain_seconds: float) -> int:
        """Release an adapter. If no other gateway holds it, the engine unloads it once its requests have ended, and
        aborts those left after `drain_seconds`. Returns the number of aborted ones. Raises EngineUnavailable if the
        engine does not answer."""

    async def pin_adapter(self, adapter_hash: AdapterHash, pinned: bool) -> None:
        """Pin an adapter, so that it stays on the device once it has been loaded there, or unpin it.

        Raises:
            AdapterRejected: there is no such adapter, or pinning it would leave too little room for others.
            EngineUnavailable: the engine is gone or does not answer.
        """

    async def stats(self, *, check: bool = False) -> pb.EngineStats:
        """Return the engine's statistics. `check` adds the integrity check, which delays the steps while it looks at
        every page; what it finds is in `violations`. Raises EngineUnavailable if the engine is gone or does not
        answer, with `check` also if no step ends in time."""

    async def live_requests(self, limit: int) -> pb.RequestsResponse:
        """Return the number of live requests of all gateways, the tokens reserved by tenant, and at most `limit`
        requests in full. Raises EngineUnavailable if the engine is gone or does not answer."""

    async def cancel(self, request_ids: Iterable[str]) -> int:
        """End requests of any gateway, given their engine request ids, with an error; return how many were still live.
        Raises EngineUnavailable if the engine is gone or does not answer."""

    async def set_lane(self, lane: Lane, mode: LaneMode) -> None:
        """Set a lane's mode for all gateways, until the engine restarts. Raises LaneRejected if the engine's policy has
        no lanes, EngineUnavailable if the engine is gone or does not answer."""

    async def set_goals(self, lane: Lane, goals: LaneGoals) -> None:
        """Set a lane's goals for all gateways, until the engine restarts. Raises EngineUnavailable if the engine is
        gone or does not answer."""


class EngineClient:
    """An `EngineApi` over one gRPC channel. After `start`, it reconnects until it is closed. When a connection breaks,
    the streams of all requests in flight end with EngineLost.

    Args:
        address: where the engine listens, e.g. `unix:/path/to/socket`.
        tls: files for mutual TLS, without which an engine is reached on this machine only.
        on_connect: awaited after each connection, before the client counts as ready; it restores the adapters.
        load_seconds: timeout of `load_adapter` in seconds.
        on_news: called with each message of the engine's news. None means that the client does not watch them.
        on_lost: called when a connection has ended.
    """

    def __init__(
        self,
        address: str,
        on_connect: Callable[[], Awaitable[None]] | None = None,
        *,
        tls: EngineTls | None = None,
        load_seconds: float = LOAD_SECONDS,
        on_news: Callable[[pb.EngineNews], None] | None = None,
        on_lost: Callable[[], None] | None = None,
    ) -> None:
        self.info = pb.EngineInfo()
        self._address = address
        self.on_connect = on_connect
        self.load_seconds = load_seconds
        self.on_news = on_news
        self.on_lost = on_lost
        self._channel = open_channel(EngineTarget(address, tls))
        self._stub = pb_grpc.EngineStub(self._channel)
        self._ready = asyncio.Event()
        self._commands: asyncio.Queue[pb.Command] | None = None
        self._streams: dict[str, Arrivals] = {}
        self._identity: tuple[tuple[str, str], ...] = ()
        """gRPC metadata with which all calls of this session identify the gateway."""
        self._session: grpc.aio.StreamStreamCall | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def ready(self) -> bool:
        return self._ready.is_set()

    async def start(self) -> None:
        """Begin to connect, and to reconnect, in a background task; `wait_ready` waits for the connection."""
        self._task = asyncio.create_task(self._stay_connected(), name="engine-client")

    async def wait_ready(self) -> None:
        await self._ready.wait()

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        await self._channel.close()

    @property
    def num_streams(self) -> int:
        """Number of this gateway's requests that the engine has not finished."""
        return len(self._streams)

    def generate(self, request: Request, session: str = "") -> Arrivals:
        return self.submit(request)

    def submit(
        self, request: Request, prefix_keys: Sequence[int] = (), on_end: Callable[[], None] | None = None
    ) -> Arrivals:
        """Submit a request as `generate` does.

        Args:
            prefix_keys: keys of the prompt's prefixes, which the engine passes on to the routers of other gateways.
            on_end: called once when the engine no longer has the request.
        """
        if not self.ready or self._commands is None:
            raise EngineUnavailable("the engine is not ready")
        command = pb.Command(submit=request_to_pb(request))
        command.submit.prefix_keys.extend(prefix_keys)
        abandon = partial(self._abort, request.id, self._commands)
        arrivals = self._streams[request.id] = Arrivals(abandon, self.info.life, on_end)
        self._commands.put_nowait(command)
        return arrivals

    def hand_over(self, loss: EngineUnavailable) -> None:
        """Abort all requests of this gateway in the engine, and end their streams with `loss`."""
        streams, self._streams = self._streams, {}
        for request_id, stream in streams.items():
            stream.lose(loss)
            if self._commands is not None:
                self._commands.put_nowait(pb.Command(abort=pb.Abort(request_id=request_id)))

    async def check_connected(self) -> None:
        """Raise EngineUnavailable unless the engine process that this client has connected to still answers."""
        try:
            info = await self._ask(self._stub.Describe, pb.DescribeRequest(), STATS_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise EngineUnavailable(error.details() or "") from error
        if info.life != self.info.life:
            raise EngineUnavailable("another engine process has taken the place of this one")

    def disconnect(self) -> None:
        """End the present connection, and with it all streams; then connect again."""
        if self._session is not None:
            self._session.cancel()

    def fate(self, life: str) -> pb.PreviousLife | None:
        if not self.ready:
            return None
        previous = self.info.previous
        # Otherwise the connection broke, or more processes have ended since; the request is not blamed.
        return previous if previous.life == life else pb.PreviousLife(life=life)

    async def learn_fate(self, life: str) -> pb.PreviousLife:
        while (fate := self.fate(life)) is None:
            await self._ready.wait()
        return fate

    async def drain(self, draining: bool, *, stop: bool = False, seconds: float = 0.0) -> None:
        """Begin or end draining the engine, for all gateways. With `stop`, its process ends once it has no requests
        left, or after `seconds`. Raises EngineUnavailable if the engine is gone or does not answer."""
        try:
            await self._ask(
                self._stub.Drain, pb.DrainRequest(draining=draining, stop=stop, seconds=seconds), STATS_SECONDS
            )
        except grpc.aio.AioRpcError as error:
            raise EngineUnavailable(error.details() or "") from error

    async def load_adapter(self, path: str) -> pb.AdapterInfo:
        try:
            return await self._ask(self._stub.LoadAdapter, pb.LoadAdapterRequest(path=path), self.load_seconds)
        except grpc.aio.AioRpcError as error:
            if error.code() in REJECTIONS:
                raise AdapterRejected(error.details() or "") from error
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise AdapterRejected(f"the engine had not read it after {self.load_seconds:g} s") from error
            raise EngineUnavailable(error.details() or "") from error

    async def unload_adapter(self, adapter_hash: AdapterHash, drain_seconds: float) -> int:
        request = pb.UnloadAdapterRequest(adapter=adapter_hash, drain_seconds=drain_seconds)
        try:
            return (await self._ask(self._stub.UnloadAdapter, request, drain_seconds + UNLOAD_MARGIN_SECONDS)).aborted
        except grpc.aio.AioRpcError as error:
            raise EngineUnavailable(error.details() or "") from error

    async def pin_adapter(self, adapter_hash: AdapterHash, pinned: bool) -> None:
        request = pb.PinAdapterRequest(adapter=adapter_hash, pinned=pinned)
        try:
            await self._ask(self._stub.PinAdapter, request, STATS_SECONDS)
        except grpc.aio.AioRpcError as error:
            if error.code() in REJECTIONS:
                raise AdapterRejected(error.details() or "") from error
            raise EngineUnavailable(error.details() or "") from error

    async def stats(self, *, check: bool = False) -> pb.EngineStats:
        try:
            return await self._ask(self._stub.Stats, pb.StatsRequest(check=check), STATS_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise EngineUnavailable(error.details() or "") from error

    async def live_requests(self, limit: int) -> pb.RequestsResponse:
        try:
            return await self._ask(self._stub.Requests, pb.RequestsRequest(limit=limit), STATS_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise EngineUnavailable(error.details() or "") from error

    async def cancel(self, request_ids: Iterable[str]) -> int:
        request = pb.CancelRequest(request_ids=request_ids)
        try:
            return (await self._ask(self._stub.Cancel, request, STATS_SECONDS)).cancelled
        except grpc.aio.AioRpcError as error:
            raise EngineUnavailable(error.details() or "") from error

    async def set_lane(self, lane: Lane, mode: LaneMode) -> None:
        request = pb.SetLaneRequest(lane=LANES[lane], mode=LANE_MODES[mode])
        try:
            await self._ask(self._stub.SetLane, request, STATS_SECONDS)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                raise LaneRejected(error.details() or "") from error
            raise EngineUnavailable(error.details() or "") from error

    async def set_goals(self, lane: Lane, goals: LaneGoals) -> None:
        request = pb.SetGoalsRequest(
            lane=LANES[lane],
            ttft_seconds=goals.ttft_s,
            itl_seconds=goals.itl_s,
            attainment=goals.attainment,
            max_wait_seconds=goals.max_wait_s,
        )
        try:
            await self._ask(self._stub.SetGoals, request, STATS_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise EngineUnavailable(error.details() or "") from error

    def _ask(self, call: Callable[..., Awaitable[Any]], request: Message, seconds: float) -> Awaitable[Any]:
        return call(request, timeout=seconds, metadata=self._identity)

    async def _stay_connected(self) -> None:
        while True:
            try:
                await self._connect_once()
            except grpc.aio.AioRpcError as error:
                log.warning("engine_lost", reason=error.details())
            except EngineUnavailable as error:  # from on_connect: the engine has gone again
                log.warning("engine_lost", reason=str(error))
            except EngineMismatch as error:
                log.error("engine_refused", reason=str(error))
                await asyncio.sleep(MISMATCH_SECONDS)
            except asyncio.CancelledError:
                if (task := asyncio.current_task()) is None or task.cancelling():
                    raise
                log.warning("engine_lost", reason="the gateway has dropped the connection")  # by `disconnect`
            except Exception:  # a bug, for example in on_connect: without another attempt, no request is served again
                log.exception("engine_session_failed")
            finally:
                self._lose()
            await asyncio.sleep(RECONNECT_SECONDS)

    async def _connect_once(self) -> None:
        """Wait for the engine, open a session, await `on_connect`, become ready and dispatch events until it ends."""
        self.info.CopyFrom(await self._stub.Describe(pb.DescribeRequest(), wait_for_ready=True))
        if self.info.protocol != PROTOCOL:
            versions = f"version {self.info.protocol} of the protocol, and this gateway speaks {PROTOCOL}"
            raise EngineMismatch(f"the engine at {self._address} speaks {versions}; install the same release on both")
        commands: asyncio.Queue[pb.Command] = asyncio.Queue()
        self._identity = ((GATEWAY, uuid.uuid4().hex),)
        call = self._session = self._stub.Session(metadata=self._identity)
        tasks = [asyncio.create_task(self._send(call, commands))]
        if self.on_news is not None:
            tasks.append(asyncio.create_task(self._watch(self.on_news)))
        try:
            if self.on_connect is not None:
                await self.on_connect()
            self._commands = commands
            self._ready.set()
            async for message in call:
                self._dispatch(message)
        finally:
            for task in tasks:
                task.cancel()
            call.cancel()
            if self.on_lost is not None:
                self.on_lost()

    async def _watch(self, on_news: Callable[[pb.EngineNews], None]) -> None:
        """Pass on the engine's news until the connection ends."""
        try:
            async for news in self._stub.Watch(pb.WatchRequest(), metadata=self._identity):
                on_news(news)
        except grpc.aio.AioRpcError as error:
            log.debug("engine_news_ended", reason=error.details())

    async def _send(self, call: grpc.aio.StreamStreamCall, commands: asyncio.Queue[pb.Command]) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # the reader sees the broken stream
            while True:
                waiting = [await commands.get()]
                while not commands.empty():
                    waiting.append(commands.get_nowait())
                await call.write(pb.Commands(commands=waiting))

    def _dispatch(self, message: pb.StepEvents) -> None:
        for told in message.events:
            stream = self._streams.get(told.request_id)
            if stream is None:
                continue
            event = event_from_pb(told)
            stream.put(event)
            if event.finish_reason is not None:
                del self._streams[told.request_id]

    def _abort(self, request_id: str, commands: asyncio.Queue[pb.Command]) -> None:
        """Drop a request's stream and abort it through `commands`, the queue of its session, unless it has ended."""
        if self._streams.pop(request_id, None) is not None:
            commands.put_nowait(pb.Command(abort=pb.Abort(request_id=request_id)))

    def _lose(self) -> None:
        """Mark the client as not ready and end every open stream with EngineLost."""
        self._ready.clear()
        self._commands = None
        for stream in self._streams.values():
            stream.lose()
        self._streams.clear()
