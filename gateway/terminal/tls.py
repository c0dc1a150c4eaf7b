"""TLS settings of the commands of `loralane`: the CAs that they trust, and the certificate that they present."""

from __future__ import annotations

import ssl
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path


class TlsFileError(Exception):
    """A certificate or key file cannot be used; the message says which and why. `main` prints it and ends the
    command."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths of the PEM files for TLS connections of a command: the CAs to trust (None: the system's), the certificate
    to present, if any, and its private key (None: in the same file)."""

    ca: Path | None = None
    """Certificate authorities that a server's certificate is checked against. None means those of the system."""
    cert: Path | None = None
    """Certificate to present to a server that asks for one."""
    key: Path | None = None
    """Private key of `cert`. None means that it is in the same file."""

    def context(self) -> ssl.SSLContext:
        """Return a TLS context with these files for HTTP clients. Raises TlsFileError if a file cannot be used."""
        try:
            context = ssl.create_default_context(cafile=self.ca)
        except OSError as error:
            raise TlsFileError(f"--ca {self.ca}: {_reason(error)}") from error
        if self.cert is not None:
            try:
                context.load_cert_chain(self.cert, self.key, password="")  # else OpenSSL would ask at the terminal
            except OSError as error:
                raise TlsFileError(
                    f"--cert {self.cert}, --cert-key {self.key or self.cert}: {_reason(error)}"
                ) from error
        return context


CHOSEN: ContextVar[TlsFiles] = ContextVar("trust")
"""TLS settings from the options before the command's name; the root command sets them."""


def chosen_tls_files() -> TlsFiles:
    return CHOSEN.get(TlsFiles())


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
