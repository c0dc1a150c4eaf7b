"""TLS for the gateway's ports: certificates are read from files, checked before use, and reread when they change."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import grpc
import structlog

from engine.rpc.pem import KeyMismatch, Stamp, read_certificates, read_key, show, stamp_of, trust
from gateway.config.file import ConfigError
from gateway.config.sections import TlsConfig

log = structlog.get_logger("tls")

HTTP_ALPN = ("http/1.1",)


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
    with _named(f"{where}.cert"):
        chain = read_certificates(config.cert)
    with _named(f"{where}.key"):
        key = read_key(config.key)
    client_ca = None
    if config.client_ca is not None:
        with _named(f"{where}.client_ca"):
            client_ca = read_certificates(config.client_ca)
    return Identity(chain, key, client_ca, _checked(config, where))


@contextmanager
def _named(where: str) -> Iterator[None]:
    """Turn a ValueError of the block into a ConfigError that begins with `where`, a setting."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error


def _checked(config: TlsConfig, where: str) -> ssl.SSLContext:
    context = _context(config)
    if config.client_ca is not None:
        with _named(f"{where}.client_ca"):
            trust(context, config.client_ca)
    try:
        show(context, config.cert, config.key)
    except ValueError as error:
        name = "key" if isinstance(error, KeyMismatch) else "cert"
        raise ConfigError(f"{where}.{name}: {error}") from error
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


def _stamp(config: TlsConfig) -> Stamp:
    """Return the stamp of a port's TLS files, which changes when one of them changes or is removed."""
    return stamp_of([config.cert, config.key] + ([config.client_ca] if config.client_ca else []))
