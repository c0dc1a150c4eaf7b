"""UsageAdmin from a terminal: one call."""

from __future__ import annotations

from collections.abc import Mapping

import grpc

from gateway.pb import usage_pb2 as pb
from gateway.pb import usage_pb2_grpc as pb_grpc


def fetch_report(target: str, key: str, fields: Mapping[str, str]) -> pb.UsageReportResponse:
    """`fields`: of UsageReportRequest. Raises grpc.RpcError."""
    with grpc.insecure_channel(target, options=[("grpc.max_receive_message_length", -1)]) as channel:
        stub = pb_grpc.UsageAdminStub(channel)
        return stub.Report(pb.UsageReportRequest(**fields), metadata=(("authorization", f"Bearer {key}"),))
