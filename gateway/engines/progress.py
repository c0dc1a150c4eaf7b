"""Detects over the connection that an engine makes no progress, once a second, for the pool (`Progress`) and for
readiness (`gateway.requests.heartbeat`). Only its supervisor can end its process."""

from __future__ import annotations

MAX_STILL_LOOKS = 30
"""Number of looks in a row without progress after which the requests of an engine are moved. A step in which a GPU's
kernels are compiled takes up to half a minute."""


class StillLooks:
    """Counts the looks in a row, one a second, without progress: nothing was heard, or requests ran and no step ended.
    A stall of the gateway itself counts as one look."""

    def __init__(self) -> None:
        self.count = 0
        self.steps = -1
        """Number of steps that had ended when the engine was last heard; -1 before that."""
        self._is_busy = False
        """True means that requests ran when the engine was last heard."""
        self._is_heard = False
        """True means that the engine was heard since the last look."""
        self._looked_at = -1
        """Value of `steps` at the last look. If it is the same at the next one, no step has ended."""

    def hear(self, steps: int, *, is_busy: bool) -> None:
        """Record the number of steps that have ended, and whether requests run."""
        self._is_heard, self.steps, self._is_busy = True, steps, is_busy

    def look(self, *, is_ready: bool) -> int:
        """Look once, and return the number of looks in a row that found no progress. `is_ready` says whether the engine
        is connected; if it is not, the count restarts."""
        moves = self._is_heard and not (self._is_busy and self.steps == self._looked_at)
        self._is_heard, self._looked_at = False, self.steps
        self.count = 0 if moves or not is_ready else self.count + 1
        return self.count

    def restart(self) -> None:
        """Restart the count, because the connection has ended."""
        self.count, self._is_heard = 0, False


class Progress:
    """Tells whether an engine of a pool stands still, and whether the process that was given up for it moves again."""

    def __init__(self) -> None:
        self._still = StillLooks()
        self._hung_life = ""
        """Id of the process that was given up because it stood still; empty if it has moved since, or none was."""
        self._hung_steps = 0

    def hear(self, steps: int, *, is_busy: bool) -> None:
        """Record the engine's step count and whether requests run, from its news. An engine process that was given up
        counts as alive again if its steps have advanced or no request runs."""
        self._still.hear(steps, is_busy=is_busy)
        if not is_busy or steps != self._hung_steps:
            self._hung_life = ""

    def look(self, is_ready: bool) -> bool:
        """Look once; call this every second. Return True if `MAX_STILL_LOOKS` looks in a row found no progress."""
        return self._still.look(is_ready=is_ready) >= MAX_STILL_LOOKS

    def give_up(self, life: str) -> None:
        """Record that the engine process `life` hangs. It gets no requests until its news show that steps advance or
        that no request runs."""
        self._hung_life, self._hung_steps = life, self._still.steps

    def hangs(self, life: str) -> bool:
        """Return whether `give_up` was called for the process `life`, and it has made no progress since. News of
        another process do not count."""
        return bool(life) and life == self._hung_life

    def lose(self) -> None:
        """Restart the count of looks without progress, because the connection has ended."""
        self._still.restart()
