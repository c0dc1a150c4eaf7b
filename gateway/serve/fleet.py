"""Runs several gateway processes on the same ports, over one engine and one Redis: `loralane serve --gateways N`.

The fleet process itself serves no requests. It starts the store, the engine and the gateways, restarts engine and
gateways that die, and stops all in order. The kernel distributes connections between the gateways that listen
(SO_REUSEPORT): there is no proxy, and a gateway that is dead or not ready yet gets no connections.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import structlog
from prometheus_client.multiprocess import mark_process_dead

from gateway.config.whole import Config
from gateway.serve.addresses import Endpoint, Listening, Ports, endpoints, reserve_port, with_ports
from gateway.serve.backends import started_backends
from gateway.serve.engine_group import EngineGroup, ModelEngines
from gateway.serve.launch import Launch, StartError, share_of
from gateway.serve.orders import ANNOUNCE, FOLLOW, LISTEN, LISTENING, READY, SEED, Orders
from gateway.serve.process import freeze_memory, reload_requested
from gateway.serve.reload import Read, reloading
from gateway.serve.start_bar import StartBar
from gateway.serve.stopping import Stop, tell_stopping
from gateway.serve.supervisor import NOT_STARTED, Backoff
from gateway.terminal.console import Console

log = structlog.get_logger("fleet")

STOP_SECONDS = 30.0
"""Seconds that a gateway may take to stop after the grace period of its requests, before it is killed: it hands
batches over, and sends settlements."""


class GatewayProcess:
    """One member of the fleet: a gateway process, and the successors that `run` starts when it dies. The fleet creates
    it, sets `may_begin` (it may get its orders) and `may_listen` (it may open its ports), and sends it settings."""

    def __init__(self, orders: Orders, stop: Stop) -> None:
        self.ready = asyncio.Event()
        """Set once the first process has started completely, except that it does not listen on its ports yet."""
        self.serving = asyncio.Event()
        """Set while a process listens on the ports. Cleared late for one that drains and is then to end: when an answer
        is expected from it."""
        self.may_begin = asyncio.Event()
        """Set by the fleet when processes may get their orders; `may_listen` is set when they may open their ports."""
        self.may_listen = asyncio.Event()
        self.restarts = 0
        self._orders = orders
        self._stopping = stop
        stop.on_force(self._kill)
        self._has_served = False
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    @property
    def pid(self) -> int | None:
        """Id of the running gateway process; None means that no process runs."""
        return self._process.pid if self._process and self._process.returncode is None else None

    async def run(self) -> None:
        """Run the process, and restart it with backoff when it dies, until the call is cancelled; then stop it
        gracefully. Raises StartError if the first process died before it served, as a successor would, too."""
        backoff = Backoff()
        try:
            while True:
                backoff.started()
                code = await self._try_run_once()
                if not self._has_served:
                    raise StartError("a gateway did not start; the reason is above")
                pause = backoff.died()
                tell = log.error if code else log.info  # an administrator may drain a process, which then ends in order
                tell("gateway_exited", gateway=self._orders.number, code=code, restart_in_seconds=pause)
                await asyncio.sleep(pause)
                self.restarts += 1
        finally:
            await self._stop()

    def announce(self) -> None:
        """Order the process to print the banner on its standard error."""
        if self._writer is not None:
            self._writer.write(ANNOUNCE)

    async def apply_settings(self, config: Config) -> None:
        """Send another configuration to the process, and wait until it has applied the settings; successors get it,
        too. A process that does not listen yet is killed, so that its successor starts with the new configuration. One
        that is about to end goes on with the settings that it has."""
        self._orders = replace(self._orders, launch=replace(self._orders.launch, config=config))
        if self._reader is not None and self._reader.at_eof():
            self.serving.clear()
        elif not self.serving.is_set():
            self._kill()
        elif self._writer is not None:
            self._writer.write(FOLLOW)
            self._orders.write(self._writer)
            await self._answer()

    async def seed(self) -> dict[str, str] | None:
        """Order the process to write the tenants and adapters of the configuration from `apply_settings` to the
        registries. Returns its answer, adapter -> reason for adapters that cannot be served. None means
        that it died or is about to end, and may have written only a part."""
        if self._writer is None:
            return None
        self._writer.write(SEED)
        answer = await self._answer()
        return msgspec.json.decode(answer, type=dict[str, str]) if answer else None

    @property
    def preload(self) -> Mapping[str, Path]:
        """Folders of the adapters that successors of the process load at start, by name. Can be set."""
        return self._orders.launch.config.preloaded()

    @preload.setter
    def preload(self, preload: Mapping[str, Path]) -> None:
        self._orders = replace(self._orders, launch=self._orders.launch.preloading(preload))

    async def _answer(self) -> bytes:
        """Read and return one line from the process. Empty means that the process died or is about to end, and serves
        no more; its successor gets the new orders."""
        line = b""
        with suppress(ConnectionError):
            line = await self._reader.readline() if self._reader else b""
        if not line:
            self.serving.clear()
        return line

    def _kill(self) -> None:
        """Kill the process group of the gateway process with SIGKILL, if the process runs."""
        if (pid := self.pid) is not None:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)

    async def _try_run_once(self) -> int | None:
        """Run one process to its end. Returns its exit code, or None, after logging the error, if the operating system
        could not start it."""
        try:
            return await self._run_once()
        except OSError:  # out of processes, memory or descriptors
            log.exception("gateway_not_started", gateway=self._orders.number)
            return None

    async def _run_once(self) -> int:
        """Start one process, send it its orders and wait until it ends; returns its exit code. Raises OSError if it
        cannot be started."""
        ours, theirs = socket.socketpair()
        with theirs:
            # In its own session, so that Ctrl-C in a terminal reaches only the fleet, which stops all in order.
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "gateway.serve.worker", str(theirs.fileno())),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env=_environment(self._orders.backends.metrics),
                start_new_session=True,
            )
        self._reader, self._writer = await asyncio.open_connection(sock=ours)
        try:
            with suppress(ConnectionError):
                await self._send_orders(self._reader, self._writer)
            return await self._process.wait()
        finally:
            self.serving.clear()
            self._clean_up(self._process)

    async def _send_orders(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self.may_begin.wait()
        self._orders.write(writer)
        if await reader.readline() != READY:
            return
        self.ready.set()
        await self.may_listen.wait()
        writer.write(LISTEN)
        if await reader.readline() == LISTENING:
            self._has_served = True
            self.serving.set()

    def _clean_up(self, process: asyncio.subprocess.Process) -> None:
        if process.returncode is None:
            return
        if self._writer is not None:
            self._writer.close()
        if self._orders.backends.metrics is not None:
            mark_process_dead(process.pid, str(self._orders.backends.metrics))

    async def _stop(self) -> None:
        process = self._process
        if process is not None and process.returncode is None:
            await self._end(process)
        if self._writer is not None:
            self._writer.close()

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        """Ask a process to stop, in a hurry as soon as the fleet is in one, and kill it if it takes too long."""
        stop = self._stopping
        ended, hurried = asyncio.ensure_future(process.wait()), asyncio.ensure_future(stop.hurried.wait())
        if not stop.in_hurry:
            process.send_signal(signal.SIGTERM)
            limit = stop.drain_seconds + STOP_SECONDS
            await asyncio.wait((ended, hurried), timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        if stop.in_hurry and not ended.done():
            process.send_signal(signal.SIGINT)
            await asyncio.wait((ended,), timeout=STOP_SECONDS)
        hurried.cancel()
        if not ended.done():
            process.kill()
        await ended


@dataclass(frozen=True, slots=True)
class Fleet(Listening):
    """A running fleet: its gateway processes, and their engines."""

    members: Sequence[GatewayProcess]
    engines: ModelEngines

    async def apply(self, config: Config) -> Mapping[str, str]:
        """Apply a configuration that was read again to all gateways, and the lanes' goals to the next engine process.
        Returns adapter -> reason for adapters that cannot be served.

        All gateways get the new settings before one of them writes the adapters and tenants to the registries, where
        the others find them: by then each gateway is allowed to serve these.
        """
        self.engines.promise_all(config)
        config = share_of(with_ports(config, self.ports), len(self.members))
        before, after = self.members[0].preload, config.preloaded()
        for member in self.members:
            await member.apply_settings(config)
        failed = await self._seed()
        # A name that another adapter has would keep a gateway from starting. Its previous source is still served.
        kept = {name: (before if name in failed else after).get(name) for name in after}
        for member in self.members:
            member.preload = {name: path for name, path in kept.items() if path is not None}
        return failed

    async def _seed(self) -> dict[str, str]:
        """Have one member write the tenants and adapters to the registries, and return its answer. Empty if no member
        serves; their successors write them when they start."""
        for member in self.members:
            if member.serving.is_set() and (failed := await member.seed()) is not None:
                return failed
        return {}


async def serve(launch: Launch, console: Console, read: Read | None = None, bar: StartBar | None = None) -> bool:
    """Run a fleet until a signal asks it to stop (see `stopping`); returns whether the stop is a hurried one (Ctrl-C).

    Args:
        console: shows messages about a stop, or about a configuration that was read again.
        read: reads the configuration again on SIGHUP. None means that there is no file: SIGHUP stops the gateways.
        bar: shows the progress of the start, and is closed when all gateways are ready.

    Raises:
        StoppedEarly: the signal came before all gateways were ready.
        StartError, StoreStartError: what `running_fleet` raises.
    """
    bar = bar or StartBar.hidden()
    stop, asked = Stop(launch.config.http.drain), reload_requested() if read else asyncio.Event()
    stop.listen(hangup=read is None)
    stop.on_force(lambda: console.show_cursor(True))
    with stop.starting():
        async with running_fleet(launch, stop, bar) as fleet:
            stop.started()
            bar.close()
            freeze_memory()
            fleet.members[0].announce()
            async with reloading(asked, read, launch.config, fleet.apply, console):
                await stop.asked.wait()
            tell_stopping(stop, console)
    return stop.in_hurry


@asynccontextmanager
async def running_fleet(launch: Launch, stop: Stop | None = None, bar: StartBar | None = None) -> AsyncIterator[Fleet]:
    """Run the store, the engine and `launch.config.gateways` gateways until the block ends; the block begins when all
    gateways serve. Raises StartError if a port is not available, the model cannot be prepared or a process does not
    start, and on other systems than Linux; StoreStartError if the store does not start.

    Args:
        stop: decides how long running requests may take at the end. None means the grace period of an unhurried stop.
        bar: shows the progress of the start. None means that it is not shown.
    """
    stop = stop or Stop(launch.config.http.drain)
    if not sys.platform.startswith("linux"):
        raise StartError("several gateways on one port need Linux, whose kernel deals connections out between them")
    with ExitStack() as stack:
        ports = tuple(_reserved(stack, endpoint) for endpoint in endpoints(launch.config))
        metrics = stack.enter_context(tempfile.TemporaryDirectory(prefix="loralane-metrics-"))
        config = share_of(with_ports(launch.config, ports), launch.config.gateways)
        async with started_backends(launch, stop, bar or StartBar.hidden()) as (backends, group):
            own, backends = replace(launch, config=config), replace(backends, metrics=Path(metrics))
            members = [GatewayProcess(Orders(number, own, backends), stop) for number in range(config.gateways)]
            async with _members_running(members, group):
                yield Fleet(members, group, ports=ports)


def _reserved(stack: ExitStack, endpoint: Endpoint) -> Ports:
    http = stack.enter_context(reserve_port(endpoint.http.host, endpoint.http.port))
    return Ports(http, stack.enter_context(reserve_port(endpoint.grpc.host, endpoint.grpc.port)))


@asynccontextmanager
async def _members_running(members: Sequence[GatewayProcess], engines: EngineGroup) -> AsyncIterator[None]:
    """Run the members until the block ends. The block begins when all of them serve. Raises StartError if a member or
    the engine ends before.

    The first gateway is ready before the others get their orders: by then it has written the configured adapters and
    tenants to the registries. The others import their modules meanwhile, which is most of their start.
    """
    tasks = [asyncio.create_task(_fail_with_engine(engines))]
    tasks += [asyncio.create_task(member.run(), name="gateway") for member in members]
    try:
        for group in (members[:1], members[1:]):
            for member in group:
                member.may_begin.set()
            await _wait_all([member.ready for member in group], tasks)
        for member in members:
            member.may_listen.set()
        await _wait_all([member.serving for member in members], tasks)
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _fail_with_engine(engines: EngineGroup) -> None:
    await engines.wait_first_exit()
    raise StartError(NOT_STARTED)


async def _wait_all(events: Iterable[asyncio.Event], tasks: Sequence[asyncio.Task[None]]) -> None:
    """Wait until all events are set. If one of the tasks fails before that, raise its exception."""
    waiting = asyncio.create_task(_wait_each(events))
    try:
        done, _ = await asyncio.wait((waiting, *tasks), return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        waiting.cancel()


async def _wait_each(events: Iterable[asyncio.Event]) -> None:
    for event in events:
        await event.wait()


def _environment(metrics: Path | None) -> dict[str, str]:
    """Return the environment of a gateway process: this process's and, with a metrics folder, the variable by which
    prometheus_client chooses its multiprocess mode when it is imported."""
    return {**os.environ, **({"PROMETHEUS_MULTIPROC_DIR": str(metrics)} if metrics else {})}
