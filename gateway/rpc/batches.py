"""The service loralane.v1.Batches, for tenants' keys."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, suppress
from typing import Any

from gateway.api_schema.batches import DEFAULT_PAGE
from gateway.api_schema.files import MAX_PAGE
from gateway.batches.record import Batch
from gateway.batches.service import BatchRequest
from gateway.core.errors import invalid_request
from gateway.files.record import BATCH, FileRecord
from gateway.pb import batches_pb2 as pb
from gateway.pb import batches_pb2_grpc as pb_grpc
from gateway.rpc.calls import RpcCall, watch_interval
from gateway.services import Services

DEFAULT_WINDOW = "24h"
PLAIN_FIELDS = (
    "id",
    "status",
    "endpoint",
    "input_file_id",
    "completion_window",
    "output_file_id",
    "error_file_id",
    "created_at",
    "expires_at",
)
"""Fields of a batch that have the same name in `gateway.batches.record.Batch` and in the message `Batch`."""


class BatchesService(pb_grpc.BatchesServicer):
    def __init__(self, services: Services) -> None:
        self._files = services.files
        self._batches = services.batches
        self._etas = services.etas
        self._watches = services.gateway.watches
        self._closing = asyncio.Event()

    async def CreateFile(  # noqa: N802
        self, requests: AsyncIterator[pb.CreateFileRequest], call: RpcCall
    ) -> pb.File:
        first = await anext(requests, None)
        if first is None or first.WhichOneof("part") != "header":
            raise invalid_request("the first message has the header", "header")
        header = first.header
        expires_after = header.expires_after_seconds if header.HasField("expires_after_seconds") else None
        async with aclosing(_pieces(requests)) as pieces:
            record = await self._files.create(
                call.tenant, header.filename, header.purpose or BATCH, pieces, expires_after=expires_after
            )
        return _file(record)

    async def GetFile(self, request: pb.GetFileRequest, call: RpcCall) -> pb.File:  # noqa: N802
        return _file(await self._files.get(call.tenant, request.file_id))

    async def ListFiles(  # noqa: N802
        self, request: pb.ListFilesRequest, call: RpcCall
    ) -> pb.ListFilesResponse:
        page = await self._files.list(
            call.tenant,
            purpose=request.purpose or None,
            after=request.after or None,
            limit=_files_limit(request.limit),
            newest_first=not request.oldest_first,
        )
        return pb.ListFilesResponse(data=map(_file, page.data), has_more=page.has_more)

    async def DeleteFile(  # noqa: N802
        self, request: pb.DeleteFileRequest, call: RpcCall
    ) -> pb.DeleteFileResponse:
        await self._files.delete(call.tenant, request.file_id)
        return pb.DeleteFileResponse(id=request.file_id, deleted=True)

    async def ReadFile(self, request: pb.ReadFileRequest, call: RpcCall) -> None:  # noqa: N802
        record = await self._files.get(call.tenant, request.file_id)
        start, length = _range(request, record.bytes)
        async with aclosing(self._files.download(record, start, length)) as pieces:
            async for piece in pieces:
                await call.open()
                await call.send(pb.FileChunk(data=piece))

    async def CreateBatch(self, request: pb.CreateBatchRequest, call: RpcCall) -> pb.Batch:  # noqa: N802
        return await self._told(await self._batches.create(call.principal, _batch_request(request)))

    async def GetBatch(self, request: pb.GetBatchRequest, call: RpcCall) -> pb.Batch:  # noqa: N802
        return await self._told(await self._batches.get(call.principal, request.batch_id))

    async def ListBatches(  # noqa: N802
        self, request: pb.ListBatchesRequest, call: RpcCall
    ) -> pb.ListBatchesResponse:
        limit = request.limit or DEFAULT_PAGE
        batches, more = await self._batches.list(call.principal, request.after or None, limit)
        return pb.ListBatchesResponse(data=[await self._told(batch) for batch in batches], has_more=more)

    async def CancelBatch(self, request: pb.CancelBatchRequest, call: RpcCall) -> pb.Batch:  # noqa: N802
        return await self._told(await self._batches.cancel(call.principal, request.batch_id))

    async def WatchBatch(self, request: pb.WatchBatchRequest, call: RpcCall) -> None:  # noqa: N802
        seconds = watch_interval(request.interval_seconds)
        with self._watches.taken(call.tenant):
            await self._send_changes(request.batch_id, seconds, call)

    def stop_watching(self) -> None:
        """End every WatchBatch call, which would otherwise last until its batch has ended, possibly for days."""
        self._closing.set()

    async def _send_changes(self, batch_id: str, seconds: float, call: RpcCall) -> None:
        """Send a batch, and send it again when its status or counts have changed, which is checked every `seconds`,
        until it has ended or the server begins to stop."""
        seen: Batch | None = None
        while True:
            call.check()
            batch = await self._batches.get(call.principal, batch_id)
            if seen is None or (batch.status, batch.tally) != (seen.status, seen.tally):
                await call.open()
                await call.send(await self._told(batch))
            seen = batch
            if batch.ended or await self._stopping(seconds):
                return

    async def _stopping(self, seconds: float) -> bool:
        """Wait `seconds` or until the server begins to stop; return whether it is stopping."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._closing.wait()
        return self._closing.is_set()

    async def _told(self, batch: Batch) -> pb.Batch:
        return batch_to_pb(batch, await self._etas.eta(batch))


async def _pieces(requests: AsyncIterator[pb.CreateFileRequest]) -> AsyncGenerator[bytes, None]:
    async for request in requests:
        if request.WhichOneof("part") != "data":
            raise invalid_request("a message behind the first has data", "data")
        yield request.data


def _batch_request(request: pb.CreateBatchRequest) -> BatchRequest:
    return BatchRequest(
        request.endpoint,
        request.input_file_id,
        request.completion_window or DEFAULT_WINDOW,
        dict(request.metadata) or None,
        request.output_expires_after_seconds if request.HasField("output_expires_after_seconds") else None,
    )


def _files_limit(limit: int) -> int:
    """Return the page size for a requested limit, where 0 requests the maximum. Raises ApiError: INVALID_REQUEST if the
    limit is not from 0 to MAX_PAGE."""
    if not 0 <= limit <= MAX_PAGE:
        raise invalid_request(f"limit must be at most {MAX_PAGE}", "limit")
    return limit or MAX_PAGE


def _range(request: pb.ReadFileRequest, size: int) -> tuple[int, int]:
    """Return the start and the length, in bytes, of the requested part of a file of `size` bytes, at most to its end.
    Raises ApiError (INVALID_REQUEST) for a negative limit or an offset beyond the file."""
    if not 0 <= request.offset <= size:
        raise invalid_request(f"offset must be within the file's {size} bytes", "offset")
    left = size - request.offset
    if not request.HasField("limit"):
        return request.offset, left
    if request.limit < 0:
        raise invalid_request("limit must not be negative", "limit")
    return request.offset, min(request.limit, left)


def _file(record: FileRecord) -> pb.File:
    shown = record.to_openai()
    return pb.File(**{name: value for name, value in shown.items() if name != "object"})


def batch_to_pb(batch: Batch, eta_seconds: float | None) -> pb.Batch:
    tally = batch.tally
    fields: dict[str, Any] = {**{name: getattr(batch, name) for name in PLAIN_FIELDS}, **batch.times}
    return pb.Batch(
        **fields,
        model=batch.lines.model,
        request_counts=pb.RequestCounts(total=batch.lines.total, completed=tally.completed, failed=tally.failed),
        usage=pb.BatchUsage(
            input_tokens=tally.input_tokens,
            cached_tokens=tally.cached_tokens,
            output_tokens=tally.output_tokens,
            total_tokens=tally.input_tokens + tally.output_tokens,
        ),
        metadata=batch.metadata,
        errors=[pb.BatchError(**error.json()) for error in batch.errors],
        eta_seconds=eta_seconds,
    )
