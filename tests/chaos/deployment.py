"""The whole system as real processes: Valkey, the engine and the gateways, started as users start them.

    callers -> gateways -> proxy -> engine -> proxy -> another engine
                        -> proxy -> Valkey

Every process of a deployment carries the deployment's folder in its environment, so that tests find and end it even
when the process that started it is gone.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import grpc
import httpx
import psutil

from engine.pb import engine_pb2 as pb
from engine.pb import engine_pb2_grpc as pb_grpc
from tests.chaos.patience import until
from tests.chaos.proxy import Proxy
from tests.chaos.settings import ADAPTERS, ADMIN_KEY, free_port, write_config
from tests.chaos.store import Store, die_with_parent
from tests.gateway.certificates import Authority

ROOT = Path(__file__).parents[2]
INSIDE = Path(__file__).parent / "inside"
MARK = "CHAOS_FOLDER"
START_SECONDS = 60.0
READY_SECONDS = 10.0
"""From a fault's end until everything is as before."""
WATCH_SECONDS = 0.2
LOOKS = 4
"""For each gateway: the kernel deals connections out as it likes."""

KvLine = Literal["tcp", "mtls", "memory"]
Role = Literal["server", "gateway", "engine", "store", "other"]
"""other: what those start for a while, as for looking at a batch's input."""
PROGRAMS: dict[str, Role] = {
    "tests.chaos.serve_process": "server",
    "gateway.serve.worker": "gateway",
    "tests.chaos.engine_process": "engine",
}


@dataclass(frozen=True)
class Kind:
    """The size and the engine of a deployment."""

    model_dir: Path
    gateways: int = 2
    fake: bool = True
    """The engine's executor answers with digests; else it computes the model of `model_dir`, with random weights."""
    ready_seconds: float = READY_SECONDS
    roles: tuple[str, ...] = ()
    """Parts of split requests, one for each engine. None means that there is one engine, which splits nothing."""
    kv_line: KvLine = "tcp"
    """How engines exchange KV: over TCP, through a proxy for each, without or with mutual TLS, or in shared memory."""

    @property
    def engines(self) -> int:
        return len(self.roles) or 1


class Deployment:
    """The processes of one running system; `deployed` makes it.

    The process called server is the one that a user starts: a gateway, or the one that starts several gateways.
    """

    def __init__(self, folder: Path, kind: Kind) -> None:
        self.folder = folder
        self.kind = kind
        self.environment = {
            **os.environ,
            MARK: str(folder),
            "PYTHONPATH": f"{INSIDE}{os.pathsep}{ROOT}",
            "OMP_NUM_THREADS": "1",
        }
        self.store = Store(folder, self.environment)
        self.redis_line = Proxy(self.store.socket)
        self.engine_lines = [Proxy(folder / f"engine-{number}.sock") for number in range(kind.engines)]
        self.kv_ports = [free_port() for _ in kind.roles if kind.kv_line != "memory"]
        self.kv_lines = [Proxy(("127.0.0.1", port)) for port in self.kv_ports]
        """Where each engine gives KV to the others."""
        self.lines = {"redis": [self.redis_line], "engine": self.engine_lines, "kv": self.kv_lines}
        self.clock = folder / "clock"
        """Has the seconds by which the wall clock is wrong."""
        self.out_of_memory = folder / "out_of_memory"
        """While it is there, the engine's next step fails."""
        self.corrupt_kv = folder / "corrupt_kv"
        """While it is there, pages that engines send in shared memory are wrong."""
        self.http_port = free_port()
        self.redis_port = 0
        self.request_log = folder / "requests.log"
        self._server: subprocess.Popen[bytes] | None = None
        self._watching: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    async def start(self) -> None:
        self._make_adapters()
        await self.store.start()
        for number, line in enumerate(self.engine_lines):
            await line.listen_unix(self.folder / f"engine-front-{number}.sock")
        if self.kv_lines:
            fronts = [await line.listen_tcp() for line in self.kv_lines]
            (self.folder / "kv_ports").write_text(json.dumps(list(zip(self.kv_ports, fronts, strict=True))))
        if self.kind.kv_line == "mtls":
            Authority.at(self.folder / "kv_tls").issue("engine")
        self.redis_port = await self.redis_line.listen_tcp()
        write_config(
            self.folder,
            http_port=self.http_port,
            redis_port=self.redis_port,
            gateways=self.kind.gateways,
            load_format="auto" if self.kind.fake else "dummy",
            roles=self.kind.roles,
        )
        self._start_server()
        await until(self._has_started, START_SECONDS, "the deployment to start")
        self._watching = asyncio.create_task(self._watch())

    def _make_adapters(self) -> None:
        (self.folder / "adapters").mkdir()
        for number, name in enumerate(ADAPTERS):
            if self.kind.fake:
                (self.folder / "adapters" / name).mkdir()
            else:
                from tests.model.tiny_adapters import save_adapter  # which imports torch

                save_adapter(self.folder / "adapters" / name, rank=2 + number, seed=number)

    async def _watch(self) -> None:
        """Restart the server when it has died, as a service manager does."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            if self._server_is_dead:
                self._start_server()

    def _start_server(self) -> None:
        engine = ["tests.chaos.engine_process", "--hooks", str(self.folder), *(["--fake"] if self.kind.fake else [])]
        program = [sys.executable, "-m", "tests.chaos.serve_process", str(self.folder / "config.yaml")]
        program += [str(self.folder / "data"), str(self.kind.model_dir)]
        with self.request_log.open("ab") as out, (self.folder / "errors.log").open("ab") as err:
            self._server = subprocess.Popen(
                [*program, *engine],
                cwd=ROOT,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )

    def kill_server(self) -> None:
        assert self._server is not None
        self._server.kill()
        self._server.wait()

    def _watch_no_more(self) -> None:
        if self._watching is not None:
            self._watching.cancel()

    @property
    def _server_is_dead(self) -> bool:
        return self._server is None or self._server.poll() is not None

    def processes(self) -> dict[Role, list[psutil.Process]]:
        """Return the live processes by role. The store finds Valkey, which overwrites its environment."""
        found: dict[Role, list[psutil.Process]] = {"server": [], "gateway": [], "engine": [], "other": []}
        found["store"] = self.store.processes()
        for process in psutil.process_iter():
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                if process.environ().get(MARK) == str(self.folder):
                    found[_role(process)].append(process)
        return found

    def gateways(self) -> list[psutil.Process]:
        """Return the processes that answer requests."""
        found = self.processes()
        return found["gateway"] if self.kind.gateways > 1 else found["server"]

    def engines(self, role: str) -> list[psutil.Process]:
        """Return the processes of the engines with a role."""
        return [process for process in self.processes()["engine"] if self.kind.roles[_number(process)] == role]

    async def until_ready(self) -> float:
        """Wait until the deployment is ready, and return the seconds that it took. Raises Late."""
        return await until(self._is_ready, self.kind.ready_seconds, "the deployment to be ready")

    def admin(self) -> httpx.AsyncClient:
        """Return an administrator's client that opens a new connection, maybe to another gateway, for each request."""
        headers = {"authorization": f"Bearer {ADMIN_KEY}", "connection": "close"}
        return httpx.AsyncClient(base_url=self.url, headers=headers, timeout=5.0)

    async def engine_stats(self) -> list[pb.EngineStats]:
        """Return each engine's statistics with its integrity check, over connections that bypass the proxies."""
        return [await self._stats_of(number) for number in range(self.kind.engines)]

    async def _stats_of(self, number: int) -> pb.EngineStats:
        async with grpc.aio.insecure_channel(f"unix:{self.folder}/engine-{number}.sock") as channel:
            return await pb_grpc.EngineStub(channel).Stats(pb.StatsRequest(check=True), timeout=5.0)

    async def stop(self) -> None:
        """Stop the server as a user does. Fails if any process outlives it."""
        self._watch_no_more()
        if not self._server_is_dead:
            assert self._server is not None
            self._server.terminate()
            await asyncio.to_thread(self._server.wait, 60)
        left = {role: found for role, found in self.processes().items() if found and role != "store"}
        assert not left, f"processes outlive the one that was stopped: {left}"

    async def raze(self) -> None:
        """Kill all processes of the deployment, whatever their state."""
        self._watch_no_more()
        for found in self.processes().values():
            for process in found:
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGCONT)
                    process.kill()
        if self._server is not None:
            self._server.wait()
        self.store.kill()
        for line in (line for lines in self.lines.values() for line in lines):
            await line.close()

    async def _has_started(self) -> bool:
        assert not self._server_is_dead, "it ended at once"
        return await self._is_ready()

    async def _is_ready(self) -> bool:
        serving = [process for process in self.gateways() if _listens(process, self.http_port)]
        if len(serving) != self.kind.gateways:
            return False
        with suppress(httpx.TransportError, grpc.aio.AioRpcError):
            await self.engine_stats()
            async with self.admin() as http:
                looks = range(LOOKS * self.kind.gateways)
                states = [(await http.get("/ready")).json() for _ in looks]
                engines = [(await http.get("/admin/v1/engines")).json()["engines"] for _ in looks]
            is_whole = all(engine["state"] == "serving" for found in engines for engine in found)
            return is_whole and all(
                state["status"] == "ready" and state["limiter_modes"] == ["redis"] for state in states
            )
        return False


@asynccontextmanager
async def deployed(kind: Kind) -> AsyncIterator[Deployment]:
    """Start a deployment, yield it once it is ready, and end all of its processes afterwards."""
    with TemporaryDirectory(prefix="chaos-") as folder:
        deployment = Deployment(Path(folder), kind)
        try:
            await deployment.start()
            yield deployment
            await deployment.stop()
        except BaseException:
            print(tail(deployment.folder / "errors.log"), file=sys.stderr)
            raise
        finally:
            await deployment.raze()


def tail(path: Path, size: int = 4000) -> str:
    return path.read_text(errors="replace")[-size:] if path.exists() else ""


def _role(process: psutil.Process) -> Role:
    words = process.cmdline()
    return next((role for program, role in PROGRAMS.items() if program in words[:3]), "other")


def _number(engine: psutil.Process) -> int:
    """Return the number of an engine, the name of its socket's folder."""
    words = engine.cmdline()
    return int(Path(words[words.index("--address") + 1]).parent.name)


def _listens(process: psutil.Process, port: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        links = process.net_connections("tcp")
        return any(link.status == psutil.CONN_LISTEN and link.laddr.port == port for link in links)
    return False
