"""Files and batches over OpenAI's HTTP API: a thin synchronous client."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import httpx

from gateway.cli.clients.http import open_http, refusal, unreachable
from gateway.outputs import fail

CHUNK_BYTES = 256 * 1024
HINTS: Mapping[int, str] = {
    401: "show a key with --key or LORALANE_API_KEY",
    404: "`loralane batch list` has the jobs this key may see",
}
"""What to do about a status, where the gateway's own words may not say."""

Json = dict[str, Any]


class BatchError(Exception):
    """It cannot be done, whoever tries again; the message is for people."""


class AwayError(BatchError):
    """The gateway is not there, or not able to answer just now."""


class BatchClient:
    """A context manager around one connection pool. Calls raise BatchError, or AwayError where it is worth waiting."""

    def __init__(self, url: str, key: str) -> None:
        self._http = open_http(url, key)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def upload(self, name: str, content: BinaryIO) -> Json:
        """The file's object. `content` is read in pieces, as fast as the gateway takes them."""
        parts = {"file": (name, content, "application/jsonl")}
        return self._ask("POST", "/v1/files", data={"purpose": "batch"}, files=parts)

    def create(self, file_id: str, endpoint: str, window: str, metadata: Mapping[str, str]) -> Json:
        body = {"input_file_id": file_id, "endpoint": endpoint, "completion_window": window, "metadata": dict(metadata)}
        return self._ask("POST", "/v1/batches", json=body)

    def get(self, batch_id: str) -> Json:
        return self._ask("GET", f"/v1/batches/{batch_id}")

    def batches(self, limit: int, after: str) -> list[Json]:
        """The newest first."""
        after_it = {"after": after} if after else {}
        return self._ask("GET", "/v1/batches", params={"limit": limit, **after_it})["data"]

    def cancel(self, batch_id: str) -> Json:
        return self._ask("POST", f"/v1/batches/{batch_id}/cancel")

    def size(self, file_id: str) -> int:
        """Bytes of a file."""
        return self._ask("GET", f"/v1/files/{file_id}")["bytes"]

    def content(self, file_id: str) -> Iterator[bytes]:
        """A file's bytes as they come."""
        with self._told(), self._http.stream("GET", f"/v1/files/{file_id}/content") as response:
            if response.is_error:
                response.read()
            _check(response)
            yield from response.iter_bytes(CHUNK_BYTES)

    def _ask(self, method: str, path: str, **options: Any) -> Json:
        with self._told():
            response = self._http.request(method, path, **options)
        _check(response)
        return response.json()

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except httpx.TransportError as error:
            raise AwayError(unreachable(self._http, error)) from error


def _check(response: httpx.Response) -> None:
    """Raises BatchError, AwayError."""
    if not response.is_error:
        return
    message, hint = refusal(response), HINTS.get(response.status_code)
    kind = AwayError if response.status_code >= 500 else BatchError
    raise kind(f"{message}; {hint}" if hint else message)


@contextmanager
def told(client: BatchClient) -> Iterator[BatchClient]:
    """A client whose errors end the command with a line."""
    try:
        with client:
            yield client
    except BatchError as error:
        fail(str(error))


def save(client: BatchClient, file_id: str, target: BinaryIO, expected: int) -> Iterator[int]:
    """Writes a file's bytes to `target`; yields how many there are so far. Raises BatchError: some are missing."""
    done = 0
    for piece in client.content(file_id):
        done += target.write(piece)
        yield done
    if done != expected:
        raise AwayError(f"{file_id} ended after {done:,} of {expected:,} bytes; try again")


def output_name(batch: Json, kind: str) -> Path:
    """Where results go if nobody says. `kind`: output or errors."""
    return Path(f"{batch['id']}.{kind}.jsonl")
