"""Clients' connections leave descriptors to the process: in processes of their own, which are allowed few."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from gateway.core import file_descriptors

resource = pytest.importorskip("resource")

CROWD = """
import asyncio, json, os, resource, socket, sys
import structlog, uvloop

hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (160, hard))

from gateway.core.file_descriptors import grpc_connections, http_descriptors
from gateway.http.connections import BoundedProtocol
from gateway.rpc.api import _options
from gateway.serve.listeners import HttpServer
import grpc

async def app(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})

CONNECT = '''
import resource, socket, sys
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
held = [socket.create_connection(("127.0.0.1", int(port))) for port in sys.argv[1:] for _ in range(150)]
print("held", flush=True)
sys.stdin.read()
'''

def works():
    files = [open("/dev/null") for _ in range(16)]
    return len(files)

async def main():
    server = HttpServer(app, "127.0.0.1", 0)
    rpc = grpc.aio.server(options=_options(2**20, False))
    ports = [await server.start(), rpc.add_insecure_port("127.0.0.1:0")]
    await rpc.start()

    async def get():
        reader, writer = await asyncio.open_connection("127.0.0.1", ports[0])
        writer.write(b"GET / HTTP/1.1\\r\\nhost: a\\r\\nconnection: close\\r\\n\\r\\n")
        try:
            return (await reader.read()).split(b"\\r\\n")[0].decode()
        except ConnectionError:
            return "closed"
        finally:
            writer.close()

    before = await get()
    with structlog.testing.capture_logs() as logs:
        crowd = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", CONNECT, *map(str, ports)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        await crowd.stdout.readline()
        await asyncio.sleep(0.5)
        http = len(server._server.server_state.connections)
        opened = len(os.listdir("/proc/self/fd"))
        during = await get()
        free = works()
    crowd.stdin.close()
    await crowd.wait()
    for _ in range(1000):
        if (after := await get()) == before:
            break
        await asyncio.sleep(0.02)
    told = [line["event"] for line in logs]
    print(json.dumps([before, http, opened, during, free, after, told, http_descriptors(), grpc_connections()]))
    await server.stop(0.0)
    await rpc.stop(0)

uvloop.run(main())
"""


def test_a_crowd_of_connections_leaves_descriptors_free_and_one_line_in_the_log():
    run = subprocess.run([sys.executable, "-c", CROWD], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    before, http, opened, during, free, after, told, bound, _ = json.loads(
        next(line for line in run.stdout.splitlines() if line.startswith('["'))
    )
    assert before == after == "HTTP/1.1 200 OK"
    assert (during in ("", "closed"), free) == (True, 16)
    assert 0 < http < bound
    assert opened <= 160 - 40 + 2
    assert told == ["connections_refused"]


def test_the_limit_is_raised_as_far_as_the_system_allows():
    script = """
import resource
from gateway.core.file_descriptors import raise_limit
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (100, hard))
raise_limit()
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0], hard)
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    soft, hard = map(int, run.stdout.split())
    assert soft == min(hard, file_descriptors.MOST) or hard == resource.RLIM_INFINITY


@pytest.mark.parametrize(("limit", "grpc", "http"), [(256, 24, 144), (1024, 112, 672), (2**20, 131_056, 786_336)])
def test_bounds_follow_the_limit(limit, grpc, http, monkeypatch):
    monkeypatch.setattr(file_descriptors, "_limit", lambda: limit)
    assert (file_descriptors.grpc_connections(), file_descriptors.http_descriptors()) == (grpc, http)
    assert http + 2 * grpc <= limit - min(128, limit // 4)
