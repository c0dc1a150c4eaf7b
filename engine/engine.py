"""The engine: a loop that plans and runs one step after the other, and is the only thread that changes the state."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Protocol, TypeVar

from engine.core.commit.adapters import add_adapter, pin_adapter
from engine.core.commit.apply import apply_commands
from engine.core.commit.sequences import abort_users
from engine.core.commit.step import absorb, commit
from engine.core.memory.adapters import HostAdapter
from engine.core.messages.commands import AddAdapter, DropAdapter
from engine.core.messages.moves import MoveOrder
from engine.core.messages.requests import AdapterHash, TokenEvent
from engine.core.messages.step import StepPlan
from engine.core.plan.next_step import plan_step
from engine.core.plan.pace import Pace
from engine.core.policy.policies import LanePolicy, Policy
from engine.core.state.engine_state import EngineState
from engine.executor.base import Executor
from engine.inbox import Inbox

T = TypeVar("T")


class Mover(Protocol):
    """Moves KV pages between this engine's host tier and other engines (see `engine.core.messages.moves`)."""

    def take(self, order: MoveOrder) -> None:
        """Begin to carry out an order about a fetch or an export of KV pages, without blocking. The step loop calls
        it."""


PAUSE_S = 0.002
"""Seconds between steps that have nothing to compute: short compared with the window in which a batch gathers."""
BEAT_S = 1.0
"""Seconds between two beats of an idle loop, which show that it is alive."""


class Folders:
    """One lock for each adapter folder, so that a folder is read by one caller at a time. A lock exists while its
    folder is being read or a caller waits to read it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._turns: dict[str, tuple[threading.Lock, int]] = {}
        """Path -> (lock, number of callers that hold it or wait for it)."""

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
    """Executes requests on one device: holds the scheduling state, runs the step loop and answers questions about the
    state. `step` and `run` belong to one thread, and any other thread may call all other methods. `look` and `stop` may
    be called from the loop's thread, too."""

    def __init__(
        self,
        state: EngineState,
        executor: Executor,
        policy: Policy | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        beat: Callable[[EngineState], None] = lambda state: None,
    ) -> None:
        """`policy` defaults to the one by lanes. `beat` is called with the state before each step is
        submitted, and about once a second while there is no work. `clock` and `sleep` are in seconds. The executor's
        answers to fetches and grammar preparations go to the engine's inbox."""
        self.state = state
        self.executor = executor
        self.policy = policy or LanePolicy()
        self.clock = clock
        self.inbox = Inbox()
        self.pace = Pace(clock, sleep)
        self._beat = beat
        self.step_seconds = 0.0
        self._stopping = False
        self._loop = threading.Lock()
        """Held while `run` owns the state."""
        self._changing = threading.Lock()
        """Held while the state changes, but not while the executor computes: other threads can read the state then."""
        self._folders = Folders()
        self._mover: Mover | None = None
        executor.connect(self.inbox.put)

    def connect(self, mover: Mover) -> None:
        """Let `mover` carry out the moves of KV pages; its reports go to the inbox. Called once, before `run`."""
        self._mover, self.state.moves.is_on = mover, True

    def step(self) -> list[TokenEvent]:
        """Apply the commands that have arrived, plan one step over all running sequences (later if the device is still
        busy), and submit it. Return the events of the oldest step under way: of this step or, if the executor overlaps
        steps, of the step before it, if any."""
        now = self.pace.rest(self.state)
        with self._changing:
            apply_commands(self.state, self.inbox.drain())
            plan = plan_step(self.state, self.policy, now)
            commit(self.state, plan)
        self._pass_orders()
        self._beat(self.state)
        self._submit(plan)
        if self.executor.overlaps and len(self.state.steps.under_way) == 1 and not plan.is_empty:
            return []  # the next step is planned while this one is computed
        result, now = self.executor.collect(), self.clock()
        host_bound = self.executor.overlaps and self.pace.ended(now, result.seconds)
        with self._changing:
            self.state.counters.host_bound_steps += host_bound
            events = absorb(self.state, result, now)
        self._pass_orders()
        return events

    def _pass_orders(self) -> None:
        """Pass the state's pending orders to move KV pages, if any, to the mover."""
        orders = self.state.moves.outbox
        while self._mover is not None and orders:
            self._mover.take(orders.popleft())

    def _submit(self, plan: StepPlan) -> None:
        """Submit a committed plan to the executor. A late launch (the device had run out of work) is counted only if
        both this plan and the step before it compute something."""
        if not self.executor.overlaps:
            self.executor.submit(plan)
            return
        begun = self.clock()
        launch = self.executor.submit(plan)
        self.pace.submitted(begun, launch, computes=bool(plan.chunks))
        if launch.late and plan.chunks and self.state.steps.under_way[0].plan.chunks:
            with self._changing:
                self.state.counters.late_steps += 1

    def run(self, deliver: Callable[[list[TokenEvent]], None]) -> None:
        """Run steps until `stop` is called, even if requests still run, and sleep while there is no work. Each step's
        events, if any, go to `deliver`, and questions are answered after it. Finally, even after an exception, the
        inbox is closed and its questions answered."""
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
        """Sleep until a command or question arrives, and call `beat` before and about once a second meanwhile."""
        self._beat(self.state)
        while not self.inbox.wait(BEAT_S):
            self._beat(self.state)

    @property
    def _is_stuck(self) -> bool:
        """Return whether neither the step last committed nor the one last absorbed had anything to do, so that the loop
        pauses before it plans again: the requests that are left wait for a batch to gather or for a fetch."""
        state = self.state
        return bool(state.counters.steps) and state.steps.in_flight.is_empty and state.steps.absorbed.is_empty

    @contextmanager
    def _answering(self) -> Iterator[None]:
        """Context manager for one step. On entry, take the questions that `inspect` has queued; on exit, after the step
        has applied all earlier commands, answer them."""
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
        """Return `question(state)`, called by the step loop between two steps, after all earlier commands have been
        applied; it may change the state. While no thread runs the loop, the caller's thread calls it. Raises what
        `question` raises.

        Raises:
            TimeoutError: no step ended within `timeout` seconds.
            EngineStopped: the loop has ended.
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
                return  # the caller has timed out, and relies on the question not being asked any more
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
            return answer.result()  # the loop is answering just now

    def look(self, question: Callable[[EngineState], T]) -> T:
        """Return `question(state)`, which must only read, at once: it waits for no step that the executor computes."""
        with self._changing:
            return question(self.state)

    def load_adapter(self, path: str) -> HostAdapter:
        """Read an adapter folder, add its adapter to the state and, if there is space, pack it into host memory;
        requests submitted from now on can use it. Blocks. One folder is read by one caller at a time, different ones
        concurrently. Raises ValueError with the reason if the adapter is not usable, and what `inspect` raises."""
        with self._folders.one_at_a_time(path):
            return self.executor.load_host(path, lambda host: self._claim(path, host))

    def _claim(self, path: str, host: HostAdapter) -> bool:
        sizes = host.num_pages, host.rank, host.num_bytes
        command = AddAdapter(host.adapter_hash, *sizes, path, is_read=True, invocation=host.invocation)
        return self.inspect(lambda state: add_adapter(state, command))

    def pin_adapter(self, adapter_hash: AdapterHash, pinned: bool) -> None:
        """Pin an adapter (or unpin it, if not `pinned`), so that it stays on the device once it has been loaded there.
        Raises ValueError with the reason if the adapter is not loaded, or if pinning it would leave too little room,
        and what `inspect` raises."""
        self.inspect(lambda state: pin_adapter(state, adapter_hash, pinned))

    def unload_adapter(self, adapter_hash: AdapterHash, drain_seconds: float) -> int:
        """Unpin an adapter, refuse new requests for it, wait at most `drain_seconds` for the live ones, abort the rest,
        and block until its memory is freed in every tier. An adapter that is loaded again meanwhile stays, and so do
        its requests. Returns the number of requests aborted. Raises what `inspect` raises."""
        self.inbox.put(DropAdapter(adapter_hash))
        deadline = time.monotonic() + drain_seconds
        while self.inspect(lambda state: _has_users(state, adapter_hash)) and time.monotonic() < deadline:
            time.sleep(0.01)
        aborted = self.inspect(lambda state: abort_users(state, adapter_hash))
        while self.inspect(lambda state: _is_closing(state, adapter_hash)):
            time.sleep(0.002)
        return aborted


def _is_closing(state: EngineState, adapter_hash: AdapterHash) -> bool:
    return adapter_hash in state.adapters and state.adapters[adapter_hash].closing


def _has_users(state: EngineState, adapter_hash: AdapterHash) -> bool:
    """Return whether an adapter is being unloaded and still has live requests."""
    return _is_closing(state, adapter_hash) and state.adapters[adapter_hash].live > 0
