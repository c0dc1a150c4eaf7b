"""Implements `engine.proto`: passes the commands of gateway sessions to the engine, and its events to the sessions."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import grpc
import structlog

from engine.core.commit.apply import cancel, set_goals, set_mode
from engine.core.config import LaneGoals
from engine.core.memory.adapters import HostAdapter
from engine.core.messages.commands import Abort, FetchKv, Submit
from engine.core.messages.requests import Lane, Request, TokenEvent
from engine.engine import Engine
from engine.inbox import EngineStopped
from engine.pb import engine_pb2 as pb
from engine.pb import engine_pb2_grpc as pb_grpc
from engine.process.load_attempts import LoadAttempts
from engine.rpc.adapter_refs import Holders
from engine.rpc.news import NEWS_SECONDS, Draining, NewsFeed, PrefixLog
from engine.rpc.session import MAX_UNREAD, GatewaySession
from engine.rpc.snapshot import live_requests, snapshot
from engine.rpc.wire import GATEWAY, adapter_to_pb, lane_mode_from_pb, request_from_pb

log = structlog.get_logger("engine.rpc.service")

MAX_GATEWAYS = 128
"""Maximum number of gateways with a session. Each holds three threads, for its events, its commands and its news, which
cost 0.14 MiB and, without requests, 0.2 % of a core: with 128 gateways, a quarter of one."""
FULL = f"the engine serves {MAX_GATEWAYS} gateways already, and no more"
UNREAD = f"the gateway left {MAX_UNREAD} events unread, so that the engine ended its session and cancelled its requests"


class EngineService(pb_grpc.EngineServicer):
    """Thread-safe gRPC service of one engine. The step loop calls `deliver`; gRPC's threads call all other methods."""

    def __init__(self, engine: Engine, info: pb.EngineInfo, attempts: LoadAttempts | None = None) -> None:
        """`info` is what `Describe` returns. `attempts` counts adapter loads during which the engine process ended, so
        that an adapter that kills it is refused. None means that they are not counted."""
        self._engine = engine
        self._info = info
        self._attempts = attempts or LoadAttempts(None)
        self._lock = threading.Lock()
        self._owner: dict[str, GatewaySession] = {}
        """Request id -> session that submitted the request."""
        self._sessions: set[GatewaySession] = set()
        self._holders = Holders()
        self.draining = Draining(engine)
        self._prefixes = PrefixLog()

    def deliver(self, events: list[TokenEvent]) -> None:
        """Queue the events of one step at the sessions that submitted the requests, with one call for each session, and
        forget the requests that have ended."""
        theirs: dict[GatewaySession, list[TokenEvent]] = {}
        with self._lock:
            for event in events:
                session = self._owner.get(event.request_id)
                if session is not None:
                    theirs.setdefault(session, []).append(event)
                if event.finish_reason is not None:
                    self._owner.pop(event.request_id, None)
        for session, own in theirs.items():
            if not session.put(own):
                log.error("gateway_cut_off", gateway=session.peer, reason=UNREAD)
                self._abandon(session)

    def Session(  # noqa: N802
        self, request_iterator: Iterator[pb.Commands], context: grpc.ServicerContext
    ) -> Iterator[pb.StepEvents]:
        session = GatewaySession(context.peer())
        if not self._admit(session):
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, FULL)
        context.add_callback(session.end)
        reader = threading.Thread(target=self._read, args=(session, request_iterator), daemon=True)
        reader.start()
        try:
            yield from session.messages()
            if session.overflowed:  # the gateway learns of it when it reads again
                context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, UNREAD)
        finally:
            self._abandon(session)
            self._holders.leave(_gateway(context))
            with self._lock:
                self._sessions.discard(session)

    def Describe(self, request: pb.DescribeRequest, context: grpc.ServicerContext) -> pb.EngineInfo:  # noqa: N802
        with self._lock:
            is_full = len(self._sessions) >= MAX_GATEWAYS
        if is_full:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, FULL)
        return self._info

    def LoadAdapter(  # noqa: N802
        self, request: pb.LoadAdapterRequest, context: grpc.ServicerContext
    ) -> pb.AdapterInfo:
        started = self._engine.clock()
        try:
            host = self._load(request.path, _gateway(context))
        except EngineStopped as error:
            context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        except TimeoutError:
            context.abort(grpc.StatusCode.UNAVAILABLE, "no step has ended for a while, so the adapter was not taken up")
        except (ValueError, OSError) as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        return adapter_to_pb(host, self._engine.clock() - started)

    def UnloadAdapter(  # noqa: N802
        self, request: pb.UnloadAdapterRequest, context: grpc.ServicerContext
    ) -> pb.UnloadAdapterResponse:
        if not self._holders.let_go(request.adapter, _gateway(context)):
            return pb.UnloadAdapterResponse()
        return pb.UnloadAdapterResponse(aborted=self._engine.unload_adapter(request.adapter, request.drain_seconds))

    def PinAdapter(  # noqa: N802
        self, request: pb.PinAdapterRequest, context: grpc.ServicerContext
    ) -> pb.PinAdapterResponse:
        try:
            self._engine.pin_adapter(request.adapter, request.pinned)
        except EngineStopped as error:
            context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        except ValueError as error:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        return pb.PinAdapterResponse()

    def Stats(self, request: pb.StatsRequest, context: grpc.ServicerContext) -> pb.EngineStats:  # noqa: N802
        engine = self._engine
        ask = engine.inspect if request.check else engine.look
        return ask(lambda state: snapshot(state, engine.step_seconds, engine.clock(), check=request.check))

    def Requests(  # noqa: N802
        self, request: pb.RequestsRequest, context: grpc.ServicerContext
    ) -> pb.RequestsResponse:
        engine = self._engine
        return engine.look(lambda state: live_requests(state, engine.clock(), request.limit))

    def Cancel(self, request: pb.CancelRequest, context: grpc.ServicerContext) -> pb.CancelResponse:  # noqa: N802
        count = self._engine.inspect(lambda state: cancel(state, request.request_ids))
        return pb.CancelResponse(cancelled=count)

    def SetLane(self, request: pb.SetLaneRequest, context: grpc.ServicerContext) -> pb.SetLaneResponse:  # noqa: N802
        lane, mode = Lane(request.lane), lane_mode_from_pb(request.mode)
        self._engine.inspect(lambda state: set_mode(state, lane, mode))
        return pb.SetLaneResponse()

    def SetGoals(self, request: pb.SetGoalsRequest, context: grpc.ServicerContext) -> pb.SetGoalsResponse:  # noqa: N802
        try:
            goals = LaneGoals(request.ttft_seconds, request.itl_seconds, request.attainment, request.max_wait_seconds)
        except ValueError as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        self._engine.inspect(lambda state: set_goals(state, Lane(request.lane), goals))
        return pb.SetGoalsResponse()

    def Watch(self, request: pb.WatchRequest, context: grpc.ServicerContext) -> Iterator[pb.EngineNews]:  # noqa: N802
        feed = NewsFeed(self._engine, self.draining, self._prefixes, self._info.page_bytes)
        ended = threading.Event()
        context.add_callback(ended.set)
        while not ended.wait(NEWS_SECONDS if feed.has_begun else 0):
            yield feed.next()

    def Drain(self, request: pb.DrainRequest, context: grpc.ServicerContext) -> pb.DrainResponse:  # noqa: N802
        if request.draining:
            self.draining.begin(stop=request.stop, seconds=request.seconds)
        elif not self.draining.end():
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "the engine was told to end by a signal")
        return pb.DrainResponse()

    def _load(self, path: str, gateway: str) -> HostAdapter:
        """Load the adapter at `path`, again if it was unloaded meanwhile, record that `gateway` holds it, and return
        it. Raises ValueError if it is refused, OSError for its files, TimeoutError if no step ended in time."""
        while True:
            began = self._holders.now()
            with self._attempts.counted(path):
                host = self._engine.load_adapter(path)
            if self._holders.hold(host.adapter_hash, gateway, began):
                return host

    def _read(self, session: GatewaySession, messages: Iterator[pb.Commands]) -> None:
        try:
            for message in messages:
                for command in message.commands:
                    self._take(session, command)
        except grpc.RpcError:
            pass  # the stream broke: its callback ends the session, which aborts its requests
        finally:
            session.end()

    def _take(self, session: GatewaySession, command: pb.Command) -> None:
        if command.HasField("abort"):
            with self._lock:
                session.fetches.discard(command.abort.request_id)
            self._engine.inbox.put(Abort(command.abort.request_id))
            return
        if command.HasField("fetch_kv"):
            self._fetch(session, request_from_pb(command.fetch_kv, self._engine.clock()))
            return
        request = request_from_pb(command.submit, self._engine.clock())
        with self._lock:
            if session.ended:  # the gateway left meanwhile, so that no command would ever abort this request
                return
            session.fetches.discard(request.id)
            if self._owner.setdefault(request.id, session) is session:
                session.expect(request.id, whole=command.submit.whole)
            self._engine.inbox.put(Submit(request))
        self._prefixes.add(command.submit.prefix_keys)

    def _fetch(self, session: GatewaySession, request: Request) -> None:
        """Have the engine fetch the KV of a request that will be submitted later. The end of the session ends the
        fetch. Does nothing if the session has ended already."""
        with self._lock:
            if not session.ended:
                session.fetches.add(request.id)
                self._engine.inbox.put(FetchKv(request))

    def _admit(self, session: GatewaySession) -> bool:
        """Record the new session of a gateway. Return False, and record nothing, if `MAX_GATEWAYS` gateways have one
        already."""
        with self._lock:
            if len(self._sessions) >= MAX_GATEWAYS:
                return False
            self._sessions.add(session)
            return True

    def _abandon(self, session: GatewaySession) -> None:
        """Abort the requests and end the fetches of a session that has ended."""
        with self._lock:
            session.ended = True
            orphans = [request_id for request_id, owner in self._owner.items() if owner is session]
            for request_id in orphans:
                del self._owner[request_id]
            orphans += session.fetches - self._owner.keys()  # not of those that a later session has submitted
        for request_id in orphans:
            self._engine.inbox.put(Abort(request_id))


def _gateway(context: grpc.ServicerContext) -> str:
    return str(dict(context.invocation_metadata()).get(GATEWAY, ""))
