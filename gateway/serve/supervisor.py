"""Keeps one engine process alive: starts it, restarts it when it dies, stops it with the gateway."""

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

import structlog
from google.protobuf import json_format

from engine.config import EngineConfig
from engine.core.config import LaneGoals
from engine.pb import engine_pb2 as pb
from engine.pulse import Loading, read_loading
from gateway.serve.watch import LOOK_SECONDS, HangWatch, is_stopped

log = structlog.get_logger("supervisor")

FIRST_BACKOFF_SECONDS = 0.2
MAX_BACKOFF_SECONDS = 10.0
HEALTHY_SECONDS = 30.0
"""A process that lived this long starts again at the first backoff."""
STOP_SECONDS = 10.0
SPINS = 500
"""Turns that a thread of OpenMP spins at a barrier before it sleeps; libgomp's own are some millions. A spinning thread
keeps the core that the thread it waits for needs. With two busy processes beside an engine on two cores, ITL p50 was
59 to 370 ms with libgomp's own, 33 with 2,000, 20.8 with 500 and 17.9 with 100; alone 12.1, 12.2, 11.4 and 13.6."""
WAIT_SETTINGS = frozenset(("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"))
"""An operator who sets one of them in the gateway's environment decides for the engine."""
SECRET = re.compile("KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL|REDIS_URL", re.IGNORECASE)


class Backoff:
    """How long to wait before a process is started again: twice as long every time it dies soon."""

    def __init__(self) -> None:
        self._next = FIRST_BACKOFF_SECONDS
        self._started = time.monotonic()

    def started(self) -> None:
        self._started = time.monotonic()

    def reset(self) -> None:
        """Begin again with the first backoff: the process had become ready, and its next start may succeed as well."""
        self._next = FIRST_BACKOFF_SECONDS

    def died(self) -> float:
        """Seconds to wait."""
        if time.monotonic() - self._started > HEALTHY_SECONDS:
            self._next = FIRST_BACKOFF_SECONDS
        seconds, self._next = self._next, min(2 * self._next, MAX_BACKOFF_SECONDS)
        return seconds


class EngineSupervisor:
    """An async context manager around `python -m engine.server` on a unix socket.

    The engine reads the supervisor's end of its standard input: should the gateway be killed, the pipe closes and the
    engine stops by itself.

    Args:
        program: the module that is run, which takes the engine's arguments, and arguments of its own.
    """

    def __init__(self, config: EngineConfig, socket: Path, program: Sequence[str] = ("engine.server",)) -> None:
        self.address = f"unix:{socket}"
        self._config = config
        self._socket = socket
        self._program = program
        self._pulse = socket.with_name("pulse")
        self._loading = socket.with_name("loading")
        self._previous = ""
        """The engine process before the one that runs, a `PreviousLife` as JSON; empty means that there was none."""
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None
        self._exited = asyncio.Event()
        self.stop_seconds = STOP_SECONDS
        """How long the engine may take to stop before it is killed."""

    @property
    def pid(self) -> int | None:
        """Of the engine process, while there is one."""
        return self._process.pid if self._process and self._process.returncode is None else None

    @property
    def loading(self) -> Loading | None:
        """How far the start of the engine process is; None means that it has not said anything yet."""
        return read_loading(self._loading)

    def promise(self, interactive: LaneGoals, batch: LaneGoals) -> None:
        """What the lanes promise in the engine's next life; the one there is is not told."""
        self._config = replace(self._config, interactive=interactive, batch=batch)

    def kill(self) -> None:
        """End the engine now, with the processes that it has started. Needs no event loop."""
        if (pid := self.pid) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)

    async def wait_first_exit(self) -> None:
        """Returns when an engine process has ended by itself for the first time."""
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
        # In a session of its own: a terminal's Ctrl-C is for the gateway, which still lets running requests end.
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", *self._program, "--config", self._config.to_json()),
            *("--address", self.address, "--until-stdin-closes"),
            *("--loading", str(self._loading), "--pulse", str(self._pulse), "--previous", self._previous),
            stdin=asyncio.subprocess.PIPE,
            env=_environment(os.environ),
            start_new_session=True,
        )

    async def _watch(self) -> None:
        backoff = Backoff()
        while True:
            assert self._process is not None
            backoff.started()
            watch = HangWatch(self._pulse)
            hung = await self._until_it_ends(self._process, watch)
            self._exited.set()
            if self._note_end(watch, hung):
                backoff.reset()
            pause = backoff.died()
            log.error("engine_exited", code=self._process.returncode, hung=hung, restart_in_seconds=pause)
            await asyncio.sleep(pause)
            try:
                await self._spawn()
            except OSError:  # out of processes or memory: the dead one is waited for again, and so tried again later
                log.exception("engine_not_started")

    async def _until_it_ends(self, process: asyncio.subprocess.Process, watch: HangWatch) -> bool:
        """Wait for the end of an engine process, and kill it if it hangs.

        Returns:
            Whether something that it computed made it hang, rather than a signal that stopped it.
        """
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

    def _note_end(self, watch: HangWatch, hung: bool) -> bool:
        """Write down how a process ended and what it computed then; returns whether it had become ready."""
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
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), self.stop_seconds)
        except TimeoutError:
            self.kill()
            await process.wait()
        self._socket.unlink(missing_ok=True)


def _environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return an engine's environment: the gateway's without keys and passwords, and with threads that soon sleep."""
    kept = {name: value for name, value in env.items() if not SECRET.search(name)}
    return kept if kept.keys() & WAIT_SETTINGS else kept | {"GOMP_SPINCOUNT": str(SPINS)}
