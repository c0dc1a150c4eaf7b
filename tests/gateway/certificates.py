"""Certificates for tests: an authority, what it has signed, and the files they lie in."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

import trustme

from gateway.config.sections import TlsConfig


@dataclass(frozen=True)
class Authority:
    """A certificate authority for servers and clients. `file` holds its own certificate."""

    folder: Path
    ca: trustme.CA

    @classmethod
    def at(cls, folder: Path) -> Authority:
        folder.mkdir(parents=True, exist_ok=True)
        authority = cls(folder, trustme.CA())
        authority.ca.cert_pem.write_to_path(str(authority.file))
        return authority

    @property
    def file(self) -> Path:
        return self.folder / "ca.pem"

    def issue(self, name: str, *names: str) -> TlsConfig:
        """Files `name`.pem and `name`.key; a server's for this machine unless `names` say otherwise."""
        issued = self.ca.issue_cert(*(names or ("localhost", "127.0.0.1")))
        config = TlsConfig(self.folder / f"{name}.pem", self.folder / f"{name}.key")
        config.cert.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
        issued.private_key_pem.write_to_path(str(config.key))
        return config

    def client(self, shown: TlsConfig | None = None) -> ssl.SSLContext:
        """Return the TLS context of a client that trusts this authority, and shows a certificate if one is given."""
        context = ssl.create_default_context(cafile=self.file)
        if shown is not None:
            context.load_cert_chain(shown.cert, shown.key)
        return context
