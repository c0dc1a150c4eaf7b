"""The service loralane.v1.UsageAdmin, for administrators' keys."""

from __future__ import annotations

import asyncio
from functools import partial

import grpc

from gateway.core.tenants import Authenticator
from gateway.pb import usage_pb2 as pb
from gateway.pb import usage_pb2_grpc as pb_grpc
from gateway.rpc.calls import RpcCall, respond_to_admin
from gateway.usage.render import line_fields, report_head
from gateway.usage.report import UsageAdmin, UsageSummary, parse_query


class UsageAdminService(pb_grpc.UsageAdminServicer):
    def __init__(self, usage: UsageAdmin, keys: Authenticator) -> None:
        self._usage = usage
        self._keys = keys

    async def Report(  # noqa: N802
        self, request: pb.UsageReportRequest, context: grpc.aio.ServicerContext
    ) -> pb.UsageReportResponse:
        return await respond_to_admin(context, self._keys, partial(self._report, request))

    async def _report(self, request: pb.UsageReportRequest, call: RpcCall) -> pb.UsageReportResponse:
        report = await self._usage.report(parse_query({field.name: value for field, value in request.ListFields()}))
        return await asyncio.to_thread(_message, report)


def _message(report: UsageSummary) -> pb.UsageReportResponse:
    return pb.UsageReportResponse(
        **report_head(report),
        usage=[pb.UsageLine(**line_fields(line)) for line in report.lines],
        total=pb.UsageLine(**line_fields(report.total)),
    )
