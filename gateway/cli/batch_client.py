"""A thin synchronous client for files and batches over OpenAI's HTTP API."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import httpx

from gateway.cli.http import open_http, refusal, unreachable
from gateway.terminal.output import exit_with_error

CHUNK_BYTES = 256 * 1024
HINTS: Mapping[int, str] = {
    401: "show a key with --key or LORALANE_API_KEY",
    404: "`loralane batch list` has the jobs this key may see",
}
"""HTTP status -> advice that follows the gateway's own message, which may not say what to do."""

Json = dict[str, Any]


class BatchClientError(Exception):
    """A request failed, and (except for AwayError) trying again would not help; the message is shown to users."""


class AwayError(BatchClientError):
    """The gateway is unreachable or cannot answer at the moment; trying again may help."""


class BatchClient:
    """HTTP client of one gateway, with one connection pool: a context manager that closes it. Calls return parsed JSON,
    and raise BatchClientError, or its subclass AwayError if a retry may succeed."""

    def __init__(self, url: str, key: str) -> None:
        self._http = open_http(url, key)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def upload(self, name: str, content: BinaryIO) -> Json:
        """Upload `content`, read in pieces, as a batch input file called `name`; returns the API's file object."""
        parts = {"file": (name, content, "application/jsonl")}
        return self._ask("POST", "/v1/files", data={"purpose": "batch"}, files=parts)

    def create(self, file_id: str, endpoint: str, window: str, metadata: Mapping[str, str]) -> Json:
        body = {"input_file_id": file_id, "endpoint": endpoint, "completion_window": window, "metadata": dict(metadata)}
        return self._ask("POST", "/v1/batches", json=body)

    def get(self, batch_id: str) -> Json:
        return self._ask("GET", f"/v1/batches/{batch_id}")

    def batches(self, limit: int, after: str) -> list[Json]:
        """Return at most `limit` jobs, newest first; only those older than the job `after`, unless `after` is empty."""
        after_it = {"after": after} if after else {}
        return self._ask("GET", "/v1/batches", params={"limit": limit, **after_it})["data"]

    def cancel(self, batch_id: str) -> Json:
        return self._ask("POST", f"/v1/batches/{batch_id}/cancel")

    def size(self, file_id: str) -> int:
        """Query and return the size of a file in bytes."""
        return self._ask("GET", f"/v1/files/{file_id}")["bytes"]

    def content(self, file_id: str) -> Iterator[bytes]:
        """Yield the bytes of a file as they arrive, in chunks of at most CHUNK_BYTES."""
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
    """Raise AwayError for a status of 500 or more and BatchClientError for any other error status."""
    if not response.is_error:
        return
    message, hint = refusal(response), HINTS.get(response.status_code)
    kind = AwayError if response.status_code >= 500 else BatchClientError
    raise kind(f"{message}; {hint}" if hint else message)


@contextmanager
def reporting_errors(client: BatchClient) -> Iterator[BatchClient]:
    """Yield the client, and close it at the end. A BatchClientError is printed and ends the command with status 1."""
    try:
        with client:
            yield client
    except BatchClientError as error:
        exit_with_error(str(error))


def save(client: BatchClient, file_id: str, target: BinaryIO, expected: int) -> Iterator[int]:
    """Download a file to `target`, yielding the bytes written so far. Raises AwayError if they are not `expected`
    bytes."""
    done = 0
    for piece in client.content(file_id):
        done += target.write(piece)
        yield done
    if done != expected:
        raise AwayError(f"{file_id} ended after {done:,} of {expected:,} bytes; try again")


def output_name(batch: Json, kind: str) -> Path:
    """Return the default path of a job's results, ID.KIND.jsonl. `kind` is output or errors."""
    return Path(f"{batch['id']}.{kind}.jsonl")
