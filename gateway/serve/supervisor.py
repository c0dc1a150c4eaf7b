"""Keeps one engine process alive: starts it, restarts it when it dies or hangs, and stops it with the gateway."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

import structlog
from google.protobuf import json_format

from engine.config import EngineConfig
from engine.core.config import LaneGoals
from engine.pb import engine_pb2 as pb
from engine.process.cores import wait_settings
from engine.process.pulse import Loading, read_beat, read_loading
from engine.rpc.target import EngineTarget
from gateway.serve.watch import LOOK_SECONDS, PulseWatch, is_stopped

log = structlog.get_logger("supervisor")

T = TypeVar("T")

FIRST_BACKOFF_SECONDS = 0.2
MAX_BACKOFF_SECONDS = 10.0
HEALTHY_SECONDS = 30.0
"""A process that lived longer than this is restarted after FIRST_BACKOFF_SECONDS."""
STOP_SECONDS = 10.0
NOT_STARTED = "the engine did not start; the reason is above"
SECRET = re.compile("KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL|REDIS_URL", re.IGNORECASE)
"""Matches names of environment variables that the engine does not inherit."""


class Backoff:
    """Computes the seconds to wait before a process is restarted: from FIRST_BACKOFF_SECONDS, twice as long each time
    that it dies within HEALTHY_SECONDS, up to MAX_BACKOFF_SECONDS."""

    def __init__(self) -> None:
        self._next = FIRST_BACKOFF_SECONDS
        self._started = time.monotonic()

    def started(self) -> None:
        self._started = time.monotonic()

    def reset(self) -> None:
        """Make the next backoff FIRST_BACKOFF_SECONDS. Call this if the process had become ready before it died."""
        self._next = FIRST_BACKOFF_SECONDS

    def died(self) -> float:
        """Record that the process died; returns the seconds to wait before the next start, and doubles the next wait,
        up to MAX_BACKOFF_SECONDS."""
        if time.monotonic() - self._started > HEALTHY_SECONDS:
            self._next = FIRST_BACKOFF_SECONDS
        seconds, self._next = self._next, min(2 * self._next, MAX_BACKOFF_SECONDS)
        return seconds


class EngineSupervisor:
    """Async context manager that starts `python -m engine.serve.server`, on a Unix socket by default, restarts it with
    backoff when it dies or hangs, and stops it when the block ends. If the gateway is killed, the engine's standard
    input, a pipe, closes and the engine stops by itself.

    Args:
        config: the engine's configuration. Without a model, the engine waits until `name_model` names one.
        socket: path of the socket. The engine's pulse and progress files are made in the same folder.
        program: the module to run, which must accept the engine's arguments, followed by extra arguments for it.
        env: environment variables of the engine in addition to the gateway's.
        listen: where the engine listens, with its certificates. None means on the socket.
        drain_seconds: seconds that requests have at the end to end in the engine, or to move to other engines.
    """

    def __init__(
        self,
        config: EngineConfig,
        socket: Path,
        program: Sequence[str] = ("engine.serve.server",),
        env: Mapping[str, str] = MappingProxyType({}),
        listen: EngineTarget | None = None,
        drain_seconds: float = 0.0,
    ) -> None:
        self.target = listen or EngineTarget(f"unix:{socket}")
        self._config = config
        self._socket = socket
        self._program = program
        self._env = env
        self._drain_seconds = drain_seconds
        self.hurried = asyncio.Event()
        """Set by the owner to cut the drain short."""
        self._pulse = socket.with_name("pulse")
        self._loading = socket.with_name("loading")
        self._previous = ""
        """`PreviousLife` of the last engine process that ended after it was ready, as JSON; empty means none."""
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None
        self._exited = asyncio.Event()
        self.stop_seconds = STOP_SECONDS
        """Seconds that the engine may take to stop, when the block ends, before it is killed."""

    @property
    def address(self) -> str:
        """Where the engine listens."""
        return self.target.address

    @property
    def pid(self) -> int | None:
        """Id of the running engine process; None means that no process runs."""
        return self._process.pid if self._process and self._process.returncode is None else None

    @property
    def loading(self) -> Loading | None:
        """Progress of the engine's start, read from its file; None means that the engine has not reported any yet."""
        return read_loading(self._loading)

    async def wait_until_it_runs(self) -> None:
        """Wait until the step loop of an engine process has begun, as its pulse file shows, without a time limit. Its
        server listens by then."""
        while read_beat(self._pulse) is None:  # noqa: ASYNC110 - another process writes the file
            await asyncio.sleep(0.1)

    def promise(self, interactive: LaneGoals, batch: LaneGoals) -> None:
        """Set the lanes' latency goals in the configuration of the next engine process. The running process gets the
        goals from the gateways instead."""
        self._config = replace(self._config, interactive=interactive, batch=batch)

    def name_model(self, folder: Path) -> None:
        """Send the folder of the prepared model to the engine, which was started without a model and now loads it.
        Later engine processes are started with it."""
        self._config = replace(self._config, model=str(folder))
        stdin = self._process.stdin if self._process is not None else None
        if self.pid is not None and stdin is not None and not stdin.is_closing():  # the next process gets it otherwise
            stdin.write(f"{folder}\n".encode())

    def kill(self) -> None:
        """Kill the engine and the processes that it has started with SIGKILL. May be called from any thread."""
        if (pid := self.pid) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)

    async def wait_first_exit(self) -> None:
        """Wait until, for the first time, an engine process has ended other than by the end of the block: by itself, or
        killed because it hung."""
        await self._exited.wait()

    async def __aenter__(self) -> EngineSupervisor:
        await self._spawn()
        self._task = asyncio.create_task(self._watch(), name="engine-supervisor")
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        await self._stop()

    async def _spawn(self) -> None:
        self._socket.unlink(missing_ok=True)
        self._pulse.unlink(missing_ok=True)
        self._loading.unlink(missing_ok=True)
        tls = self.target.tls
        # In its own session, so that Ctrl-C in a terminal reaches only the gateway, which lets running requests end.
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", *self._program, "--config", self._config.to_json()),
            *("--address", self.address, "--until-stdin-closes"),
            *(("--tls", str(tls.ca), str(tls.certificate), str(tls.key)) if tls else ()),
            *("--drain-seconds", str(self._drain_seconds)),
            *("--loading", str(self._loading), "--pulse", str(self._pulse), "--previous", self._previous),
            stdin=asyncio.subprocess.PIPE,
            env=_environment({**os.environ, **self._env}),
            start_new_session=True,
        )

    async def _watch(self) -> None:
        backoff = Backoff()
        while True:
            assert self._process is not None
            backoff.started()
            watch = PulseWatch(self._pulse)
            hung = await self._until_it_ends(self._process, watch)
            self._exited.set()
            if self._note_end(watch, hung):
                backoff.reset()
            pause = backoff.died()
            log.error("engine_exited", code=self._process.returncode, hung=hung, restart_in_seconds=pause)
            await asyncio.sleep(pause)
            try:
                await self._spawn()
            except OSError:  # no processes or memory left: the loop sees the dead process again and retries later
                log.exception("engine_not_started")

    async def _until_it_ends(self, process: asyncio.subprocess.Process, watch: PulseWatch) -> bool:
        """Wait for the end of an engine process, checking it every LOOK_SECONDS, and kill it if it hangs. Returns True
        if it was killed because it hung; False if it ended by itself, or was killed while a signal such as SIGSTOP had
        stopped it."""
        ended = asyncio.ensure_future(process.wait())
        try:
            while not (await asyncio.wait((ended,), timeout=LOOK_SECONDS))[0]:
                if watch.hangs(process.pid):
                    stopped = is_stopped(process.pid)
                    log.error("engine_killed", pid=process.pid, reason="stopped by a signal" if stopped else "hung")
                    self.kill()
                    await ended
                    return not stopped
            return False
        finally:
            ended.cancel()

    def _note_end(self, watch: PulseWatch, hung: bool) -> bool:
        """Record, for the next engine process, whether this one crashed or hung and which requests it was computing, if
        it had become ready, that is, its step loop had written a beat. Returns whether it had."""
        assert self._process is not None
        assert self._process.returncode is not None
        beat = watch.last_beat()
        if beat is None:
            return False
        crashed = hung or watch.crashed(self._process.returncode)
        life = pb.PreviousLife(life=beat.life, crashed=crashed, request_ids=beat.request_ids)
        self._previous = json_format.MessageToJson(life, indent=None)
        return True

    async def _stop(self) -> None:
        process = self._process
        if process is None or process.returncode is not None:
            return
        ended = asyncio.ensure_future(process.wait())
        process.terminate()
        if self._drain_seconds:
            await self._wait_for_drain(ended)
            if not ended.done():
                process.send_signal(signal.SIGINT)
        await asyncio.wait((ended,), timeout=self.stop_seconds)
        if not ended.done():
            self.kill()
        await ended
        self._socket.unlink(missing_ok=True)

    async def _wait_for_drain(self, ended: asyncio.Future[int]) -> None:
        """Wait until the engine, whose requests end or move to other engines, has ended; at most until the time for
        that is over or the owner is in a hurry."""
        hurried = asyncio.ensure_future(self.hurried.wait())
        limit = self._drain_seconds + self.stop_seconds
        await asyncio.wait((ended, hurried), timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        hurried.cancel()


def _environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return the engine's environment: the gateway's `env` without variables whose names match SECRET, and with
    `wait_settings`."""
    kept = {name: value for name, value in env.items() if not SECRET.search(name)}
    return kept | wait_settings(kept)
