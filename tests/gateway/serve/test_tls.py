"""TLS at both ports: who is let in, what is refused, what is said of files that cannot be used, and renewal."""

from __future__ import annotations

import asyncio
import socket
import ssl
from dataclasses import replace
from pathlib import Path

import grpc
import httpx
import pytest
from certificates import Authority
from fakes import GatewayApp, build_gateway_app
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from gateway.config.certificates import Certificate
from gateway.config.file import ConfigError
from gateway.config.sections import TlsConfig
from gateway.config.whole import parse_config
from gateway.rpc.api import GrpcServer
from gateway.serve.listeners import http_port


@pytest.fixture(scope="module")
def authority(tmp_path_factory) -> Authority:
    return Authority.at(tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="module")
def stranger(tmp_path_factory) -> Authority:
    return Authority.at(tmp_path_factory.mktemp("theirs"))


@pytest.fixture(scope="module")
def server(authority) -> TlsConfig:
    return authority.issue("server")


@pytest.fixture
async def gateway_app(tmp_path) -> GatewayApp:
    return await build_gateway_app(tmp_path)


async def version(port: int, context: ssl.SSLContext | bool, scheme: str = "https") -> int:
    async with httpx.AsyncClient(verify=context) as client:
        return (await client.get(f"{scheme}://127.0.0.1:{port}/version")).status_code


async def is_serving(port: int, authority: Authority, shown: TlsConfig | None = None) -> bool:
    """Over gRPC. Raises grpc.aio.AioRpcError."""
    key, chain = (shown.key.read_bytes(), shown.cert.read_bytes()) if shown else (None, None)
    credentials = grpc.ssl_channel_credentials(authority.file.read_bytes(), key, chain)
    async with grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials) as channel:
        answer = await HealthStub(channel).Check(HealthCheckRequest(), timeout=10)
    return answer.status == HealthCheckResponse.SERVING


# --- HTTP ---------------------------------------------------------------------------------------------------------


async def test_only_a_client_that_trusts_us_is_answered(gateway_app, authority, stranger, server):
    async with http_port(gateway_app.app, "127.0.0.1", 0, certificate=Certificate(server, "http.tls")) as port:
        assert await version(port, authority.client()) == 200
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            await version(port, stranger.client())
        with pytest.raises(httpx.TransportError):
            await version(port, True, "http")


async def test_a_client_has_to_show_a_certificate_of_ours(gateway_app, authority, stranger, server):
    config = replace(server, client_ca=authority.file)
    async with http_port(gateway_app.app, "127.0.0.1", 0, certificate=Certificate(config, "http.tls")) as port:
        assert await version(port, authority.client(authority.issue("client", "alice@example.org"))) == 200
        for unproven in (None, stranger.issue("client", "alice@example.org")):
            with pytest.raises(httpx.TransportError):
                await version(port, authority.client(unproven))


def greeted(port: int, context: ssl.SSLContext) -> ssl.SSLSocket:
    with socket.create_connection(("127.0.0.1", port), timeout=10) as plain:
        return context.wrap_socket(plain, server_hostname="localhost")


async def test_old_versions_are_refused_and_the_newest_is_spoken(gateway_app, authority, server):
    old, less_old = authority.client(), authority.client()
    for context, newest in ((old, ssl.TLSVersion.TLSv1_1), (less_old, ssl.TLSVersion.TLSv1_2)):
        context.minimum_version, context.maximum_version = ssl.TLSVersion.TLSv1, newest
        context.set_ciphers("ALL:@SECLEVEL=0")
    async with http_port(gateway_app.app, "127.0.0.1", 0, certificate=Certificate(server, "http.tls")) as port:
        with pytest.raises(ssl.SSLError):
            await asyncio.to_thread(greeted, port, old)
        assert (await asyncio.to_thread(greeted, port, less_old)).version() == "TLSv1.2"
        assert (await asyncio.to_thread(greeted, port, authority.client())).version() == "TLSv1.3"


# --- gRPC ---------------------------------------------------------------------------------------------------------


async def test_grpc_asks_the_same(gateway_app, authority, stranger, server):
    config = replace(server, client_ca=authority.file)
    certificate = Certificate(config, "grpc.tls")
    async with GrpcServer(gateway_app.services, certificate=certificate, grace_seconds=0.0) as port:
        known = authority.issue("client", "alice@example.org")
        assert await is_serving(port, authority, known)
        for ours, shown in ((authority, None), (authority, stranger.issue("client", "alice")), (stranger, known)):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await is_serving(port, ours, shown)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as plain:
            with pytest.raises(grpc.aio.AioRpcError):
                await HealthStub(plain).Check(HealthCheckRequest(), timeout=10)


async def test_grpc_without_a_client_authority_asks_for_none(gateway_app, authority, server):
    certificate = Certificate(server, "grpc.tls")
    async with GrpcServer(gateway_app.services, certificate=certificate, grace_seconds=0.0) as port:
        assert await is_serving(port, authority)


# --- renewal ------------------------------------------------------------------------------------------------------


async def test_a_renewed_certificate_counts_from_the_next_connection_on(gateway_app, tmp_path):
    first, second = Authority.at(tmp_path), Authority.at(tmp_path / "next")
    config = first.issue("server")
    http, rpc = Certificate(config, "http.tls"), Certificate(config, "grpc.tls")
    async with (
        http_port(gateway_app.app, "127.0.0.1", 0, certificate=http) as port,
        GrpcServer(gateway_app.services, certificate=rpc, grace_seconds=0.0) as grpc_port,
    ):
        assert (await version(port, first.client()), await is_serving(grpc_port, first)) == (200, True)
        config.key.write_text("half a renewal")
        assert (await version(port, first.client()), await is_serving(grpc_port, first)) == (200, True)
        renewed = second.issue("server")
        renewed.cert.replace(config.cert)
        renewed.key.replace(config.key)
        assert (await version(port, second.client()), await is_serving(grpc_port, second)) == (200, True)
        with pytest.raises(httpx.ConnectError):
            await version(port, first.client())


async def test_renewed_authorities_of_clients_count_too(gateway_app, authority, stranger, tmp_path):
    client_ca = tmp_path / "clients.pem"
    client_ca.write_bytes(authority.file.read_bytes())
    config = replace(authority.issue("server"), client_ca=client_ca)
    newcomer = authority.client(stranger.issue("client", "bob@example.org"))
    async with http_port(gateway_app.app, "127.0.0.1", 0, certificate=Certificate(config, "http.tls")) as port:
        with pytest.raises(httpx.TransportError):
            await version(port, newcomer)
        client_ca.write_bytes(stranger.file.read_bytes())
        assert await version(port, newcomer) == 200


# --- what is wrong with files -------------------------------------------------------------------------------------


def absent(config: TlsConfig, other: TlsConfig) -> TlsConfig:
    return replace(config, cert=config.cert.with_name("absent.pem"))


def a_folder(config: TlsConfig, other: TlsConfig) -> TlsConfig:
    return replace(config, key=config.key.parent)


def swapped(config: TlsConfig, other: TlsConfig) -> TlsConfig:
    return TlsConfig(config.key, config.cert)


def of_another(config: TlsConfig, other: TlsConfig) -> TlsConfig:
    return replace(config, key=other.key)


def encrypted(config: TlsConfig, other: TlsConfig) -> TlsConfig:
    key = config.key.with_name("encrypted.key")
    key.write_text("-----BEGIN ENCRYPTED PRIVATE KEY-----\nMIIFHDBO\n-----END ENCRYPTED PRIVATE KEY-----\n")
    return replace(config, key=key)


def damaged(config: TlsConfig, other: TlsConfig) -> TlsConfig:
    cert = config.cert.with_name("damaged.pem")
    cert.write_bytes(config.cert.read_bytes()[:200] + b"\n-----END CERTIFICATE-----\n")
    return replace(config, cert=cert)


def no_authority(config: TlsConfig, other: TlsConfig) -> TlsConfig:
    return replace(config, client_ca=config.key)


def damaged_authority(config: TlsConfig, other: TlsConfig) -> TlsConfig:
    return replace(config, client_ca=damaged(config, other).cert)


WRONG = {
    absent: ("http.tls.cert", "absent.pem", "No such file"),
    a_folder: ("http.tls.key", "cannot read", "Is a directory"),
    swapped: ("http.tls.cert", "server.key", "no certificate in PEM"),
    of_another: ("http.tls.key", "other.key", "do not belong together"),
    encrypted: ("http.tls.key", "encrypted.key", "is encrypted"),
    damaged: ("http.tls.cert", "damaged.pem", "cannot be used"),
    no_authority: ("http.tls.client_ca", "server.key", "no certificate in PEM"),
    damaged_authority: ("http.tls.client_ca", "damaged.pem", "no usable certificate"),
}


@pytest.mark.parametrize("spoil", WRONG, ids=lambda spoil: spoil.__name__)
def test_files_that_cannot_be_used_are_named_with_the_reason(spoil, authority, server):
    config = spoil(server, authority.issue("other"))
    with pytest.raises(ConfigError) as caught:
        Certificate(config, "http.tls")
    for words in WRONG[spoil]:
        assert words in str(caught.value)
    assert "BEGIN" not in str(caught.value).replace("BEGIN CERTIFICATE", "")


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"cert": "a.pem"}, "http.tls.key: is required"),
        ({}, "http.tls.cert: is required"),
        ({"cert": "a.pem", "key": "a.key", "client-ca": "b"}, "did you mean client_ca"),
        ({"cert": "a.pem", "key": 5}, "http.tls.key"),
        ("a.pem", "http.tls: must be a mapping"),
    ],
)
def test_half_a_section_is_refused(section, words, tmp_path):
    with pytest.raises(ConfigError, match=words):
        parse_config({"http": {"tls": section}}, {}, tmp_path)


def test_paths_start_from_the_configurations_folder(tmp_path):
    tls = {"cert": "tls/a.pem", "key": "/etc/a.key", "client_ca": "${CA}"}
    config = parse_config({"grpc": {"tls": tls}}, {"CA": "ca.pem"}, tmp_path)
    assert config.grpc.tls == TlsConfig(tmp_path / "tls/a.pem", Path("/etc/a.key"), tmp_path / "ca.pem")
    assert config.http.tls is None
