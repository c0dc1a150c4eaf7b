"""EngineLink: the connection of a gateway to one engine. It carries the requests and their events."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import grpc
import structlog
from google.protobuf.message import Message

from engine.core.messages.requests import Request
from engine.pb import engine_pb2 as pb
from engine.pb import engine_pb2_grpc as pb_grpc
from engine.process.tasks import end_task
from engine.rpc.api import EngineMismatch
from engine.rpc.outage import OutageLog
from engine.rpc.stream import Arrivals, EngineUnavailable
from engine.rpc.target import UNIX, EngineTarget
from engine.rpc.transport import ChannelFactory
from engine.rpc.wire import GATEWAY, PROTOCOL, event_from_pb, request_to_pb

log = structlog.get_logger("engine.rpc.link")

RECONNECT_SECONDS = 0.1
"""Seconds between the end of a connection and the next attempt, and between attempts over a Unix socket."""
UNREACHABLE_SECONDS = 1.0
"""Seconds between attempts over TCP, each of which may ask a name server."""
REFUSED_SECONDS = 5.0
"""Seconds until the next attempt where only an operator can help, as with another protocol or a wrong certificate."""
DESCRIBE_SECONDS = 10.0
"""Timeout in seconds of the first call, which the engine answers without waiting for a step."""

Refusals = Mapping[grpc.StatusCode, type[Exception]]
NO_REFUSALS: Refusals = MappingProxyType({})


class Unreachable(Exception):
    """The engine does not answer; the message is gRPC's description."""


class EngineLink:
    """Connection to one engine, which reconnects, with a new channel, until it is closed. When it breaks, the streams
    in flight end with EngineLost. Raises ValueError if TLS files cannot be used.

    Args:
        on_news: called with each status report (see `engine.rpc.news`). None means that none are asked for.
        on_lost: called when a connection has ended.
    """

    def __init__(
        self,
        target: EngineTarget,
        *,
        on_news: Callable[[pb.EngineNews], None] | None = None,
        on_lost: Callable[[], None] | None = None,
    ) -> None:
        self.info = pb.EngineInfo()
        self.mismatch = ""
        """Why this gateway cannot use the engine that it has reached; empty if it can, or has not reached it."""
        self.on_connect: Callable[[], Awaitable[None]] | None = None
        """Awaited after each connection, before the link is ready; restores the adapters."""
        self.on_news = on_news
        self.on_lost = on_lost
        self._target = target
        self._channels = ChannelFactory(target)
        self._outage = OutageLog(target)
        self._ready = asyncio.Event()
        self._stub: pb_grpc.EngineStub | None = None
        """Methods of the engine; None means that there is no connection."""
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
        """Begin to connect to the engine, and to reconnect, in a background task; `wait_ready` waits for the
        connection."""
        self._task = asyncio.create_task(self._stay_connected(), name="engine-link")

    async def wait_ready(self) -> None:
        await self._ready.wait()

    async def close(self) -> None:
        await end_task(self._task)

    @property
    def num_streams(self) -> int:
        """Number of this gateway's requests that the engine has not finished."""
        return len(self._streams)

    def submit(
        self, request: Request, prefix_keys: Sequence[int] = (), on_end: Callable[[], None] | None = None
    ) -> Arrivals:
        """Submit a request at once and return the stream of its events, which the caller must close. The engine passes
        `prefix_keys` to other routers. Calls `on_end` once the engine no longer has it. Raises EngineUnavailable."""
        if not self.ready or self._commands is None:
            raise EngineUnavailable("the engine is not ready")
        command = pb.Command(submit=request_to_pb(request))
        command.submit.prefix_keys.extend(prefix_keys)
        abandon = partial(self._abort, request.id, self._commands)
        arrivals = self._streams[request.id] = Arrivals(abandon, self.info.life, on_end)
        self._commands.put_nowait(command)
        return arrivals

    def fetch_kv(self, request: Request) -> None:
        """Have the engine begin to fetch KV pages of a request from its `kv_source`. The request itself is submitted
        later, with the same id. Raises EngineUnavailable if the engine is not ready."""
        if not self.ready or self._commands is None:
            raise EngineUnavailable("the engine is not ready")
        self._commands.put_nowait(pb.Command(fetch_kv=request_to_pb(request)))

    def drop_kv(self, request_id: str) -> None:
        """End a fetch that `fetch_kv` has begun and whose request will not be submitted."""
        if self._commands is not None:
            self._commands.put_nowait(pb.Command(abort=pb.Abort(request_id=request_id)))

    def hand_over(self, loss: EngineUnavailable) -> None:
        """Abort all requests of this gateway in the engine, and end their streams with `loss`, so that they continue in
        other engines. The pool calls this when the engine is drained or removed."""
        streams, self._streams = self._streams, {}
        for request_id, stream in streams.items():
            stream.lose(loss)
            if self._commands is not None:
                self._commands.put_nowait(pb.Command(abort=pb.Abort(request_id=request_id)))

    def disconnect(self) -> None:
        """End the present connection, and with it all streams, then connect again. The pool calls this when the engine
        hangs, so that its requests continue in other engines."""
        if self._session is not None:
            self._session.cancel()

    async def ask(self, method: str, request: Message, seconds: float, refusals: Refusals = NO_REFUSALS) -> Any:
        """Call a unary method of the engine, and return its answer. Raises EngineUnavailable if there is none within
        `seconds`, and the exception to which `refusals` maps a status code."""
        if self._stub is None:
            raise EngineUnavailable("the engine is not connected")
        try:
            return await getattr(self._stub, method)(request, timeout=seconds, metadata=self._identity)
        except grpc.aio.AioRpcError as error:
            raise refusals.get(error.code(), EngineUnavailable)(error.details() or "") from error
        except asyncio.CancelledError:
            if _is_cancelled():
                raise
            raise EngineUnavailable("the connection to the engine ended") from None  # the channel was closed

    async def _stay_connected(self) -> None:
        pause = 0.0
        while not _is_cancelled():  # if a call fails as it is cancelled, gRPC raises only the failure
            await asyncio.sleep(pause)
            pause = await self._stay_connected_once()

    async def _stay_connected_once(self) -> float:
        """Connect and stay connected until the connection ends. Return the seconds until the next attempt."""
        channel = self._channels.open()
        try:
            await self._use(pb_grpc.EngineStub(channel))
        except Unreachable as error:
            self.mismatch = ""
            return self._pause(str(error))
        except EngineMismatch as error:
            self._refuse(str(error))
            return REFUSED_SECONDS
        except grpc.aio.AioRpcError as error:
            self._note_loss(error.details() or error.code().name)
        except EngineUnavailable as error:  # from on_connect: the engine has gone again
            self._note_loss(str(error))
        except asyncio.CancelledError:
            if _is_cancelled():
                raise
            self._note_loss("the gateway has dropped the connection")  # by `disconnect`
        except Exception:  # a bug, for example in on_connect: without another attempt, no request is served again
            log.exception("engine_session_failed")
        finally:
            self._lose()
            await channel.close()
        return RECONNECT_SECONDS

    async def _use(self, stub: pb_grpc.EngineStub) -> None:
        """Ask the engine what it is, open a session, await `on_connect`, become ready and dispatch events until the
        session ends."""
        self.info.CopyFrom(await self._describe(stub))
        if self.info.protocol != PROTOCOL:
            versions = f"version {self.info.protocol} of the protocol, and this gateway speaks {PROTOCOL}"
            raise EngineMismatch(f"the engine speaks {versions}; install the same release on both")
        commands: asyncio.Queue[pb.Command] = asyncio.Queue()
        self._stub, self._identity = stub, ((GATEWAY, uuid.uuid4().hex),)
        call = self._session = stub.Session(metadata=self._identity)
        tasks = [asyncio.create_task(self._send(call, commands))]
        if self.on_news is not None:
            tasks.append(asyncio.create_task(self._watch(stub, self.on_news)))
        try:
            if self.on_connect is not None:
                await self.on_connect()
            self._commands, self.mismatch = commands, ""
            self._ready.set()
            async for message in call:
                self._dispatch(message)
        finally:
            for task in tasks:
                task.cancel()
            call.cancel()
            if self.on_lost is not None:
                self.on_lost()

    async def _describe(self, stub: pb_grpc.EngineStub) -> pb.EngineInfo:
        """Return the engine's description of itself. Raises Unreachable if it does not answer, EngineMismatch if it has
        no room for another gateway."""
        try:
            info = await stub.Describe(pb.DescribeRequest(), timeout=DESCRIBE_SECONDS)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise Unreachable(error.details() or error.code().name) from error
            self._outage.end()
            raise EngineMismatch(error.details() or "") from error
        self._outage.end()
        return info

    async def _watch(self, stub: pb_grpc.EngineStub, on_news: Callable[[pb.EngineNews], None]) -> None:
        """Pass the engine's status reports (see `engine.rpc.news`) to `on_news` until the connection ends."""
        try:
            async for news in stub.Watch(pb.WatchRequest(), metadata=self._identity):
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
        """Drop a request's stream and, unless the request has ended, abort it in the engine through `commands`, the
        command queue of the session in which it was submitted."""
        if self._streams.pop(request_id, None) is not None:
            commands.put_nowait(pb.Command(abort=pb.Abort(request_id=request_id)))

    def _lose(self) -> None:
        """Mark the link as not ready and end every open stream with EngineLost."""
        self._ready.clear()
        self._stub = self._commands = self._session = None
        for stream in self._streams.values():
            stream.lose()
        self._streams.clear()

    def _pause(self, reason: str) -> float:
        """Record that the engine could not be reached; return the seconds until the next attempt."""
        if self._outage.note(reason).lasts:
            return REFUSED_SECONDS
        return RECONNECT_SECONDS if self._target.address.startswith(UNIX) else UNREACHABLE_SECONDS

    def _refuse(self, problem: str) -> None:
        """Record in `mismatch` why the engine cannot be used, and log it unless it is the reason recorded last."""
        if problem != self.mismatch:
            log.error("engine_refused", address=self._target.address, reason=problem)
        self.mismatch = problem

    def _note_loss(self, reason: str) -> None:
        log.warning("engine_lost", address=self._target.address, reason=reason)


def _is_cancelled() -> bool:
    """Return whether the current task was cancelled, as opposed to a gRPC call that it awaits."""
    return (task := asyncio.current_task()) is None or bool(task.cancelling())
