"""An event loop whose clock a test sets, and whose turns it counts, so that one seed gives one history."""

from __future__ import annotations

import asyncio

START = 1000.0
"""The first reading of the clock, in seconds. It is not 0, because a time of 0 looks like none."""
MOST_TURNS = 2000
"""Turns after which work that only wakes itself counts as endless."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop that runs only while it is asked to, and in which time passes only by `passes`."""

    def __init__(self) -> None:
        super().__init__()
        self.now = START
        self.complaints: list[str] = []
        """What was passed to the exception handler, such as exceptions that no task retrieved."""
        self.set_exception_handler(lambda loop, context: self.complaints.append(str(context)))

    def time(self) -> float:
        return self.now

    def turn(self) -> None:
        """Run what is ready now, once. What it makes ready runs at the next turn."""
        self.call_soon(self.stop)
        self.run_forever()

    def turns(self, count: int) -> None:
        for _ in range(count):
            self.turn()

    def quiet(self) -> None:
        """Run until nothing is ready. Fails if that does not happen."""
        for _ in range(MOST_TURNS):
            if not self._ready:
                return
            self.turn()
        raise AssertionError(f"the loop is still busy after {MOST_TURNS} turns")

    def passes(self, seconds: float) -> None:
        """Let time pass, and everything happen that is due meanwhile, each at its time."""
        until = self.now + seconds
        self.quiet()
        while (due := self._next_due()) is not None and due <= until:
            self.now = max(self.now, due)
            self.turn()
            self.quiet()
        self.now = until

    def end(self) -> None:
        """Cancel what still runs, and close the loop."""
        for task in asyncio.all_tasks(self):
            task.cancel()
        self.turns(20)
        self.run_until_complete(self.shutdown_asyncgens())
        self.close()

    def _next_due(self) -> float | None:
        return min((timer.when() for timer in self._scheduled if not timer.cancelled()), default=None)
