"""Two pairs of ports, all with TLS: what each offers, by one process and by several; commands that are clients."""

from __future__ import annotations

import asyncio
import io
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import httpx
import pytest
import pytest_asyncio
from certificates import Authority
from fakes import tiny_tokenizer
from rich.console import Console

from engine.config import EngineConfig
from gateway.config.file import ConfigError
from gateway.config.models import ModelConfig
from gateway.config.sections import AdminConfig, GrpcConfig, HttpConfig, TlsConfig
from gateway.config.whole import Config, TenantConfig, parse_config
from gateway.core.tenants import Tenant, hash_key
from gateway.pb import adapters_pb2, adapters_pb2_grpc, generation_pb2, generation_pb2_grpc
from gateway.serve.addresses import Ports
from gateway.serve.fleet import running_fleet
from gateway.serve.launch import Launch
from gateway.serve.single import running

ROOT = Path(__file__).parents[3]
KEY, ADMIN_KEY = "sk-acme-0123456789", "sk-admin-0123456789"
COMPLETION = {"model": "served", "prompt": [5, 6, 7], "max_tokens": 2}

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


@pytest.fixture(scope="module")
def authority(tmp_path_factory) -> Authority:
    return Authority.at(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def shown(authority) -> TlsConfig:
    return authority.issue("client", "operator@example.org")


@pytest.fixture(scope="module")
def launch(authority, tmp_path_factory) -> Launch:
    """A launch with the fake engine and, in place of a model, a folder that holds only a tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    tiny_tokenizer()._template.save_pretrained(folder)
    tls = authority.issue("server")
    both_ways = replace(tls, client_ca=authority.file)
    config = Config(
        model=ModelConfig(name="served"),
        engine=EngineConfig(model="", num_pages=4096),
        tenants={"acme": TenantConfig(Tenant("acme"), (hash_key(KEY),))},
        http=HttpConfig(port=0, tls=tls),
        grpc=GrpcConfig(port=0, tls=tls),
        admin=AdminConfig((hash_key(ADMIN_KEY),), port=0, grpc_port=0, tls=both_ways),
    )
    return Launch(config, folder, tmp_path_factory.mktemp("data"), ("engine.serve.server", "--fake"))


@asynccontextmanager
async def alone(launch: Launch) -> AsyncIterator[tuple[Ports, ...]]:
    async with running(launch) as app:
        said = io.StringIO()
        app.banner.print(Console(file=said, width=200))
        public, admin = (f"https://127.0.0.1:{port.http}" for port in app.ports)
        for words in (f"{public} ", f"curl {public}/v1", f"{admin}/console  (clients show a certificate of ca.pem)"):
            assert words in said.getvalue()
        assert "-plaintext" not in said.getvalue()
        yield app.ports


@asynccontextmanager
async def together(launch: Launch) -> AsyncIterator[tuple[Ports, ...]]:
    async with running_fleet(replace(launch, config=replace(launch.config, gateways=2))) as fleet:
        yield fleet.ports


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=[alone, together], ids=["alone", "together"])
async def ports(launch, request):
    async with request.param(launch) as found:
        yield found


def client(port: int, key: str, authority: Authority, shown: TlsConfig | None = None) -> httpx.AsyncClient:
    headers = {"authorization": f"Bearer {key}", "connection": "close"}
    return httpx.AsyncClient(base_url=f"https://127.0.0.1:{port}", headers=headers, verify=authority.client(shown))


async def test_callers_find_no_administration(ports, authority):
    async with client(ports[0].http, ADMIN_KEY, authority) as http:
        for path in ("/admin/v1/tenants", "/admin/v1/check", "/metrics", "/console", "/console/app.js"):
            assert (await http.get(path)).status_code == 404, path
        assert (await http.post("/v1/load_lora_adapter", json={})).status_code == 404
        document = (await http.get("/openapi.json")).json()
        assert (await http.get("/ready")).json()["status"] == "ready"
    assert "/v1/chat/completions" in document["paths"]
    assert not [path for path in document["paths"] if "admin" in path or "lora" in path or path == "/metrics"]
    async with client(ports[0].http, KEY, authority) as http:
        answers = await asyncio.gather(*(http.post("/v1/completions", json=COMPLETION) for _ in range(8)))
    assert [answer.status_code for answer in answers] == [200] * 8


async def test_administrators_find_nothing_else(ports, authority, shown):
    async with client(ports[1].http, ADMIN_KEY, authority, shown) as http:
        for path in ("/admin/v1/tenants", "/metrics", "/console", "/ready"):
            assert (await http.get(path)).status_code == 200, path
        assert (await http.post("/v1/completions", json=COMPLETION)).status_code == 404
        document = (await http.get("/openapi.json")).json()
    assert "/admin/v1/tenants" in document["paths"] and "/v1/completions" not in document["paths"]


async def test_administrators_have_to_show_a_certificate(ports, authority):
    async with client(ports[1].http, ADMIN_KEY, authority) as http:
        with pytest.raises(httpx.TransportError):
            await http.get("/ready")


async def test_services_of_grpc_are_divided_alike(ports, authority, shown):
    files = (authority.file.read_bytes(), shown.key.read_bytes(), shown.cert.read_bytes())
    credentials = grpc.ssl_channel_credentials(*files)
    mine, theirs = ((("authorization", f"Bearer {key}"),) for key in (ADMIN_KEY, KEY))
    words = generation_pb2.TokenizeRequest(model="served", prompt="hi")
    found = []
    for port in ports:
        async with grpc.aio.secure_channel(f"127.0.0.1:{port.grpc}", credentials) as channel:
            adapters = adapters_pb2_grpc.AdapterAdminStub(channel)
            listing = adapters.List(adapters_pb2.ListAdaptersRequest(), metadata=mine)
            tokenizing = generation_pb2_grpc.GenerationStub(channel).Tokenize(words, metadata=theirs)
            found.append((await listing.code(), await tokenizing.code()))
    missing, ok = grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.OK
    assert found == [(missing, ok), (ok, missing)]


async def test_commands_are_clients_of_it(ports, authority, shown):
    known = ["--ca", str(authority.file)]
    proof = ["--cert", str(shown.cert), "--cert-key", str(shown.key)]
    target = ["adapters", "ls", "--json", "--url", f"https://127.0.0.1:{ports[1].http}"]
    chat = ["chat", "--url", f"https://127.0.0.1:{ports[0].http}"]
    done, trusting, unknown, talk = await asyncio.gather(
        loralane(*known, *proof, *target),
        loralane(*known, *target),
        loralane("--ca", "absent.pem", *target),
        loralane(*known, *chat),
    )
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr
    assert trusting.returncode == 1 and "error:" in trusting.stderr
    assert unknown.returncode == 1 and "--ca absent.pem: No such file" in unknown.stderr
    assert talk.returncode == 0 and "served" in talk.stdout, talk.stderr


async def loralane(*arguments: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "LORALANE_ADMIN_KEY": ADMIN_KEY, "LORALANE_API_KEY": KEY, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "gateway", *arguments]
    options = {"capture_output": True, "text": True, "input": "/exit\n", "timeout": 120, "env": env}
    return await asyncio.to_thread(subprocess.run, command, check=False, **options)


# --- before anything is started -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("admin", "words"),
    [
        ({"port": 9000}, "admin: port and grpc_port go together"),
        ({"grpc_port": 9000}, "admin: port and grpc_port go together"),
        ({"port": 9000, "grpc_port": 70000}, "admin: port must be between"),
        ({"keys": ["sk-demo-admin"], "host": "0.0.0.0", "port": 9000, "grpc_port": 9001}, "admin.host: 0.0.0.0 would"),
    ],
)
async def test_a_section_that_would_leave_administration_in_public(admin, words, tmp_path):
    with pytest.raises(ConfigError, match=words):
        parse_config({"admin": admin}, {}, tmp_path)
