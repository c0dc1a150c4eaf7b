"""The HTTP API for files, following OpenAI's: /v1/files."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from urllib.parse import quote

import structlog
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from gateway.api_schema import files as api
from gateway.api_schema.files import ANCHOR, MAX_PAGE, SECONDS
from gateway.core.errors import ApiError, invalid_request
from gateway.files.record import FileRecord
from gateway.files.service import check_purpose, keep_upload
from gateway.files.upload import PIECE_BYTES
from gateway.http.body import streamed_body
from gateway.http.caller import header, hold_of, tenant_of
from gateway.http.form import FORM_BYTES, UNNAMED, FileForm
from gateway.http.lists import newest_first, parse_number
from gateway.http.routes.from_rows import routes_of
from gateway.http.stream import DisconnectWatch, json_response
from gateway.openai.render import list_page
from gateway.services import Services

log = structlog.get_logger("files")

MAX_SECONDS = 10**9
UPLOAD_BYTES = 2 * PIECE_BYTES
"""Bytes of an upload that are in memory: a piece that comes together and one that is being written."""


class FilesApi:
    """Handlers for files. Only tenants can call them, each for its own files."""

    def __init__(self, services: Services) -> None:
        self._files = services.files
        self._accounts = services.accounts

    def routes(self) -> list[Route]:
        return routes_of(
            {
                api.UPLOAD: self.create,
                api.LIST: self.list,
                api.GET: self.show,
                api.DELETE: self.delete,
                api.DOWNLOAD: self.content,
            }
        )

    async def create(self, request: Request) -> Response:
        """Store an uploaded file and return its record as JSON. The body is read only after the caller was
        authenticated, and the file is streamed: only the other fields of the form are held in memory."""
        tenant = self._tenant(request)
        hold_of(request).take(UPLOAD_BYTES)
        form = FileForm(header(request.scope, b"content-type"), {"purpose": check_purpose})
        body = streamed_body(request, self._files.limits.max_file_bytes + FORM_BYTES)
        async with self._files.receiving(tenant, form.file(body), expected=self._expected(request)) as upload:
            purpose, expires_after = form.fields.get("purpose", ""), _expires_after(form.fields)
            record = await keep_upload(upload, form.filename or UNNAMED, purpose, expires_after)
        return json_response(record.to_openai())

    async def list(self, request: Request) -> Response:
        tenant, given = self._tenant(request), request.query_params
        page = await self._files.list(
            tenant,
            purpose=given.get("purpose"),
            after=given.get("after"),
            limit=parse_number(given.get("limit", str(MAX_PAGE)), "limit", 1, MAX_PAGE),
            newest_first=newest_first(given.get("order", "desc")),
        )
        return json_response(list_page([record.to_openai() for record in page.data], page.has_more))

    async def show(self, request: Request) -> Response:
        return json_response((await self._record(request)).to_openai())

    async def delete(self, request: Request) -> Response:
        file_id = request.path_params["file_id"]
        await self._files.delete(self._tenant(request), file_id)
        return json_response({"id": file_id, "object": "file", "deleted": True})

    async def content(self, request: Request) -> ContentResponse:
        record = await self._record(request)
        return ContentResponse(record, self._files.download(record))

    def _expected(self, request: Request) -> int:
        """Return a lower bound of the uploaded file's size in bytes, to be reserved before the upload begins. It is
        derived from the content-length; 0 if there is none."""
        declared = header(request.scope, b"content-length")
        length = int(declared) if declared.isdecimal() else 0
        return min(max(length - FORM_BYTES, 0), self._files.limits.max_file_bytes)

    async def _record(self, request: Request) -> FileRecord:
        return await self._files.get(self._tenant(request), request.path_params["file_id"])

    def _tenant(self, request: Request) -> str:
        return tenant_of(self._accounts, request).tenant.name


@dataclass(frozen=True, slots=True)
class ContentResponse:
    """An ASGI response that sends a file as an attachment, or only the headers for a HEAD request.

    It reads the file no faster than the client does. Errors before the first byte are raised; a later error of the
    storage leaves the response incomplete, so that the server closes the connection.
    """

    record: FileRecord
    content: AsyncGenerator[bytes, None]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with DisconnectWatch(receive), aclosing(self.content):
            first = await anext(self.content, b"")
            await send({"type": "http.response.start", "status": 200, "headers": self._headers()})
            await send({"type": "http.response.body", "body": first, "more_body": True})
            if scope["method"] != "HEAD" and not await self._rest(send):
                return  # the response is incomplete, so the server closes the connection
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _rest(self, send: Send) -> bool:
        """Send the rest of the file. Return whether it was read completely; if not, the error is logged."""
        try:
            async for piece in self.content:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        except ApiError as error:
            log.warning("content_broken_off", file=self.record.id, reason=error.message)
            return False
        return True

    def _headers(self) -> list[tuple[bytes, bytes]]:
        headers = {
            "content-type": "application/octet-stream",
            "content-length": str(self.record.bytes),
            "content-disposition": f"attachment; filename*=UTF-8''{quote(self.record.filename, safe='')}",
            "x-content-type-options": "nosniff",
        }
        return [(name.encode(), value.encode()) for name, value in headers.items()]


def _expires_after(fields: Mapping[str, str]) -> int | None:
    """Return the requested lifetime of a file in seconds, from the form's fields. None means that the form has none.
    Raises ApiError: INVALID_REQUEST, the anchor is not `created_at` or the seconds are not from 0 to MAX_SECONDS."""
    if ANCHOR not in fields and SECONDS not in fields:
        return None
    if fields.get(ANCHOR) != "created_at":
        raise invalid_request("anchor must be 'created_at'", ANCHOR)
    return parse_number(fields.get(SECONDS, ""), SECONDS, 0, MAX_SECONDS)
