"""A pool of threads that each own one worker process. They check grammars so that the tenants take turns."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import structlog

from engine.core.messages.grammar import Grammar
from engine.grammar_check.job import DEATHS, KEPT, Key, Reason, Verdict, Verdicts, WorkerLimits
from engine.grammar_check.process import WorkerLost, WorkerProcess
from engine.grammar_check.turns import QueueFull, TenantTurns

log = structlog.get_logger("grammars")

WORKERS = 2
COSTLY_SECONDS = 0.1
"""Wall time in seconds above which a check, including the replacement of its worker, counts as costly. Tenants whose
last grammar was costly may not use all workers at once, so that a worker is left for the other tenants."""
ATTEMPTS = 2
"""Maximum number of attempts to check a grammar if its worker is ended from outside."""
RESTART_SECONDS = 1.0
"""Pause in seconds after a failed attempt to start a worker."""


@dataclass(eq=False, slots=True)
class _Job:
    """The check of one grammar, shared by all callers that ask for the same grammar before it ends."""

    key: Key
    grammar: Grammar
    asks: list[Future[Verdict]] = field(default_factory=list)
    is_begun: bool = False
    """True means that a worker checks the grammar already."""


@dataclass(eq=False, slots=True)
class _Ask:
    """One caller's request for a verdict, queued for its tenant. Several requests may share one `_Job`."""

    job: _Job
    future: Future[Verdict]


@dataclass(slots=True)
class PoolCounts:
    """Totals of a `GrammarPool` since it was created. The pool's threads update them."""

    refused: Counter[Reason] = field(default_factory=Counter)
    """Number of verdicts given other than "sound", by reason."""
    replaced: int = 0
    """Number of worker processes that were replaced because they died, hung or were spent."""
    answered: int = 0
    """Number of verdicts given to callers, including remembered ones. Cancelled requests are not counted."""
    waited_seconds: float = 0.0
    """Seconds between `submit` and its verdict, summed over all `answered` requests."""


UNHURRIED_S = 60.0
"""Value in seconds of `GrammarPool(start_after=...)` in a server process: by then, the server's own start has finished,
which takes up to 25 s with a model that has to be read first."""


class GrammarPool:
    """Checks grammars in child processes and remembers the verdicts. Thread-safe. The creator must call `close`.

    Args:
        limits: resources that one grammar may use. None means the defaults.
        workers: number of worker processes.
        at_once: maximum number of one tenant's grammars in work; less than `workers`, which leaves one for others.
        queued: maximum number of one tenant's grammars that wait.
        kept: maximum number of verdicts to remember.
        start_after: seconds after which the workers start, if no grammar comes earlier; each takes half a second of a
            core.
    """

    def __init__(
        self,
        limits: WorkerLimits | None = None,
        *,
        workers: int = WORKERS,
        at_once: int = 1,
        queued: int = 256,
        kept: int = KEPT,
        start_after: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits = limits or WorkerLimits()
        self._changed = threading.Condition()
        self._turns: TenantTurns[_Ask] = TenantTurns(at_once, queued, max(at_once, workers - 1))
        self._verdicts = Verdicts(clock, kept)
        self._jobs: dict[Key, _Job] = {}
        self._clock = clock
        self._closing = False
        self.counts = PoolCounts()
        self._workers: dict[int, WorkerProcess] = {}
        """Thread number -> its live worker."""
        self._threads = [
            threading.Thread(target=self._serve, args=(number,), name=f"grammar-{number}", daemon=True)
            for number in range(workers)
        ]
        self._is_started = False
        self._starter = threading.Timer(start_after, self._start_threads)
        self._starter.daemon = True
        if start_after:
            self._starter.start()
        else:
            self._start_threads()

    @property
    def pids(self) -> list[int]:
        """Process ids of the grammar workers, including those that are starting."""
        with self._changed:
            return [worker.pid for worker in self._workers.values()]

    def submit(self, tenant: str, grammar: Grammar) -> Future[Verdict]:
        """Queue the check of a grammar and return a future of its verdict at once, never raising: QUEUE for a full
        queue of the tenant, UNDECIDED for a closed pool. Equal grammars share one check; cancelling the future unqueues
        it."""
        future: Future[Verdict] = Future()
        key, now = Key.of(grammar), self._clock()
        future.add_done_callback(lambda done: self._count(done, now))
        self._start_threads()
        with self._changed:
            verdict = self._verdicts.get(key) or self._enqueue(tenant, key, grammar, future)
        if verdict is not None:
            future.set_result(verdict)
        return future

    def close(self) -> None:
        """Kill the workers and join the pool's threads. Callers that still wait get the verdict UNDECIDED."""
        with self._changed:
            self._closing = True
            self._turns.clear()
            left = []
            for job in self._jobs.values():
                left += job.asks
                job.asks = []
            self._jobs.clear()
            for worker in self._workers.values():
                worker.kill()
            self._changed.notify_all()
        _resolve(left, _undecided("the server is stopping"))
        self._starter.cancel()
        for thread in self._threads if self._is_started else ():
            thread.join()

    def _start_threads(self) -> None:
        with self._changed:
            if not (self._is_started or self._closing):
                self._is_started = True
                for thread in self._threads:
                    thread.start()

    def _enqueue(self, tenant: str, key: Key, grammar: Grammar, future: Future[Verdict]) -> Verdict | None:
        """Queue a request, or add its future to an equal grammar's check, with the lock held. Return None, or the
        verdict if it is not queued: UNDECIDED from a closing pool, QUEUE for a full queue."""
        if self._closing:
            return _undecided("the server is stopping")
        job = self._jobs.get(key) or _Job(key, grammar)
        ask = _Ask(job, future)
        if not job.is_begun:
            try:
                self._turns.put(tenant, ask)
            except QueueFull:
                return Verdict(Reason.QUEUE, "too many grammars of this tenant are waiting to be compiled")
            future.add_done_callback(lambda done: self._leave(tenant, ask) if done.cancelled() else None)
        self._jobs[key] = job
        job.asks.append(future)
        self._changed.notify()
        return None

    def _leave(self, tenant: str, ask: _Ask) -> None:
        """Remove a request with a cancelled future from its tenant's queue, and the job if no other caller wants it."""
        with self._changed:
            self._turns.remove(tenant, ask)
            ask.job.asks = [future for future in ask.job.asks if future is not ask.future]
            if not ask.job.asks and not ask.job.is_begun:
                self._jobs.pop(ask.job.key, None)

    def _count(self, done: Future[Verdict], asked: float) -> None:
        if done.cancelled():
            return
        with self._changed:
            self.counts.answered += 1
            self.counts.waited_seconds += self._clock() - asked
            if (reason := done.result().reason) is not None:
                self.counts.refused[reason] += 1

    def _serve(self, number: int) -> None:
        """Run one thread: start worker process `number`, have it check grammars until the pool closes, and end it."""
        worker = self._start(number)
        try:
            while worker is not None and (turn := self._next()) is not None:
                tenant, job = turn
                begun = self._clock()
                worker = self._check(number, worker, job)
                with self._changed:
                    self._turns.done(tenant, was_costly=self._clock() - begun > COSTLY_SECONDS)
                    self._changed.notify_all()
        finally:
            if worker is not None:
                worker.close()
            with self._changed:
                self._workers.pop(number, None)

    def _next(self) -> tuple[str, _Job] | None:
        """Wait until a queued grammar may be checked by the rules of `TenantTurns`, mark its job as begun, and return
        its tenant and job. Jobs without callers or begun before are skipped. None means that the pool closes."""
        with self._changed:
            while not self._closing:
                turn = self._turns.take()
                if turn is None:
                    self._changed.wait()
                    continue
                tenant, job = turn[0], turn[1].job
                if not job.is_begun and job.asks:
                    job.is_begun = True
                    return tenant, job
                self._turns.done(tenant)
            return None

    def _check(self, number: int, worker: WorkerProcess, job: _Job) -> WorkerProcess | None:
        """Check a job's grammar and give its callers the verdict: UNDECIDED if the worker was lost in all `ATTEMPTS`.
        Return the worker for the next grammar, perhaps a new one; None means that the pool closes."""
        current: WorkerProcess | None = worker
        verdict = _undecided("its worker was ended from outside")
        for _ in range(ATTEMPTS):
            if current is None:
                break
            try:
                verdict = current.ask(job.grammar).verdict
                break
            except (
                Exception
            ) as error:  # a dying worker may send anything, but the callers need a verdict and the thread must go on
                if not self._closing:
                    log.warning("grammar_worker_lost", reason=str(error))
                current = self._replace(number, current)
        self._settle(job, verdict)
        if current is not None and current.spent:
            return self._replace(number, current)
        return current

    def _settle(self, job: _Job, verdict: Verdict) -> None:
        """Cache the verdict on a job's grammar and resolve its callers' futures. A verdict in `DEATHS` is logged as a
        warning."""
        if verdict.reason in DEATHS:
            log.warning("grammar_refused", reason=verdict.reason.value, kind=job.grammar.kind.value)
        with self._changed:
            self._verdicts.put(job.key, verdict)
            self._jobs.pop(job.key, None)
            asks, job.asks = job.asks, []
        _resolve(asks, verdict)

    def _replace(self, number: int, worker: WorkerProcess) -> WorkerProcess | None:
        worker.close()
        with self._changed:
            self.counts.replaced += 1
        return self._start(number)

    def _start(self, number: int) -> WorkerProcess | None:
        """Start worker process `number` and wait until it is ready. A failure is logged and retried each second. None
        means that the pool closes."""
        while not self._closing:
            try:
                worker = self._launch(number)
                worker.wait_ready()
                return worker
            except (WorkerLost, OSError) as error:
                if not self._closing:
                    log.error("grammar_worker_failed", reason=str(error))
                with self._changed:
                    self._changed.wait_for(lambda: self._closing, RESTART_SECONDS)
        return None

    def _launch(self, number: int) -> WorkerProcess:
        worker = WorkerProcess(self._limits)
        with self._changed:
            self._workers[number] = worker
            if self._closing:
                worker.kill()
        return worker


def _undecided(why: str) -> Verdict:
    return Verdict(Reason.UNDECIDED, f"the grammar could not be checked: {why}")


def _resolve(futures: list[Future[Verdict]], verdict: Verdict) -> None:
    for future in futures:
        if future.set_running_or_notify_cancel():
            future.set_result(verdict)
