"""The services loralane.v1.EngineAdmin, LaneAdmin and RequestAdmin, for administrators' keys."""

from __future__ import annotations

import msgspec
from grpc.aio import ServicerContext as Context

from gateway.core.errors import invalid_request
from gateway.core.tenants import Authenticator
from gateway.engines.replica import EngineOverview
from gateway.observe.live import LaneStatus, LiveRequest
from gateway.observe.model_operations import ENGINE_ACTIONS, MAX_RESTART_SECONDS, MODES, RESTART_SECONDS
from gateway.observe.operations import Operations
from gateway.pb import operations_pb2 as pb
from gateway.pb import operations_pb2_grpc as pb_grpc
from gateway.rpc.calls import RpcCall, respond_to_admin


class LaneAdminService(pb_grpc.LaneAdminServicer):
    def __init__(self, operations: Operations, keys: Authenticator) -> None:
        self._operations = operations
        self._keys = keys

    async def List(self, request: pb.ListLanesRequest, context: Context) -> pb.ListLanesResponse:  # noqa: N802
        async def work(call: RpcCall) -> pb.ListLanesResponse:
            return pb.ListLanesResponse(lanes=map(_lane, await self._operations.lanes(request.model)))

        return await respond_to_admin(context, self._keys, work)

    async def Set(self, request: pb.SetLaneRequest, context: Context) -> pb.LaneStatus:  # noqa: N802
        async def work(call: RpcCall) -> pb.LaneStatus:
            if request.action not in MODES:
                raise invalid_request(f"action must be one of {', '.join(MODES)}", "action")
            return _lane(await self._operations.set_mode(request.lane, request.action, request.model))

        return await respond_to_admin(context, self._keys, work)


class EngineAdminService(pb_grpc.EngineAdminServicer):
    def __init__(self, operations: Operations, keys: Authenticator) -> None:
        self._operations = operations
        self._keys = keys

    async def List(self, request: pb.ListEnginesRequest, context: Context) -> pb.ListEnginesResponse:  # noqa: N802
        async def work(call: RpcCall) -> pb.ListEnginesResponse:
            return pb.ListEnginesResponse(engines=map(_engine, self._operations.engines(request.model)))

        return await respond_to_admin(context, self._keys, work)

    async def Set(self, request: pb.SetEngineRequest, context: Context) -> pb.EngineOverview:  # noqa: N802
        async def work(call: RpcCall) -> pb.EngineOverview:
            if request.action not in ENGINE_ACTIONS:
                raise invalid_request(f"action must be one of {', '.join(ENGINE_ACTIONS)}", "action")
            seconds = request.seconds if request.HasField("seconds") else RESTART_SECONDS
            if not 0 <= seconds <= MAX_RESTART_SECONDS:
                raise invalid_request(f"seconds must be from 0 to {MAX_RESTART_SECONDS:g}", "seconds")
            change = self._operations.change_engine(request.engine, request.action, request.model, seconds)
            return _engine(await change)

        return await respond_to_admin(context, self._keys, work)

    async def Add(self, request: pb.AddEngineRequest, context: Context) -> pb.EngineOverview:  # noqa: N802
        async def work(call: RpcCall) -> pb.EngineOverview:
            added = self._operations.add_engine(request.engine, request.address, request.model, request.role)
            return _engine(await added)

        return await respond_to_admin(context, self._keys, work)

    async def Remove(self, request: pb.RemoveEngineRequest, context: Context) -> pb.RemoveEngineResponse:  # noqa: N802
        async def work(call: RpcCall) -> pb.RemoveEngineResponse:
            await self._operations.remove_engine(request.engine, request.model)
            return pb.RemoveEngineResponse()

        return await respond_to_admin(context, self._keys, work)


class RequestAdminService(pb_grpc.RequestAdminServicer):
    def __init__(self, operations: Operations, keys: Authenticator) -> None:
        self._operations = operations
        self._keys = keys

    async def List(self, request: pb.ListRequestsRequest, context: Context) -> pb.ListRequestsResponse:  # noqa: N802
        async def work(call: RpcCall) -> pb.ListRequestsResponse:
            live = await self._operations.requests(request.model)
            return pb.ListRequestsResponse(requests=map(_request, live.requests), total=live.total)

        return await respond_to_admin(context, self._keys, work)

    async def Cancel(self, request: pb.CancelRequestRequest, context: Context) -> pb.LiveRequest:  # noqa: N802
        async def work(call: RpcCall) -> pb.LiveRequest:
            return _request(await self._operations.cancel(request.id))

        return await respond_to_admin(context, self._keys, work)


def _engine(overview: EngineOverview) -> pb.EngineOverview:
    return pb.EngineOverview(**msgspec.structs.asdict(overview))


def _lane(status: LaneStatus) -> pb.LaneStatus:
    return pb.LaneStatus(**msgspec.to_builtins(status))


def _request(request: LiveRequest) -> pb.LiveRequest:
    return pb.LiveRequest(**msgspec.structs.asdict(request))
