"""Stands between a peer's tests and loralane: gives requests a key, and models the names that the tests use."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, HTTPResponse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from urllib.parse import urlsplit

NAMES_PATH = "/peers/names"
"""Path to which a shim posts the names of models that its suite begins to use: an object of their names here by their
names there."""
PER_HOP = frozenset(("connection", "content-length", "host", "keep-alive", "transfer-encoding"))
SECONDS = 300.0


class Names:
    """Names that tests give to models, and the models that have them here."""

    def __init__(self, base: str, *, any_name: bool, served: frozenset[str]) -> None:
        """`any_name` means that all names other than `served` stand for `base`, because the peer serves one model only,
        under any name."""
        self.base = base
        self._any_name, self._served = any_name, served
        self._here: dict[str, str] = {}

    def add(self, names: dict[str, str]) -> None:
        self._here = names | {}

    def here(self, name: object) -> object:
        """Return the model that a name stands for; the name itself if it stands for no other."""
        if not isinstance(name, str) or name in self._here:
            return self._here.get(str(name), name)
        return self.base if self._any_name and name not in self._served else name

    @property
    def back(self) -> list[tuple[bytes, bytes]]:
        """Return replacements that give the names of the tests back, as JSON texts."""
        return [(json.dumps(here).encode(), json.dumps(there).encode()) for there, here in self._here.items()]


def renamed(body: bytes, path: str, names: Names) -> bytes:
    """Return a request's body with the model's name replaced, if it is a JSON object. On paths of OpenAI's and
    Anthropic's APIs, a model is added where it names none, because a peer has only one."""
    try:
        document = json.loads(body)
    except ValueError:
        return body
    if not isinstance(document, dict) or ("model" not in document and not path.startswith("/v1/")):
        return body
    return json.dumps(document | {"model": names.here(document.get("model", names.base))}).encode()


def handler_of(url: str, key: str, names: Names) -> type[BaseHTTPRequestHandler]:
    """Return the handler of requests for the server at `url`, to which `key` is sent in place of keys of the peer."""
    target = urlsplit(url)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def pass_on(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            self.close_connection = True
            if self.path == NAMES_PATH:
                names.add(json.loads(body))
                self.answer(204, [], [b""])
                return
            connection = HTTPConnection(target.hostname or "", target.port or 80, timeout=SECONDS)
            try:
                connection.request(self.command, self.path, renamed(body, self.path, names), self.own_headers())
                found = connection.getresponse()
                self.answer(found.status, found.getheaders(), pieces(found, names))
            finally:
                connection.close()

        def own_headers(self) -> dict[str, str]:
            """Return the request's headers with our key. What begins with `sk-` is a key that a test has chosen."""
            kept = {name: value for name, value in self.headers.items() if name.lower() not in PER_HOP}
            given = f"{self.headers.get('authorization', '')} {self.headers.get('x-api-key', '')}"
            if "sk-" in given:
                return kept
            others = {name: value for name, value in kept.items() if name.lower() not in ("authorization", "x-api-key")}
            return others | {"authorization": f"Bearer {key}"}

        def answer(self, status: int, headers: list[tuple[str, str]], body: Iterator[bytes] | list[bytes]) -> None:
            self.send_response(status)
            for name, value in headers:
                if name.lower() not in PER_HOP:
                    self.send_header(name, value)
            self.send_header("connection", "close")
            self.end_headers()
            with suppress(ConnectionError):
                for piece in body:
                    self.wfile.write(piece)
                    self.wfile.flush()

        def log_message(self, *args: object) -> None:
            """Write nothing."""

        do_GET = do_POST = do_DELETE = do_HEAD = do_OPTIONS = do_PUT = do_PATCH = pass_on  # noqa: N815

    return Handler


def pieces(response: HTTPResponse, names: Names) -> Iterator[bytes]:
    """Yield a response's body with the names of the tests: the lines of a stream as they come, anything else whole."""
    streams = "event-stream" in (response.getheader("content-type") or "")
    for piece in response if streams else [response.read()]:
        for here, there in names.back:
            piece = piece.replace(here, there)
        yield piece


class Server(ThreadingHTTPServer):
    """A server that does not ask for its own name, which takes seconds on a machine without a name service."""

    daemon_threads = True
    server_bind = TCPServer.server_bind


@contextmanager
def proxied(url: str, key: str, names: Names) -> Iterator[str]:
    """Run the proxy until the block ends; yields its URL."""
    server = Server(("127.0.0.1", 0), handler_of(url, key, names))
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
