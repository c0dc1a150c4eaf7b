"""Time limits of requests: until the first token, and until the whole answer."""

from __future__ import annotations

import asyncio
from types import TracebackType

from engine.core.types import Lane
from gateway.core.errors import ApiError, Fault, unavailable
from gateway.requests.admission import ServiceSettings


class Timer:
    """Context manager that cancels its task if no token, or later no whole answer, comes in time.

    If the timer has cancelled the task, leaving it raises ApiError: DEADLINE_EXCEEDED, or the error given to `stop`.
    """

    def __init__(self, deadline: float | None, first_token: float | None, running: set[Timer]) -> None:
        """Initialize the timer.

        Args:
            deadline, first_token: time limits in seconds from now. None means no limit.
            running: a set that contains the timer while the timer is entered.
        """
        now = asyncio.get_running_loop().time()
        self._deadline = None if deadline is None else now + deadline
        self._waiting = True
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

    def on_first_token(self) -> None:
        if self._waiting and not self._is_over:
            self._waiting = False
            self._timeout.reschedule(self._deadline)

    def on_answered(self) -> None:
        """Note that the whole answer has come: from now on there is no time limit."""
        if not self._is_over:
            self._timeout.reschedule(None)

    def stop(self, error: ApiError) -> None:
        """Cancel the task now; the timer then raises `error`."""
        if not self._is_over:
            self._stopped = error
            self._timeout.reschedule(asyncio.get_running_loop().time())

    @property
    def _is_over(self) -> bool:
        """Return whether the task has been cancelled or is about to be cancelled."""
        return self._stopped is not None or self._timeout.expired()

    def _deadline_error(self) -> ApiError:
        if self._stopped is not None:
            return self._stopped
        what = "no token" if self._waiting else "no complete answer"
        return ApiError(Fault.DEADLINE_EXCEEDED, f"there was {what} before the deadline")


class Deadlines:
    """Keeps the timers of all running requests, so that the gateway can end the requests when it stops."""

    def __init__(self, settings: ServiceSettings) -> None:
        self._settings = settings
        self._running: set[Timer] = set()
        self._is_stopping = False

    def start(self, lane: Lane, asked: float | None, *, ignore_server_timeout: bool = False) -> Timer:
        """Return the timer of a request.

        Args:
            asked: seconds that the caller will wait. None means that the caller sets no deadline.
            ignore_server_timeout: whether `request_timeout` of the settings does not apply.

        Raises:
            ApiError: DEADLINE_EXCEEDED, the caller's deadline has passed already; ENGINE_UNAVAILABLE after `stop_all`.
        """
        if self._is_stopping:
            raise _stopping()
        deadline = asked if ignore_server_timeout else _earliest(asked, self._settings.request_timeout)
        first_token = self._settings.first_token_timeout if lane is Lane.INTERACTIVE else None
        if deadline is not None and deadline <= 0:
            raise ApiError(Fault.DEADLINE_EXCEEDED, "the deadline had passed before the request began")
        return Timer(deadline, _earliest(deadline, first_token), self._running)

    def stop_all(self) -> None:
        """End every running request, and every later one when it starts, with ENGINE_UNAVAILABLE."""
        self._is_stopping = True
        for timer in self._running:
            timer.stop(_stopping())


def _stopping() -> ApiError:
    return unavailable(Fault.ENGINE_UNAVAILABLE, "the gateway is stopping; try again")


def _earliest(*times: float | None) -> float | None:
    return min((time for time in times if time is not None), default=None)
