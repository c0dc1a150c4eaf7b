"""A thin synchronous client of the gRPC services LaneAdmin and RequestAdmin."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.cli.clients.admin import AdminClient
from gateway.pb import operations_pb2 as pb
from gateway.pb import operations_pb2_grpc as pb_grpc


class OperationsClient(AdminClient):
    def __init__(self, target: str, key: str) -> None:
        super().__init__(target, key)
        self._lanes = pb_grpc.LaneAdminStub(self._channel)
        self._requests = pb_grpc.RequestAdminStub(self._channel)

    def lanes(self) -> Sequence[pb.LaneStatus]:
        return self._lanes.List(pb.ListLanesRequest(), metadata=self._metadata).lanes

    def set_lane(self, lane: str, action: str) -> pb.LaneStatus:
        """Change a lane's mode and return its status. `action` is pause, drain or resume."""
        return self._lanes.Set(pb.SetLaneRequest(lane=lane, action=action), metadata=self._metadata)

    def requests(self) -> Sequence[pb.LiveRequest]:
        return self._requests.List(pb.ListRequestsRequest(), metadata=self._metadata).requests

    def cancel(self, request_id: str) -> pb.LiveRequest:
        return self._requests.Cancel(pb.CancelRequestRequest(id=request_id), metadata=self._metadata)
