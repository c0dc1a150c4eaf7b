"""A thin synchronous client of the gRPC service UsageAdmin."""

from __future__ import annotations

from collections.abc import Mapping

from gateway.cli.clients.admin import AdminClient
from gateway.pb import usage_pb2 as pb
from gateway.pb import usage_pb2_grpc as pb_grpc


class UsageClient(AdminClient):
    def __init__(self, target: str, key: str) -> None:
        super().__init__(target, key)
        self._stub = pb_grpc.UsageAdminStub(self._channel)

    def report(self, fields: Mapping[str, str]) -> pb.UsageReportResponse:
        """Return a usage report. `fields` are the fields of UsageReportRequest."""
        return self._stub.Report(pb.UsageReportRequest(**fields), metadata=self._metadata)
