"""The gateway's side of the process that uses Ray: starts it again when it ends, and holds its last reports."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from asyncio.subprocess import PIPE, Process

import msgspec
import structlog

from engine.process.tasks import end_task
from gateway.cluster.reports import Reports, Wanted

log = structlog.get_logger("cluster")

PAUSE_SECONDS = 5.0
"""Seconds before the process is started again after it ended."""
CONNECT_SECONDS = 60.0
"""Seconds that the first connection to Ray may take."""
REACH_SECONDS = 10.0
"""Seconds that the cluster's head may take to accept a connection."""
STOP_SECONDS = 20.0
"""Seconds that the process may take to stop all engines before it is killed."""
MAX_REPORT_BYTES = 1 << 20
"""Maximum length in bytes of a report: some hundred engines with long messages."""


class RayError(Exception):
    """Ray cannot be used. The message says why."""


class RayProcess:
    """Async context manager that runs the child process that uses Ray until the block ends. Raises RayError on entry if
    Ray is not installed or its cluster cannot be reached."""

    def __init__(self, address: str, host: str) -> None:
        """
        Args:
            address: of the Ray cluster, as in `cluster.ray.address`.
            host: the class of the actors, as `module:Class`.
        """
        self.reports = Reports()
        """The state of the engines, as it was last reported."""
        self._address = address
        self._program = ("-m", "gateway.cluster.ray_worker", address, host)
        self._wanted = Wanted({})
        self._process: Process | None = None
        self._task: asyncio.Task[None] | None = None
        self._connected: asyncio.Future[None] | None = None

    def want(self, wanted: Wanted) -> None:
        """Set the engines that Ray should run, and send them to the child process; a later child process gets them when
        it is started."""
        if wanted != self._wanted:
            self._wanted = wanted
            self._send()

    async def __aenter__(self) -> RayProcess:
        if importlib.util.find_spec("ray") is None:
            raise RayError("cluster.ray needs Ray: pip install 'loralane[ray]'")
        await _check_reachable(self._address)
        self._connected = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._run(), name="ray-process")
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                await asyncio.shield(self._connected)
        except BaseException as error:
            await self.__aexit__()
            if isinstance(error, TimeoutError):
                raise RayError(f"Ray at {self._address} did not answer within {CONNECT_SECONDS:g} s") from None
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await end_task(self._task)

    async def _run(self) -> None:
        while True:
            try:
                code = await self._run_once()
            except (ValueError, OSError):  # no report, one that is too long, or no processes left
                log.exception("ray_process_failed")
                code = None
            if self._connected is not None and not self._connected.done():
                self._connected.set_exception(RayError(self.reports.problem or f"the Ray process ended ({code})"))
                return
            log.error("ray_process_ended", code=code, reason=self.reports.problem, restart_in_seconds=PAUSE_SECONDS)
            self.reports = Reports(problem=self.reports.problem)
            await asyncio.sleep(PAUSE_SECONDS)

    async def _run_once(self) -> int:
        """Run one process to its end, and return its exit code. It is stopped if the call is cancelled."""
        # In its own session, so that Ctrl-C in a terminal reaches only the gateway, which stops all in order.
        process = self._process = await asyncio.create_subprocess_exec(
            sys.executable, *self._program, stdin=PIPE, stdout=PIPE, limit=MAX_REPORT_BYTES, start_new_session=True
        )
        try:
            self._send()
            await self._follow(process)
            return await process.wait()
        finally:
            await _stopped(process)

    async def _follow(self, process: Process) -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            self.reports = msgspec.json.decode(line, type=Reports)
            if not self.reports.problem and self._connected is not None and not self._connected.done():
                self._connected.set_result(None)

    def _send(self) -> None:
        stdin = self._process.stdin if self._process is not None else None
        if stdin is not None and not stdin.is_closing():
            stdin.write(msgspec.json.encode(self._wanted) + b"\n")


async def _check_reachable(address: str) -> None:
    """Raise RayError if no server listens at a cluster's address, as Ray's library would take a minute to say so. The
    address `auto` names no server."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon:
        return
    try:
        async with asyncio.timeout(REACH_SECONDS):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except (OSError, ValueError) as error:
        raise RayError(f"no Ray cluster can be reached at {address}: {error or 'no answer'}") from error
    writer.close()


async def _stopped(process: Process) -> None:
    """Close the standard input of a process, which then ends, and wait for that; kill it after STOP_SECONDS."""
    if process.returncode is not None:
        return
    assert process.stdin is not None
    process.stdin.close()
    try:
        async with asyncio.timeout(STOP_SECONDS):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
