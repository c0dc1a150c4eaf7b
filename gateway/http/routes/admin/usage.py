"""The HTTP API for usage: /admin/v1/usage, as JSON or CSV."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from gateway.api_schema.usage import CSV, FORMATS, REPORT
from gateway.core.errors import invalid_request
from gateway.http.caller import header
from gateway.http.routes.admin.from_rows import Answers
from gateway.http.stream import json_response
from gateway.usage.render import report_csv, report_json
from gateway.usage.report import UsageAdmin, UsageSummary, parse_query


class UsageApi:
    """Handler for usage reports, as JSON or CSV, as the query's `format` or else the Accept header asks. `AdminApi`
    lets only administrators reach it."""

    def __init__(self, usage: UsageAdmin) -> None:
        self._usage = usage

    def answers(self) -> Answers:
        return {REPORT: self.usage}

    async def usage(self, request: Request) -> Response:
        report = await self._usage.report(parse_query(request.query_params))
        return await asyncio.to_thread(_csv if _wants_csv(request) else _json, report)


def _json(report: UsageSummary) -> Response:
    return json_response(report_json(report))


def _csv(report: UsageSummary) -> Response:
    name = f"usage-{report.query.since}-{report.query.until}.csv"
    headers = {"content-disposition": f'attachment; filename="{name}"'}
    return Response(report_csv(report), media_type=CSV, headers=headers)


def _wants_csv(request: Request) -> bool:
    asked = request.query_params.get("format", "")
    if asked not in ("", *FORMATS):
        raise invalid_request(f"format must be one of {', '.join(FORMATS)}, not {asked!r}", "format")
    return asked == "csv" or (not asked and CSV in header(request.scope, b"accept"))
