"""An engine in a thread of this process, for a program that runs its model itself, without an engine process."""

from __future__ import annotations

import asyncio
import gc
import threading
import uuid
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

from rich.console import Console

from engine.config import EngineConfig
from engine.core.commit.apply import cancel, set_goals, set_mode
from engine.core.config import LaneGoals
from engine.core.messages.commands import Abort, Submit
from engine.core.messages.requests import AdapterHash, Lane, LaneMode, Request, TokenEvent
from engine.core.state.engine_state import EngineState
from engine.engine import Engine
from engine.executor.base import Executor
from engine.inbox import EngineStopped
from engine.model.folders.prepare import prepare_model
from engine.pb import engine_pb2 as pb
from engine.process.model_source import find_prepared
from engine.rpc.api import AdapterRejected
from engine.rpc.session import GatewaySession
from engine.rpc.snapshot import live_requests, snapshot
from engine.rpc.stream import Arrivals, EngineLost, EngineUnavailable, Handover
from engine.rpc.wire import adapter_to_pb
from engine.serve.build import Build, Progress, build_real, describe_sizes

T = TypeVar("T")


class LocalEngine:
    """An `EngineApi` over an engine in a thread of this process. All methods belong to the event loop in which `start`
    was awaited. An engine that has stopped or failed does not come back."""

    def __init__(self, config: EngineConfig, build: Build = build_real) -> None:
        """`config` names the folder of a prepared model. `build` makes the executor; tests pass one without a model."""
        self.info = pb.EngineInfo()
        self.failure: BaseException | None = None
        """The exception that ended the step loop. None means that it runs, or was asked to stop."""
        self._config = config
        self._build = build
        self._session = GatewaySession()
        self._streams: dict[str, Arrivals] = {}
        self._engine: Engine | None = None
        self._ended: list[Future[None]] = []
        """A future for each of the engine's threads, done once the thread has ended."""
        self._ready = asyncio.Event()

    async def start(self, on_progress: Progress = lambda what, done, total: None) -> None:
        """Load the model and begin to run steps. Raises what loading the model raises. `on_progress` is called in the
        engine's thread."""
        self._loop = asyncio.get_running_loop()
        loaded: Future[None] = Future()
        self._ended = [_started(partial(self._live, loaded, on_progress)), _started(self._pass_on)]
        await asyncio.wrap_future(loaded)
        self._ready.set()

    async def close(self) -> None:
        """Stop the step loop, end all open streams with EngineLost, and free the model's memory."""
        self._ready.clear()
        if self._engine is not None:
            self._engine.stop()
        for ended in self._ended:
            # Not in a thread of asyncio's: at the end of a program those have ended before.
            await asyncio.wrap_future(ended)
        self._engine = None
        self._lose()
        gc.collect()  # the executor refers to itself, and has the model's memory

    @property
    def ready(self) -> bool:
        return self._ready.is_set()

    async def wait_ready(self) -> None:
        await self._ready.wait()

    def generate(self, request: Request, session: str = "", handover: Handover | None = None) -> Arrivals:
        if not self.ready:
            raise EngineUnavailable(self._ending)
        arrivals = self._streams[request.id] = Arrivals(partial(self._abort, request.id), self.info.life)
        now = self._running.clock()
        deadline = None if request.deadline is None else now + request.deadline
        self._session.expect(request.id, whole=request.whole)
        self._running.inbox.put(Submit(request._replace(arrival=now, deadline=deadline)))
        return arrivals

    def fate(self, life: str) -> pb.PreviousLife | None:
        """Return None: no later engine process will tell how this one ended."""
        return None

    async def learn_fate(self, life: str) -> pb.PreviousLife:
        return await asyncio.get_running_loop().create_future()

    async def load_adapter(self, path: str) -> pb.AdapterInfo:
        started = self._running.clock()
        try:
            host = await self._ask(lambda engine: engine.load_adapter(path))
        except (ValueError, OSError) as error:
            raise AdapterRejected(str(error)) from error
        return adapter_to_pb(host, self._running.clock() - started)

    async def unload_adapter(self, adapter_hash: AdapterHash, drain_seconds: float) -> int:
        return await self._ask(lambda engine: engine.unload_adapter(adapter_hash, drain_seconds))

    async def pin_adapter(self, adapter_hash: AdapterHash, pinned: bool) -> None:
        try:
            await self._ask(lambda engine: engine.pin_adapter(adapter_hash, pinned))
        except ValueError as error:
            raise AdapterRejected(str(error)) from error

    async def stats(self, *, check: bool = False) -> pb.EngineStats:
        def of(engine: Engine) -> pb.EngineStats:
            ask = engine.inspect if check else engine.look
            return ask(lambda state: snapshot(state, engine.step_seconds, engine.clock(), check=check))

        return await self._ask(of)

    async def live_requests(self, limit: int) -> pb.RequestsResponse:
        return await self._ask(lambda engine: engine.look(lambda state: live_requests(state, engine.clock(), limit)))

    async def cancel(self, request_ids: Iterable[str]) -> int:
        return await self._change(lambda state: cancel(state, request_ids))

    async def set_lane(self, lane: Lane, mode: LaneMode) -> None:
        await self._change(lambda state: set_mode(state, lane, mode))

    async def set_goals(self, lane: Lane, goals: LaneGoals) -> None:
        await self._change(lambda state: set_goals(state, lane, goals))

    @property
    def _running(self) -> Engine:
        """The engine. Raises EngineUnavailable if it has not started or was closed."""
        if self._engine is None:
            raise EngineUnavailable(self._ending)
        return self._engine

    @property
    def _ending(self) -> str:
        return f"the engine failed: {self.failure!r}" if self.failure else "the engine is not running"

    def _change(self, question: Callable[[EngineState], T]) -> Awaitable[T]:
        return self._ask(lambda engine: engine.inspect(question))

    async def _ask(self, question: Callable[[Engine], T]) -> T:
        """Return `question(engine)`, which may block and is called in a thread. Raises EngineUnavailable if the engine
        has stopped or ends no step, and what `question` raises."""
        engine = self._running
        try:
            return await asyncio.to_thread(question, engine)
        except (EngineStopped, TimeoutError) as error:
            raise EngineUnavailable(str(error) or "no step has ended for a while") from error

    def _live(self, loaded: Future[None], on_progress: Progress) -> None:
        """Load the model, run steps until `stop`, and free the executor: the main function of the engine's thread."""
        try:
            executor = self._open(on_progress)
        except BaseException as error:
            self._session.end()
            if loaded.set_running_or_notify_cancel():
                loaded.set_exception(error)
            return
        try:
            if loaded.set_running_or_notify_cancel():  # else the caller gave up while the model was loaded
                loaded.set_result(None)
                self._running.run(self._deliver)
        except BaseException as error:
            self.failure = error
        finally:
            self._session.end()
            executor.close()

    def _open(self, on_progress: Progress) -> Executor:
        core, executor, info = self._build(self._config, on_progress)
        describe_sizes(info, core)
        info.life = uuid.uuid4().hex
        self._engine = Engine(EngineState.create(core), executor)
        self.info.CopyFrom(info)
        return executor

    def _deliver(self, events: list[TokenEvent]) -> None:
        self._session.put(events)

    def _pass_on(self) -> None:
        """Pass the engine's events to the event loop until the engine stops: the main function of a thread."""
        with suppress(RuntimeError):  # the loop was closed without waiting for `close`
            for events in self._session.steps():
                self._loop.call_soon_threadsafe(self._dispatch, events)
            self._loop.call_soon_threadsafe(self._lose)

    def _dispatch(self, events: list[TokenEvent]) -> None:
        for event in events:
            if (stream := self._streams.get(event.request_id)) is None:
                continue
            stream.put(event)
            if event.finish_reason is not None:
                del self._streams[event.request_id]

    def _abort(self, request_id: str) -> None:
        """Drop a request's stream and abort it, unless it has ended."""
        if self._streams.pop(request_id, None) is not None and self._engine is not None:
            self._engine.inbox.put(Abort(request_id))

    def _lose(self) -> None:
        """End every open stream, because the engine has stopped or failed."""
        self._ready.clear()
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.lose(EngineLost(self._ending))


def _started(main: Callable[[], None]) -> Future[None]:
    """Call `main` in a new thread, and return a future that is set at its end."""
    ended: Future[None] = Future()

    def run() -> None:
        try:
            main()
        finally:
            ended.set_result(None)

    threading.Thread(target=run, name="engine", daemon=True).start()
    return ended


def prepared_model(source: str, data_dir: Path) -> Path:
    """Return the folder of a model (see `prepare_model`), which is downloaded or prepared if need be, with messages on
    standard error. Blocks. Raises what `prepare_model` raises."""
    folder = find_prepared(source, data_dir)
    return prepare_model(source, data_dir, Console(stderr=True)) if folder is None else folder
