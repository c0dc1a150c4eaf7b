"""A Hugging Face Hub of one repository, as much of it as `snapshot_download` asks for."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import unquote, urlsplit

REPO = "acme/tone"


class FakeHub:
    """Revisions by name; a commit's hash follows its files.

    Attributes:
        revisions: revision -> {file name: content}.
        asked: every "METHOD path" so far.
        sizes: file name -> size to pretend in listings.
    """

    def __init__(self, files: dict[str, bytes]) -> None:
        self.revisions = {"main": files}
        self.asked: list[str] = []
        self.sizes: dict[str, int] = {}
        self.url = ""

    def commit(self, revision: str) -> str:
        files = self.revisions[revision]
        return hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()

    def answer(self, path: str) -> tuple[bytes, dict[str, str]] | None:
        """Body and headers; None: 404."""
        parts = unquote(urlsplit(path).path).strip("/").split("/")
        by_commit = {self.commit(name): files for name, files in self.revisions.items()}
        match parts:
            case ["api", "models", org, name, "revision", revision] if f"{org}/{name}" == REPO:
                return self._info(revision) if revision in self.revisions else None
            case ["api", "models", org, name] if f"{org}/{name}" == REPO:
                return self._info("main")
            case ["api", "models", _, _, "tree", commit] if commit in by_commit:
                return self._json([self._entry(*item) for item in by_commit[commit].items()])
            case [org, name, "resolve", commit, file] if f"{org}/{name}" == REPO and file in by_commit.get(commit, {}):
                data = by_commit[commit][file]
                return data, {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": commit}
        return None

    def _info(self, revision: str) -> tuple[bytes, dict[str, str]]:
        files = self.revisions[revision].items()
        siblings = [{"rfilename": name, "size": self.sizes.get(name, len(data))} for name, data in files]
        return self._json({"id": REPO, "sha": self.commit(revision), "siblings": siblings})

    def _entry(self, name: str, data: bytes) -> dict:
        return {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}

    def _json(self, value: object) -> tuple[bytes, dict[str, str]]:
        return json.dumps(value).encode(), {"Content-Type": "application/json"}


@contextmanager
def fake_hub(files: dict[str, bytes]) -> Iterator[FakeHub]:
    hub = FakeHub(files)

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            hub.asked.append(f"{self.command} {self.path}")
            body, headers = hub.answer(self.path) or (b"{}", {"X-Error-Code": "RepoNotFound"})
            self.send_response(404 if "X-Error-Code" in headers else 200)
            for key, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        hub.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()
