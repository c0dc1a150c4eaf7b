"""What the gateway's address itself answers, and the banner that names it."""

from __future__ import annotations

import io
from dataclasses import replace

import httpx
import pytest
from fakes import build_gateway_app
from rich.console import Console

from gateway.config.sections import AdminConfig
from gateway.config.whole import demo_config
from gateway.core.tenants import hash_key
from gateway.http.routes.root import RootApi
from gateway.http.settings import GrpcAddress, PortSettings
from gateway.serve.addresses import Ports
from gateway.serve.banner import Banner

BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


@pytest.fixture
async def gateway_app(tmp_path):
    return await build_gateway_app(tmp_path)


async def test_browsers_are_sent_to_the_console_and_others_learn_what_answers(gateway_app):
    async with gateway_app.client(None) as client:
        response = await client.get("/", headers=BROWSER)
        assert (response.status_code, response.headers["location"]) == (307, "console")
        body = (await client.get("/")).json()
    assert body["name"] == "loralane"
    assert body["grpc"] is None


async def test_a_port_without_the_console_redirects_no_browser():
    from starlette.applications import Starlette

    settings = PortSettings(surface="public", grpc=lambda: GrpcAddress(50051, tls=True))
    app = Starlette(routes=RootApi(settings).routes())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as client:
        response = await client.get("/", headers=BROWSER)
    assert response.json()["grpc"] == {"port": 50051, "tls": True}


def banner(gateway_app, config, http=8000):
    console = Console(file=io.StringIO(), width=60)
    Banner(config, gateway_app.gateway, [Ports(http, 50051)]).print(console)
    return console.file.getvalue()


async def test_the_demos_banner_links_to_the_console_with_its_public_key(gateway_app):
    told = banner(gateway_app, demo_config())
    assert "http://127.0.0.1:8000/console#key=sk-demo-admin" in told
    assert "\nloralane adapters ls\n" in told
    assert "LORALANE_URL" not in told


async def test_no_other_key_is_ever_shown(gateway_app):
    config = replace(demo_config(), tenants={}, admin=AdminConfig((hash_key("sk-secret-admin-key"),)))
    told = banner(gateway_app, config, http=9000)
    assert "#key" not in told
    assert "sk-" not in told
    assert "\nexport LORALANE_URL=http://127.0.0.1:9000\nloralane chat " in told
