"""How long a request may take: until its first token, and in all."""

from __future__ import annotations

import asyncio
from types import TracebackType

from engine.core.types import Lane
from gateway.core.errors import ApiError, Fault
from gateway.settings import ServiceSettings


class Timer:
    """Cancels the task that entered it: at first for want of a token, then for want of the whole answer.

    Left, it raises ApiError: DEADLINE_EXCEEDED, if it was what cancelled.
    """

    def __init__(self, whole: float | None, first_token: float | None) -> None:
        """Both in seconds from now; None: never."""
        now = asyncio.get_running_loop().time()
        self._whole = None if whole is None else now + whole
        self._waiting = True
        self._timeout = asyncio.timeout_at(None if first_token is None else now + first_token)

    async def __aenter__(self) -> Timer:
        await self._timeout.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._timeout.__aexit__(kind, error, trace)
        except TimeoutError as late:
            raise self._verdict() from late

    def first_token_came(self) -> None:
        if self._waiting and not self._timeout.expired():
            self._waiting = False
            self._timeout.reschedule(self._whole)

    def answered(self) -> None:
        """What follows has all the time it needs."""
        if not self._timeout.expired():
            self._timeout.reschedule(None)

    def _verdict(self) -> ApiError:
        what = "no token" if self._waiting else "no complete answer"
        return ApiError(Fault.DEADLINE_EXCEEDED, f"there was {what} before the deadline")


def deadline(settings: ServiceSettings, lane: Lane, asked: float | None, *, patient: bool = False) -> Timer:
    """Bounds what is done inside. `asked`: seconds the caller will wait, if it says so; `patient`: nothing else counts.

    Raises:
        ApiError: DEADLINE_EXCEEDED, at once where the caller's time is over already.
    """
    whole = asked if patient else _earliest(asked, settings.request_timeout)
    first_token = settings.first_token_timeout if lane is Lane.INTERACTIVE else None
    if whole is not None and whole <= 0:
        raise ApiError(Fault.DEADLINE_EXCEEDED, "the deadline had passed before the request began")
    return Timer(whole, _earliest(whole, first_token))


def _earliest(*times: float | None) -> float | None:
    return min((time for time in times if time is not None), default=None)
