"""TLS of one port, as the configuration says it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class TlsConfig:
    """PEM files of a port that speaks TLS 1.2 and 1.3."""

    cert: Path
    """The server's certificate, and after it those that lead to its authority."""
    key: Path
    """Its private key, without a password."""
    client_ca: Path | None = None
    """Certificates of authorities: with it, clients must show a certificate that one of them has signed."""
