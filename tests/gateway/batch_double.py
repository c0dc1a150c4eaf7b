"""OpenAI's files and batches in memory, on a real port, for clients that block: what it answers is what tests want."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email import message_from_bytes
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

KEY = "sk-test"
COUNTS = {"total": 0, "completed": 0, "failed": 0}

Json = dict[str, Any]


def a_batch(batch_id: str = "batch_1", status: str = "validating", **fields: Any) -> Json:
    counts = COUNTS | fields.pop("request_counts", {})
    return {
        "id": batch_id,
        "object": "batch",
        "endpoint": "/v1/chat/completions",
        "errors": None,
        "input_file_id": "file-1",
        "completion_window": "24h",
        "status": status,
        "output_file_id": None,
        "error_file_id": None,
        "created_at": 1_780_000_000,
        "expires_at": 1_780_086_400,
        "request_counts": counts,
        "metadata": None,
        **fields,
    }


@dataclass
class BatchDouble:
    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    """Names of the files that clients have uploaded."""
    created: list[Json] = field(default_factory=list)
    """Bodies of batches that were asked for."""
    cancelled: list[str] = field(default_factory=list)
    looks: list[Json | int] = field(default_factory=list)
    """What GET of a batch answers, one after the other, the last one for good; a number is a status that refuses."""
    truncated: bool = False
    """Contents end early, as if a gateway had died."""

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/files", self._send, methods=["POST"]),
                Route("/v1/files/{id}", self._file),
                Route("/v1/files/{id}/content", self._content),
                Route("/v1/batches", self._create, methods=["POST"]),
                Route("/v1/batches", self._list),
                Route("/v1/batches/{id}", self._get),
                Route("/v1/batches/{id}/cancel", self._cancel, methods=["POST"]),
            ]
        )

    async def _send(self, request: Request) -> Response:
        if refusal := _stranger(request):
            return refusal
        head = f"content-type: {request.headers['content-type']}\r\n\r\n".encode()
        purpose, file = message_from_bytes(head + await request.body()).get_payload()
        assert purpose.get_payload() == "batch"
        self.names.append(file.get_filename())
        self.files["file-1"] = file.get_payload(decode=True)
        return JSONResponse({"id": "file-1", "bytes": len(self.files["file-1"])})

    async def _file(self, request: Request) -> Response:
        content = self.files[request.path_params["id"]]
        return JSONResponse({"id": request.path_params["id"], "bytes": len(content)})

    async def _content(self, request: Request) -> Response:
        content = self.files[request.path_params["id"]]

        async def pieces() -> Any:
            yield content[: len(content) // 2]
            if not self.truncated:
                yield content[len(content) // 2 :]

        return StreamingResponse(pieces())

    async def _create(self, request: Request) -> Response:
        body = await request.json()
        self.created.append(body)
        return JSONResponse(a_batch(metadata=body["metadata"]))

    async def _list(self, request: Request) -> Response:
        if refusal := _stranger(request):
            return refusal
        wanted = int(request.query_params["limit"])
        looks = [look for look in self.looks if isinstance(look, dict)]
        return JSONResponse({"object": "list", "data": looks[:wanted], "has_more": False})

    async def _get(self, request: Request) -> Response:
        if not self.looks:
            return _refusal(404, f"there is no batch {request.path_params['id']!r}")
        look = self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]
        return JSONResponse(look) if isinstance(look, dict) else _refusal(look, "not now [at all]")

    async def _cancel(self, request: Request) -> Response:
        self.cancelled.append(request.path_params["id"])
        counts = {"total": 9, "completed": 4, "failed": 1}
        return JSONResponse(a_batch(request.path_params["id"], "cancelling", request_counts=counts))


def _stranger(request: Request) -> Response | None:
    known = request.headers.get("authorization") == f"Bearer {KEY}"
    return None if known else _refusal(401, "missing or unknown API key")


def _refusal(status: int, message: str) -> Response:
    return JSONResponse({"error": {"message": message, "type": "x", "param": None, "code": None}}, status)


@contextmanager
def batch_double() -> Iterator[BatchDouble]:
    double = BatchDouble()
    listener = socket.create_server(("127.0.0.1", 0))
    double.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    server = uvicorn.Server(uvicorn.Config(double.app(), log_level="warning", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield double
    finally:
        server.should_exit = True
        thread.join()
