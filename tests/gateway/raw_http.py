"""Raw HTTP/1.1 over a socket, for requests that no client would send."""

from __future__ import annotations

import http.client
import json
import socket
from dataclasses import dataclass
from typing import Any

import pytest
from served import Served


@dataclass
class Answer:
    status: int
    headers: Any
    body: bytes

    def check(self, status: int, code: str | None, words: str = "") -> None:
        error = json.loads(self.body)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert (self.status, error["code"]) == (status, code)
        assert words in error["message"]
        assert self.headers["content-type"] == "application/json"
        assert self.headers["x-request-id"]


def connect(gateway: Served, receive_buffer: int | None = None) -> socket.socket:
    connection = socket.socket()
    connection.settimeout(20)
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    host, _, port = gateway.url.removeprefix("http://").partition(":")
    connection.connect((host, int(port)))
    return connection


def read(connection: socket.socket) -> Answer:
    response = http.client.HTTPResponse(connection)
    response.begin()
    return Answer(response.status, response.headers, response.read())


def send(gateway: Served, data: bytes) -> Answer:
    with connect(gateway) as connection:
        connection.sendall(data)
        return read(connection)


def request(body: bytes = b"", *headers: str, method: str = "POST", path: str = "/v1/chat/completions") -> bytes:
    """With a valid key; the length is declared unless `headers` say how the body comes."""
    lines = [f"{method} {path} HTTP/1.1", "authorization: Bearer sk-acme", "host: here", *headers]
    if not any(line.lower().startswith(("content-length", "transfer-encoding")) for line in headers):
        lines.append(f"content-length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def closed(connection: socket.socket) -> bool:
    """Return whether the peer ends it, in whatever way."""
    try:
        while connection.recv(65536):
            pass
    except ConnectionResetError:
        return True
    return True


def read_one(connection: socket.socket) -> Any:
    """Read one response and not a byte more, because the next response follows on the same connection."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        head += connection.recv(1, socket.MSG_WAITALL) or pytest.fail(f"it ended after {head!r}")
    length = next(int(line[15:]) for line in head.decode().lower().split("\r\n") if line.startswith("content-length:"))
    return json.loads(connection.recv(length, socket.MSG_WAITALL))
