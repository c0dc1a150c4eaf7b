"""The service loralane.v1.UsageAdmin, for administrators' keys."""

from __future__ import annotations

import asyncio

from gateway.pb import usage_pb2 as pb
from gateway.pb import usage_pb2_grpc as pb_grpc
from gateway.rpc.calls import RpcCall
from gateway.usage.render import line_fields, report_head
from gateway.usage.report import UsageAdmin, UsageSummary, parse_query


class UsageAdminService(pb_grpc.UsageAdminServicer):
    def __init__(self, usage: UsageAdmin) -> None:
        self._usage = usage

    async def Report(self, request: pb.UsageReportRequest, call: RpcCall) -> pb.UsageReportResponse:  # noqa: N802
        report = await self._usage.report(parse_query({field.name: value for field, value in request.ListFields()}))
        return await asyncio.to_thread(_message, report)


def _message(report: UsageSummary) -> pb.UsageReportResponse:
    return pb.UsageReportResponse(
        **report_head(report),
        usage=[pb.UsageLine(**line_fields(line)) for line in report.lines],
        total=pb.UsageLine(**line_fields(report.total)),
    )
