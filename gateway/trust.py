"""Whom the commands of `loralane` believe when they speak TLS, and what they show of themselves."""

from __future__ import annotations

import ssl
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import grpc

TLS_TARGET = "https://"


class TrustError(Exception):
    """A file of certificates cannot be used; the message says which and why. It ends the command."""


@dataclass(frozen=True, slots=True)
class Trust:
    """PEM files."""

    ca: Path | None = None
    """Authorities that servers' certificates are checked against; None: those of this machine."""
    cert: Path | None = None
    """What a server that asks for a certificate is shown."""
    key: Path | None = None
    """Of `cert`; None: it is in the same file."""

    def context(self) -> ssl.SSLContext:
        """Of HTTP clients. Raises TrustError."""
        try:
            context = ssl.create_default_context(cafile=self.ca)
        except OSError as error:
            raise TrustError(f"--ca {self.ca}: {_reason(error)}") from error
        if self.cert is not None:
            try:
                context.load_cert_chain(self.cert, self.key, password="")  # or OpenSSL would ask at the terminal
            except OSError as error:
                raise TrustError(f"--cert {self.cert}, --cert-key {self.key or self.cert}: {_reason(error)}") from error
        return context

    def channel(self, target: str, options: list[tuple[str, int]]) -> grpc.Channel:
        """With TLS where `target` begins with https://. Raises TrustError."""
        import grpc

        if not target.startswith(TLS_TARGET):
            return grpc.insecure_channel(target, options)
        self.context()  # which says what is wrong with the files; gRPC would not
        key = self.key or self.cert
        credentials = grpc.ssl_channel_credentials(
            self.ca and self.ca.read_bytes(), key and key.read_bytes(), self.cert and self.cert.read_bytes()
        )
        return grpc.secure_channel(target.removeprefix(TLS_TARGET).rstrip("/"), credentials, options)


CHOSEN: ContextVar[Trust] = ContextVar("trust")
"""What the command line says before the command's name; its root sets it."""


def chosen_trust() -> Trust:
    return CHOSEN.get(Trust())


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
