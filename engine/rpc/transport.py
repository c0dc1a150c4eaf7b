"""The connection between a gateway and an engine: gRPC over a Unix socket, or over TCP, with mutual TLS between
machines. Both sides ping over TCP, because a partition closes no connection."""

from __future__ import annotations

import ssl
from typing import Any

import grpc
import structlog

from engine.rpc.pem import Stamp, read_certificates, read_key, show, stamp_of, trust
from engine.rpc.target import UNIX, EngineTarget, EngineTls

log = structlog.get_logger("engine.rpc.transport")

MAX_MESSAGE_BYTES = 64 << 20
"""Maximum size in bytes of a message that an engine receives. A prompt of a million token ids takes 5 MB."""
RECONNECT_MS = 100
"""Milliseconds between gRPC's attempts to connect to an engine."""
CONNECT_MS = 5000
"""Milliseconds after which gRPC gives up one attempt to connect over TCP, where no answer may ever come."""
PING_MS = 5000
"""Milliseconds without a received byte after which either side of a TCP connection pings the other, and milliseconds
until an answer is due, so that a partition is noticed after 10 s. While tokens flow, gRPC mostly has another ping under
way, with which it measures the bandwidth; the time limit of that ping, by default 60 s, is therefore set to the same
value."""
Options = list[tuple[str, Any]]


class ChannelFactory:
    """Opens gRPC channels of a gateway to one engine. Raises ValueError if the TLS files in `target` cannot be used."""

    def __init__(self, target: EngineTarget) -> None:
        self._target = target
        self._files = TlsFiles(target.tls) if target.tls is not None and target.is_secure else None

    def open(self) -> grpc.aio.Channel:
        """Return a new gRPC channel, which connects with its first call. With TLS, it shows the certificate that the
        files have now; if these have become unusable, the previous one."""
        options = [
            ("grpc.max_receive_message_length", -1),
            *((f"grpc.{which}_reconnect_backoff_ms", RECONNECT_MS) for which in ("initial", "max")),
            *_tcp_options(self._target.address),
        ]
        if self._files is None:
            return grpc.aio.insecure_channel(self._target.address, options=options)
        self._files.renew()
        if name := self._target.tls.server_name if self._target.tls else "":
            options.append(("grpc.ssl_target_name_override", name))
        credentials = grpc.ssl_channel_credentials(*self._files.content)
        return grpc.aio.secure_channel(self._target.address, credentials, options=options)


def open_port(server: grpc.Server, address: str, tls: EngineTls | None) -> None:
    """Let an engine's server listen at `address` once it starts, with `tls` only for clients with a certificate of its
    authority. Raises ValueError if files of `tls` cannot be used, RuntimeError if the address is not free."""
    if tls is None or address.startswith(UNIX):
        server.add_insecure_port(address)
    else:
        server.add_secure_port(address, _server_credentials(tls))


def server_options(address: str) -> Options:
    """Return the gRPC options for the server of an engine that listens at `address`."""
    lengths = [("grpc.max_receive_message_length", MAX_MESSAGE_BYTES), ("grpc.max_send_message_length", -1)]
    # Otherwise two engines could share a port, and each would get half of the connections.
    return [*lengths, ("grpc.so_reuseport", 0), *_tcp_options(address)]


def _tcp_options(address: str) -> Options:
    """Return the options of a connection over TCP, for both sides; none for a Unix socket. There, a connection breaks
    only with a process, and pings would end the sessions of one that a debugger or an operator has stopped."""
    if address.startswith(UNIX):
        return []
    return [
        ("grpc.min_reconnect_backoff_ms", CONNECT_MS),
        ("grpc.keepalive_time_ms", PING_MS),
        ("grpc.keepalive_timeout_ms", PING_MS),
        ("grpc.http2.ping_timeout_ms", PING_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", PING_MS // 2),  # a server ends connections that ping oftener
        ("grpc.enable_http_proxy", 0),
    ]


def read_tls(tls: EngineTls) -> tuple[bytes, bytes, bytes]:
    """Read and check the files of `tls`; returns authorities, key and certificate chain in PEM. Raises ValueError,
    which names the file, if one is missing, unusable or encrypted, or if the key is another certificate's."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    files = read_certificates(tls.ca), read_key(tls.key), read_certificates(tls.certificate)
    trust(context, tls.ca)
    show(context, tls.certificate, tls.key)
    return files


class TlsFiles:
    """The certificates of one side, which are read again when their files have changed, so that a renewed certificate
    needs no restart. Raises ValueError if the files cannot be used now; later, unusable new ones leave the old in
    force."""

    def __init__(self, tls: EngineTls) -> None:
        self._tls = tls
        self._stamp = self._stamp_now()
        self.content = read_tls(tls)
        """Authorities, key and certificate chain in PEM."""

    def renew(self) -> bool:
        """Read the PEM files of this side's certificates again if they have changed since the last call; return whether
        `content` is new. Unusable new files are logged and leave the old certificates in force."""
        stamp = self._stamp_now()
        if stamp == self._stamp:
            return False
        self._stamp = stamp
        try:
            self.content = read_tls(self._tls)
        except ValueError as error:
            log.error("certificate_not_renewed", reason=str(error))
            return False
        log.info("certificate_renewed", file=str(self._tls.certificate))
        return True

    def _stamp_now(self) -> Stamp:
        return stamp_of((self._tls.ca, self._tls.key, self._tls.certificate))


def _server_credentials(tls: EngineTls) -> grpc.ServerCredentials:
    """Return the credentials of an engine's port, which reads renewed certificates with the next handshake."""
    files = TlsFiles(tls)

    def configuration() -> grpc.ServerCertificateConfiguration:
        authorities, key, chain = files.content
        return grpc.ssl_server_certificate_configuration([(key, chain)], authorities)

    def renewed() -> grpc.ServerCertificateConfiguration | None:
        return configuration() if files.renew() else None

    return grpc.dynamic_ssl_server_credentials(configuration(), renewed, require_client_authentication=True)
