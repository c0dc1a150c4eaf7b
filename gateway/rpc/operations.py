"""The services loralane.v1.EngineAdmin, LaneAdmin and RequestAdmin, for administrators' keys."""

from __future__ import annotations

import msgspec

from gateway.api_schema.engines import MAX_RESTART_SECONDS, RESTART_SECONDS, EngineOverview
from gateway.api_schema.traffic import LaneStatus, LiveRequest
from gateway.core.errors import invalid_request
from gateway.observe.model_operations import ENGINE_ACTIONS, MODES
from gateway.observe.operations import Operations
from gateway.pb import operations_pb2 as pb
from gateway.pb import operations_pb2_grpc as pb_grpc
from gateway.rpc.calls import RpcCall


class LaneAdminService(pb_grpc.LaneAdminServicer):
    def __init__(self, operations: Operations) -> None:
        self._operations = operations

    async def List(self, request: pb.ListLanesRequest, call: RpcCall) -> pb.ListLanesResponse:  # noqa: N802
        return pb.ListLanesResponse(lanes=map(_lane, await self._operations.lanes(request.model)))

    async def Set(self, request: pb.SetLaneRequest, call: RpcCall) -> pb.LaneStatus:  # noqa: N802
        if request.action not in MODES:
            raise invalid_request(f"action must be one of {', '.join(MODES)}", "action")
        return _lane(await self._operations.set_mode(request.lane, request.action, request.model))


class EngineAdminService(pb_grpc.EngineAdminServicer):
    def __init__(self, operations: Operations) -> None:
        self._operations = operations

    async def List(self, request: pb.ListEnginesRequest, call: RpcCall) -> pb.ListEnginesResponse:  # noqa: N802
        return pb.ListEnginesResponse(engines=map(_engine, self._operations.engines(request.model)))

    async def Set(self, request: pb.SetEngineRequest, call: RpcCall) -> pb.EngineOverview:  # noqa: N802
        if request.action not in ENGINE_ACTIONS:
            raise invalid_request(f"action must be one of {', '.join(ENGINE_ACTIONS)}", "action")
        seconds = request.seconds if request.HasField("seconds") else RESTART_SECONDS
        if not 0 <= seconds <= MAX_RESTART_SECONDS:
            raise invalid_request(f"seconds must be from 0 to {MAX_RESTART_SECONDS:g}", "seconds")
        change = self._operations.change_engine(request.engine, request.action, request.model, seconds)
        return _engine(await change)

    async def Add(self, request: pb.AddEngineRequest, call: RpcCall) -> pb.EngineOverview:  # noqa: N802
        added = self._operations.add_engine(request.engine, request.address, request.model, request.role)
        return _engine(await added)

    async def Remove(self, request: pb.RemoveEngineRequest, call: RpcCall) -> pb.RemoveEngineResponse:  # noqa: N802
        await self._operations.remove_engine(request.engine, request.model)
        return pb.RemoveEngineResponse()


class RequestAdminService(pb_grpc.RequestAdminServicer):
    def __init__(self, operations: Operations) -> None:
        self._operations = operations

    async def List(self, request: pb.ListRequestsRequest, call: RpcCall) -> pb.ListRequestsResponse:  # noqa: N802
        live = await self._operations.requests(request.model)
        return pb.ListRequestsResponse(requests=map(_request, live.requests), total=live.total)

    async def Cancel(self, request: pb.CancelRequestRequest, call: RpcCall) -> pb.LiveRequest:  # noqa: N802
        return _request(await self._operations.cancel(request.id))


def _engine(overview: EngineOverview) -> pb.EngineOverview:
    return pb.EngineOverview(**msgspec.structs.asdict(overview))


def _lane(status: LaneStatus) -> pb.LaneStatus:
    return pb.LaneStatus(**msgspec.to_builtins(status))


def _request(request: LiveRequest) -> pb.LiveRequest:
    return pb.LiveRequest(**msgspec.structs.asdict(request))
