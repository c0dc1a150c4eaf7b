"""TLS for the gateway's ports: certificates are read from files, checked before use, and reread when they change."""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc
import structlog

from gateway.config.file import ConfigError
from gateway.config.tls import TlsConfig

log = structlog.get_logger("tls")

CERTIFICATE, PRIVATE_KEY, ENCRYPTED = b"-----BEGIN CERTIFICATE-----", b"PRIVATE KEY-----", b"ENCRYPTED"
MISMATCH = "the first certificate of a file is the server's own, and the key has to be that one's"
HTTP_ALPN = ("http/1.1",)

Stamp = tuple[tuple[int, int, int], ...]
"""Inode, size and time of the last change (in nanoseconds) of each file."""


@dataclass(frozen=True, slots=True)
class Identity:
    """The checked contents of a port's TLS files: certificate chain and key in PEM, CAs for clients, and a TLS context
    with all of them."""

    chain: bytes
    key: bytes
    client_ca: bytes | None
    """Certificate authorities in PEM. If not None, clients must present a certificate that one of them has signed."""
    context: ssl.SSLContext

    def for_grpc(self) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([(self.key, self.chain)], self.client_ca)


class Certificate:
    """The identity of one port, updated when its files change.

    The files are checked for changes with every handshake, so that a renewed certificate needs no restart. If the new
    files cannot be used, the port keeps its old identity.
    """

    def __init__(self, config: TlsConfig, where: str) -> None:
        """Read the files. `where` is the configuration section, for error messages. Raises ConfigError if a file is
        missing, cannot be read, has the wrong content, or does not match the others."""
        self._config, self._where = config, where
        self._stamp = _stamp(config)
        self._identity = read_identity(config, where)

    def current(self) -> Identity:
        stamp = _stamp(self._config)
        if stamp != self._stamp:
            self._stamp = stamp
            self._renew()
        return self._identity

    def for_http(self) -> ssl.SSLContext:
        """Return a TLS context for a server that, in each handshake, uses the files' current identity."""
        context = _context(self._config)

        def hand_on(connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
            connection.context = self.current().context

        context.sni_callback = hand_on
        return context

    def for_grpc(self) -> grpc.ServerCredentials:
        shown = self._identity

        def renewed() -> grpc.ServerCertificateConfiguration | None:
            """Return the current configuration, or None if it has not changed since the last one that gRPC got."""
            nonlocal shown
            newest = self.current()
            if newest is shown:
                return None
            shown = newest
            return newest.for_grpc()

        return grpc.dynamic_ssl_server_credentials(shown.for_grpc(), renewed, self._config.client_ca is not None)

    def _renew(self) -> None:
        try:
            self._identity = read_identity(self._config, self._where)
        except ConfigError as error:
            log.error("certificate_not_renewed", reason=str(error))
        else:
            log.info("certificate_renewed", file=str(self._config.cert))


def read_identity(config: TlsConfig, where: str) -> Identity:
    """Read and check a port's TLS files. Raises ConfigError, naming `where`, the configuration section, and the file,
    for one that is missing, unusable or encrypted, and for a key of another certificate."""
    chain = _pem(config.cert, f"{where}.cert", CERTIFICATE, "certificate")
    key = _pem(config.key, f"{where}.key", PRIVATE_KEY, "private key")
    if ENCRYPTED in key:
        raise ConfigError(f"{where}.key: {config.key} is encrypted, and the gateway cannot ask for its password")
    client_ca = None
    if config.client_ca is not None:
        client_ca = _pem(config.client_ca, f"{where}.client_ca", CERTIFICATE, "certificate")
    return Identity(chain, key, client_ca, _checked(config, where))


def _checked(config: TlsConfig, where: str) -> ssl.SSLContext:
    context = _context(config)
    if config.client_ca is not None:
        try:
            context.load_verify_locations(config.client_ca)
        except (ssl.SSLError, OSError) as error:
            raise ConfigError(f"{where}.client_ca: {config.client_ca} has no usable certificate: {error}") from error
    pair = f"{config.cert} and {config.key}"
    try:
        context.load_cert_chain(config.cert, config.key, password="")  # else OpenSSL would ask at the terminal
    except (ssl.SSLError, OSError) as error:
        if getattr(error, "reason", None) == "KEY_VALUES_MISMATCH":
            raise ConfigError(f"{where}.key: {pair} do not belong together; {MISMATCH}") from error
        raise ConfigError(f"{where}.cert: {pair} cannot be used: {error}") from error
    return context


def _context(config: TlsConfig) -> ssl.SSLContext:
    """Return a server context for TLS 1.2 or later, without certificates yet. With a CA, clients must show one."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
    context.set_alpn_protocols(HTTP_ALPN)
    if config.client_ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        context.options |= ssl.OP_NO_TICKET  # A client whose CA was removed must not resume a session.
        context.num_tickets = 0
    return context


def _pem(file: Path, where: str, mark: bytes, what: str) -> bytes:
    try:
        content = file.read_bytes()
    except OSError as error:
        raise ConfigError(f"{where}: cannot read {file}: {error.strerror}") from error
    if mark not in content:
        raise ConfigError(f"{where}: {file} has no {what} in PEM, which would say {mark.decode().strip('-')}")
    return content


def _stamp(config: TlsConfig) -> Stamp:
    """Return the stamp of a port's TLS files, which changes when one of them changes or is removed."""
    files = [config.cert, config.key] + ([config.client_ca] if config.client_ca else [])
    return tuple(stamp for file in files if (stamp := _file_stamp(file)))


def _file_stamp(file: Path) -> tuple[int, int, int] | None:
    try:
        status = os.stat(file)
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns
