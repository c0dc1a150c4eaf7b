"""Time limits of requests: until the first token, between tokens, and until the whole answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import TracebackType

from msgspec import Struct
from msgspec.structs import replace

from engine.core.messages.requests import Lane
from gateway.core.errors import ApiError, Fault, unavailable
from gateway.requests.settings import ServiceSettings


class TimeLimits(Struct, frozen=True):
    """How long a caller will wait, in seconds."""

    deadline: float | None = None
    """For the whole answer. The gateway's own limit applies if it is shorter, unless `ignore_server_timeout` is set."""
    ignore_server_timeout: bool = False
    """True means that only `deadline` limits the whole answer, even if it is longer than the gateway's own limit."""
    stall: float | None = None
    """For each token of any answer after the first one. None means no such limit."""

    def within(self, seconds: float | None) -> TimeLimits:
        """Return limits whose deadline is no later than `seconds`; None means that they stay as they are."""
        return replace(self, deadline=earliest(self.deadline, seconds))

    def after(self, seconds: float) -> TimeLimits:
        """Return what is left of the limits when so many seconds have passed."""
        return self if self.deadline is None else replace(self, deadline=self.deadline - seconds)


class Timer:
    """Async context manager that cancels the task that entered it if the first token, any later token or the whole
    answer is late.

    If it has cancelled the task, its exit raises ApiError: DEADLINE_EXCEEDED, or the error given to `stop`. Its user
    reports tokens with `on_token`, that it waits for more with `on_waiting`, and the end with `on_answered`.
    """

    def __init__(
        self, deadline: float | None, first_token: float | None, stall: float | None, running: set[Timer]
    ) -> None:
        """Initialize the timer.

        Args:
            deadline, first_token: time limits of the whole answer and of the first token, in seconds from now. None
                means no limit. Until the first token only `first_token` applies, so it must not be the later one.
            stall: time limit of each wait for a token after the first one, in seconds. None means no limit.
            running: a set that contains the timer while the timer is entered.
        """
        now = asyncio.get_running_loop().time()
        self._deadline = None if deadline is None else now + deadline
        self._stall = stall
        self._has_begun = False
        self._late = "no token before the deadline"
        """End of the DEADLINE_EXCEEDED message ("there was ..."): the time limit that is missed if the timer expires
        now."""
        self._running = running
        self._stopped: ApiError | None = None
        self._timeout = asyncio.timeout_at(None if first_token is None else now + first_token)

    async def __aenter__(self) -> Timer:
        await self._timeout.__aenter__()
        self._running.add(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._running.discard(self)
        try:
            await self._timeout.__aexit__(kind, error, trace)
        except TimeoutError as late:
            raise self._deadline_error() from late

    def on_token(self) -> None:
        """Lift the time limit of the first token, or of a later one until `on_waiting`, because a token has come."""
        if (self._stall is None and self._has_begun) or self._is_over:
            return
        self._has_begun, self._late = True, "no complete answer before the deadline"
        self._timeout.reschedule(self._deadline)

    def on_waiting(self) -> None:
        """Begin the time limit of the next token. The time in which the caller is slow to take a token is no stall."""
        if self._stall is None or self._is_over:
            return
        stalled = asyncio.get_running_loop().time() + self._stall
        if self._deadline is None or stalled < self._deadline:
            self._late = f"no token for {self._stall:g} s"
            self._timeout.reschedule(stalled)

    def on_answered(self) -> None:
        """Lift the time limit, because the whole answer has come."""
        if not self._is_over:
            self._timeout.reschedule(None)

    @asynccontextmanager
    async def lifted_at_exit(self) -> AsyncIterator[None]:
        """Async context manager for the answer. On exit, lift every time limit and ignore `stop`, unless the timer has
        cancelled the task already: the settlement that follows must not turn the end that the caller has seen into
        another one."""
        try:
            yield
        finally:
            self._running.discard(self)
            if not self._timeout.expired():
                self._stopped = None
                self._timeout.reschedule(None)

    def stop(self, error: ApiError) -> None:
        """Cancel the task now, so that the timer's exit raises `error`. Ignored if the task is cancelled already."""
        if not self._is_over:
            self._stopped = error
            self._timeout.reschedule(asyncio.get_running_loop().time())

    @property
    def _is_over(self) -> bool:
        """Return whether this timer has cancelled the task or is about to cancel it."""
        return self._stopped is not None or self._timeout.expired()

    def _deadline_error(self) -> ApiError:
        if self._stopped is not None:
            return self._stopped
        return ApiError(Fault.DEADLINE_EXCEEDED, f"there was {self._late}")


class Deadlines:
    """Creates the requests' timers and keeps those of running requests, so that the gateway can end the requests when
    it stops."""

    def __init__(self, settings: ServiceSettings) -> None:
        self._settings = settings
        self._running: set[Timer] = set()
        self._is_stopping = False

    def start(self, lane: Lane, limits: TimeLimits) -> Timer:
        """Return the timer of a request, which the request's task must enter. Only in the interactive lane,
        `first_token_timeout` of the settings applies. Raises ApiError: DEADLINE_EXCEEDED, the caller's deadline has
        passed already; ENGINE_UNAVAILABLE after `stop_all`."""
        if self._is_stopping:
            raise _stopping()
        if not limits.ignore_server_timeout:
            limits = limits.within(self._settings.request_timeout)
        deadline = limits.deadline
        first_token = self._settings.first_token_timeout if lane is Lane.INTERACTIVE else None
        if deadline is not None and deadline <= 0:
            raise ApiError(Fault.DEADLINE_EXCEEDED, "the deadline had passed before the request began")
        return Timer(deadline, earliest(deadline, first_token), limits.stall, self._running)

    def stop_all(self) -> None:
        """End every running request with ApiError (ENGINE_UNAVAILABLE), which `start` raises from now on, too."""
        self._is_stopping = True
        for timer in self._running:
            timer.stop(_stopping())


def _stopping() -> ApiError:
    return unavailable(Fault.ENGINE_UNAVAILABLE, "the gateway is stopping; try again")


def earliest(*times: float | None) -> float | None:
    """Return the smallest of the times that are not None, or None if there is none."""
    return min((time for time in times if time is not None), default=None)
