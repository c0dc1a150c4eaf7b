"""Connections of commands to a gateway, over HTTP for tenants and gRPC for administrators, with one-line errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self, TypeVar

import grpc
import httpx

from gateway.terminal.output import exit_with_error, no_gateway_message
from gateway.terminal.tls import chosen_tls_files


class AdminClient:
    """Base of the gRPC clients for administration: a context manager that closes the channel when the block ends. Calls
    raise grpc.RpcError."""

    def __init__(self, target: str, key: str) -> None:
        """Open a channel to the gRPC address `target`; calls send the API key `key`. Raises TlsFileError if a TLS file
        of the command line cannot be used."""
        self._channel = chosen_tls_files().channel(target, [("grpc.max_receive_message_length", -1)])
        self._metadata = (("authorization", f"Bearer {key}"),)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._channel.close()


Client = TypeVar("Client", bound=AdminClient)


@contextmanager
def reporting_errors(client: Client, url: str) -> Iterator[Client]:
    """Yield the client, and close it when the block ends. If the gateway at `url` refuses a call or does not answer,
    print a one-line error and end the command with status 1."""
    try:
        with client:
            yield client
    except grpc.RpcError as error:
        exit_with_error(_message(error, url))


def _message(error: grpc.RpcError, url: str) -> str:
    code, details = error.code(), error.details() or ""
    if code is grpc.StatusCode.UNAVAILABLE and ("failed to connect" in details or "http1" in details.lower()):
        return no_gateway_message(url, details)
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return f"{url}: administration is not served here; name the address of `admin.port` with --url or LORALANE_URL"
    return f"{url}: {details}"


TIMEOUT = httpx.Timeout(10.0, read=600.0)


def open_http(url: str, key: str) -> httpx.Client:
    """Return an HTTP client for the gateway at `url` that sends the API key `key` and uses the TLS files of the command
    line. Raises TlsFileError if one cannot be used."""
    headers, tls = {"authorization": f"Bearer {key}"}, chosen_tls_files().context()
    return httpx.Client(base_url=url, headers=headers, timeout=TIMEOUT, verify=tls)


def unreachable(http: httpx.Client, error: Exception) -> str:
    return no_gateway_message(str(http.base_url).rstrip("/"), str(error))


def refusal(response: httpx.Response) -> str:
    """Return the message of an error response, or its status if it has none. The response must have been read."""
    try:
        return response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return f"the server answered {response.status_code}"
