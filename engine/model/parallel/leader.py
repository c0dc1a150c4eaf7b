"""Rank 0 of an engine with several ranks: the executor that the step loop uses."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Protocol

import structlog

from engine.core.memory.adapters import HostAdapter
from engine.core.messages.commands import AdapterFetched, Answer, FetchAnswer, FetchCancelled, FetchFailed
from engine.core.messages.requests import AdapterHash
from engine.core.messages.step import AdapterFetch, Launch, StepPlan, StepResult
from engine.executor.base import Claim, RankDied, Report
from engine.model.parallel.messages import Drop, Fetch, Joining, Message, Ready, Refused, Reply, Step, for_followers
from engine.model.runner.model_runner import ModelRunner

log = structlog.get_logger("ranks")

DEATH_S = 10.0
"""Seconds that rank 0 waits, after an operation among the ranks has failed, to learn that another rank's process has
ended."""


class Follower(Protocol):
    """Protocol of rank 0's connection to the process of another rank."""

    @property
    def rank(self) -> int: ...

    def send(self, message: Message) -> None:
        """Send a message to the rank. Raises OSError if the rank is gone. Any thread may call this."""

    def receive(self) -> Reply:
        """Wait for the rank's next reply. Raises EOFError or OSError if the rank is gone."""

    def death(self) -> tuple[str, int]:
        """Wait until the rank's process has ended; kill it if that takes over `END_S`. Return how it ended, as the end
        of a sentence ('was ended by SIGKILL'), and the signal, or 0."""

    def close(self) -> None:
        """End the process of the rank, and wait until it has ended."""


class Leader:
    """An `Executor` that sends every plan to all ranks, which thus hold the same adapters, and executes it as rank 0.
    An adapter that not all could read is dropped before the engine hears of it."""

    def __init__(self, runner: ModelRunner, followers: Sequence[Follower]) -> None:
        self._runner = runner
        self._followers = followers
        self._tokens: list[tuple[str, int]] = []
        self._collected = 0
        self._closing = False
        self._gone = threading.Event()
        """Set when a rank has died, whose death `_died` describes."""
        self._died: RankDied | None = None
        self._answers: dict[AdapterHash, dict[int, FetchAnswer]] = {}
        self._lock = threading.Lock()
        self._report: Report = lambda _: None
        runner.on_tokens = self._tokens.extend
        runner.connect(lambda answer: self._answer(0, answer))

    def start(self) -> None:
        """Start a thread for each other rank, which listens to the rank's answers. The ranks must be ready."""
        for follower in self._followers:
            threading.Thread(target=self._listen, args=(follower,), name=f"rank-{follower.rank}", daemon=True).start()

    @property
    def overlaps(self) -> bool:
        return self._runner.overlaps

    def connect(self, report: Report) -> None:
        self._report = report

    def submit(self, plan: StepPlan) -> Launch:
        with self._death_known():
            if self._died is not None:
                raise self._died
            self._send(Step(for_followers(plan), tuple(self._tokens), self._collected))
            self._tokens.clear()
            self._collected = 0
            return self._runner.submit(plan)

    def collect(self) -> StepResult:
        with self._death_known():
            result = self._runner.collect()
        self._collected += 1
        return result

    def load_host(self, path: str, claim: Claim) -> HostAdapter:
        """Read an adapter on this rank and, once `claim` has accepted it, have the other ranks read it, too. Does not
        wait for them: requests for the adapter wait until all ranks have it."""

        def claim_for_all(host: HostAdapter) -> bool:
            claimed = claim(host)
            if claimed:
                self._send(Fetch(AdapterFetch(host.adapter_hash, path, host.num_bytes)))
            return claimed

        return self._runner.load_host(path, claim_for_all)

    @property
    def page_memory(self) -> None:
        return None

    def close(self) -> None:
        self._closing = True
        for follower in self._followers:
            follower.close()
        self._runner.close()

    def _send(self, message: Message) -> None:
        for follower in self._followers:
            follower.send(message)

    def _listen(self, follower: Follower) -> None:
        """Pass on a rank's answers until the rank is gone. Then the next `submit` raises RankDied, and the step loop,
        which may be idle, is woken by an answer to no fetch, which it ignores."""
        with suppress(EOFError, OSError):
            while True:
                reply = follower.receive()
                if not isinstance(reply, Joining | Ready | Refused):
                    self._answer(follower.rank, reply)
        if not self._closing:
            how, signal = follower.death()
            # The first death is the cause of others, in operations that the dead rank did not join.
            self._died = self._died or RankDied(f"rank {follower.rank} of {len(self._followers) + 1} {how}", signal)
            log.error("rank_died", rank=follower.rank, how=how, consequence="the engine ends")
            self._gone.set()
            self._report(FetchCancelled(""))

    @contextmanager
    def _death_known(self) -> Iterator[None]:
        """Context manager around an operation among the ranks. If the operation fails and a rank turns out to have died
        within DEATH_S, raises RankDied in place of the operation's error."""
        try:
            yield
        except RankDied:
            raise
        except (RuntimeError, OSError) as error:
            if self._gone.wait(DEATH_S) and self._died is not None:
                raise self._died from error
            raise

    def _answer(self, rank: int, answer: Answer) -> None:
        """Receive an answer from a rank. Report one about a grammar at once, and one for an adapter when every rank has
        answered: unless all have it, those that have it drop it."""
        if not isinstance(answer, AdapterFetched | FetchFailed | FetchCancelled):
            self._report(answer)
            return
        with self._lock:
            answers = self._answers.setdefault(answer.adapter_hash, {})
            answers[rank] = answer
            if len(answers) <= len(self._followers):
                return
            del self._answers[answer.adapter_hash]
        refused = [one for one in answers.values() if not isinstance(one, AdapterFetched)]
        if refused:
            self._drop([number for number, one in answers.items() if isinstance(one, AdapterFetched)], answer)
        failed = [one for one in refused if isinstance(one, FetchFailed)]
        self._report((failed or refused or [answer])[0])

    def _drop(self, ranks: Sequence[int], answer: FetchAnswer) -> None:
        """Free the copies of an adapter on the ranks that could read it."""
        for rank in ranks:
            if rank == 0:
                self._runner.drop(answer.adapter_hash)
            else:
                self._followers[rank - 1].send(Drop(answer.adapter_hash))
