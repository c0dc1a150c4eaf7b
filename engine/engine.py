"""The engine: one loop, one step at a time, and the only thread that touches the state."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TypeVar

from engine.core.apply import apply_commands
from engine.core.commands import AddAdapter, Command, DropAdapter
from engine.core.commit import abort_users, absorb, commit
from engine.core.commit_adapters import add_adapter, pin_adapter
from engine.core.pace import Pace
from engine.core.plan import plan_step
from engine.core.policy import Policy, make_policy
from engine.core.state import EngineState
from engine.core.types import AdapterId, TokenEvent
from engine.executor.base import Executor, HostAdapter

T = TypeVar("T")

PAUSE_S = 0.002
"""Between steps without anything to do, short beside the window in which a batch gathers."""
BEAT_S = 1.0
"""How often an idle loop says that it is alive."""


class EngineStopped(RuntimeError):
    """The step loop has ended: nobody is left to answer."""


class Inbox:
    """Commands and questions from other threads, taken up between two steps."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._commands: list[Command] = []
        self._questions: list[Callable[[], None]] = []
        self._closed = False
        self._arrived = threading.Event()

    def put(self, command: Command) -> None:
        with self._lock:
            self._commands.append(command)
        self._arrived.set()

    def ask(self, question: Callable[[], None]) -> None:
        """Raises EngineStopped."""
        with self._lock:
            if self._closed:
                raise EngineStopped("the engine has stopped")
            self._questions.append(question)
        self._arrived.set()

    @property
    def is_closed(self) -> bool:
        """Takes no questions any more."""
        return self._closed

    def wake(self) -> None:
        self._arrived.set()

    def wait(self, timeout: float | None = None) -> bool:
        """Return whether something has arrived."""
        return self._arrived.wait(timeout)

    def drain(self) -> list[Command]:
        """All commands in order of arrival."""
        with self._lock:
            commands, self._commands = self._commands, []
        return commands

    def drain_questions(self) -> list[Callable[[], None]]:
        with self._lock:
            questions, self._questions = self._questions, []
            self._arrived.clear()
        return questions

    def close(self) -> list[Callable[[], None]]:
        """Takes no more questions; returns those still open."""
        with self._lock:
            self._closed = True
        return self.drain_questions()


class Folders:
    """Which folders are being read, and who waits for his turn with each."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._turns: dict[str, tuple[threading.Lock, int]] = {}
        """With how many have or want it."""

    @contextmanager
    def one_at_a_time(self, path: str) -> Iterator[None]:
        with self._lock:
            turn, wanted = self._turns.get(path, (threading.Lock(), 0))
            self._turns[path] = turn, wanted + 1
        try:
            with turn:
                yield
        finally:
            with self._lock:
                turn, wanted = self._turns.pop(path)
                if wanted > 1:
                    self._turns[path] = turn, wanted - 1


class Engine:
    """Runs requests to their end. `step` and `run` belong to one thread; everything else may be called from any."""

    def __init__(
        self,
        state: EngineState,
        executor: Executor,
        policy: Policy | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        beat: Callable[[EngineState], None] = lambda state: None,
    ) -> None:
        """`beat` is called before each step is carried out, and about once a second while there is no work."""
        self.state = state
        self.executor = executor
        self.policy = policy or make_policy(state.config.scheduling)
        self.clock = clock
        self.inbox = Inbox()
        self.pace = Pace(clock, sleep)
        self._beat = beat
        self.step_seconds = 0.0
        self._stopping = False
        self._loop = threading.Lock()
        """Held while `run` has the state to itself."""
        self._changing = threading.Lock()
        """Held while the state changes, which is not while the executor computes: others may look then."""
        self._folders = Folders()
        executor.connect(self.inbox.put)

    def step(self) -> list[TokenEvent]:
        """One iteration over all running sequences; returns what became of every request it moved or, where the
        executor overlaps and computes this step behind another, of every request that the other moved."""
        now = self.pace.rest(self.state)
        with self._changing:
            apply_commands(self.state, self.inbox.drain())
            plan = plan_step(self.state, self.policy, now)
            commit(self.state, plan)
        self._beat(self.state)
        self.pace.note(late=self.executor.submit(plan))
        if self.executor.overlaps and len(self.state.under_way) == 1 and not plan.is_empty:
            return []  # the next step is planned while this one is computed
        result = self.executor.collect()
        with self._changing:
            return absorb(self.state, result, self.clock())

    def run(self, deliver: Callable[[list[TokenEvent]], None]) -> None:
        """Steps while there is work and sleeps while there is none, until `stop`."""
        with self._loop:
            self._run(deliver)

    def _run(self, deliver: Callable[[list[TokenEvent]], None]) -> None:
        try:
            while not self._stopping:
                if not self.state.has_work:
                    self._rest()
                elif self._is_stuck:
                    self.inbox.wait(PAUSE_S)
                with self._answering():
                    started = self.clock()
                    events = self.step()
                    self.step_seconds += self.clock() - started
                    if events:
                        deliver(events)
        finally:
            for question in self.inbox.close():
                question()

    def _rest(self) -> None:
        """Sleep until something arrives."""
        self._beat(self.state)
        while not self.inbox.wait(BEAT_S):
            self._beat(self.state)

    @property
    def _is_stuck(self) -> bool:
        """There was nothing to do, though requests wait: for a batch to be gathered, or for a fetch."""
        state = self.state
        return bool(state.counters.steps) and state.in_flight.is_empty and state.absorbed.is_empty

    @contextmanager
    def _answering(self) -> Iterator[None]:
        """Answers what was asked before a step after it, when the commands put before the questions are applied."""
        questions = self.inbox.drain_questions()
        try:
            yield
        finally:
            for question in questions:
                question()

    def stop(self) -> None:
        self._stopping = True
        self.inbox.wake()

    def inspect(self, question: Callable[[EngineState], T], timeout: float = 30.0) -> T:
        """The answer to a question put to the state between two steps, after every command put before it. While nobody
        runs the loop, whoever asks looks for himself.

        Raises:
            TimeoutError: no step ended within `timeout` seconds.
            EngineStopped: and none will.
        """
        if not self.inbox.is_closed and self._loop.acquire(blocking=False):
            try:
                with self._changing:
                    apply_commands(self.state, self.inbox.drain())
                    return question(self.state)
            finally:
                self._loop.release()
        answer: Future[T] = Future()

        def settle() -> None:
            if not answer.set_running_or_notify_cancel():
                return  # whoever asked has gone, and takes what has not happened to be undone
            try:
                with self._changing:
                    answer.set_result(question(self.state))
            except Exception as error:
                answer.set_exception(error)

        self.inbox.ask(settle)
        try:
            return answer.result(timeout)
        except TimeoutError:
            if answer.cancel():
                raise
            return answer.result()  # it is being answered just now

    def look(self, question: Callable[[EngineState], T]) -> T:
        """The answer to a question that changes nothing, now: a step that is being computed is not waited for."""
        with self._changing:
            return question(self.state)

    def load_adapter(self, path: str) -> HostAdapter:
        """Makes an adapter usable by requests submitted from now on. The same folder is read by one caller at a time,
        different ones side by side. Raises ValueError with the reason if it is not usable."""
        with self._folders.one_at_a_time(path):
            return self.executor.load_host(path, lambda host: self._claim(path, host))

    def _claim(self, path: str, host: HostAdapter) -> bool:
        command = AddAdapter(host.id, host.num_pages, host.rank, host.num_bytes, path, is_read=True)
        return self.inspect(lambda state: add_adapter(state, command))

    def pin_adapter(self, adapter: AdapterId, pinned: bool) -> None:
        """Keeps an adapter on the device, once it is there, or no longer. Raises ValueError with the reason if it does
        not fit beside what else must."""
        self.inspect(lambda state: pin_adapter(state, adapter, pinned))

    def unload_adapter(self, adapter: AdapterId, drain_seconds: float) -> int:
        """Lets requests of an adapter end, aborts those still there after `drain_seconds`, and frees every tier.

        An adapter that is loaded again meanwhile stays, with its requests.

        Returns:
            The number of requests aborted.
        """
        self.inbox.put(DropAdapter(adapter))
        deadline = time.monotonic() + drain_seconds
        while self.inspect(lambda state: _has_users(state, adapter)) and time.monotonic() < deadline:
            time.sleep(0.01)
        aborted = self.inspect(lambda state: abort_users(state, adapter))
        while self.inspect(lambda state: _is_closing(state, adapter)):
            time.sleep(0.002)
        return aborted


def _is_closing(state: EngineState, adapter: AdapterId) -> bool:
    return adapter in state.adapters and state.adapters[adapter].closing


def _has_users(state: EngineState, adapter: AdapterId) -> bool:
    """Requests that an adapter on its way out waits for."""
    return _is_closing(state, adapter) and state.adapters[adapter].live > 0
