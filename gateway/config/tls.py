"""The TLS settings of one port. They are apart from `certificates`, whose imports the commands need not wait for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class TlsConfig:
    """Paths of the PEM files of a port that accepts TLS 1.2 and 1.3."""

    cert: Path
    """Certificate chain: the server's certificate, followed by the intermediate certificates up to its authority."""
    key: Path
    """Private key of the certificate, without a password."""
    client_ca: Path | None = None
    """Certificates of authorities. If set, each client must present a certificate that one of them has signed."""
