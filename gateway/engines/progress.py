"""Notices an engine that stands still although requests run in it, and when it moves again."""

from __future__ import annotations

from engine.pb import engine_pb2 as pb

MAX_STILL_LOOKS = 30
"""Number of looks in a row, one a second, at which an engine has told nothing new, or has running requests and has
ended no step, before its requests are moved. A step in which a GPU's kernels are compiled takes up to half a minute."""


class Progress:
    """What the news of one engine say about its progress."""

    def __init__(self) -> None:
        self._steps = -1
        """Number of steps in the last news."""
        self._is_busy = False
        """True means that requests ran at the last news."""
        self._heard = False
        """True means that news have come since the last look."""
        self._looked_at = -1
        """Number of steps at the last look."""
        self._still_looks = 0
        self._hung_life = ""
        """Id of the process that was given up because it stood still; empty if it has moved since, or none was."""
        self._hung_steps = 0

    def hear(self, news: pb.EngineNews) -> None:
        """Take in the news of the engine."""
        self._heard, self._steps = True, news.steps
        self._is_busy = any(lane.running for lane in news.lanes)
        if not self._is_busy or self._steps != self._hung_steps:
            self._hung_life = ""

    def look(self, is_ready: bool) -> bool:
        """Look at the engine once; call this every second. Returns True if it has been still for `MAX_STILL_LOOKS` in a
        row: a stall of the gateway itself counts as one look. `is_ready` says whether the engine is connected."""
        moves = self._heard and not (self._is_busy and self._steps == self._looked_at)
        self._heard, self._looked_at = False, self._steps
        self._still_looks = 0 if moves or not is_ready else self._still_looks + 1
        return self._still_looks >= MAX_STILL_LOOKS

    def give_up(self, life: str) -> None:
        """Note that the engine process with the id `life` gets no requests until it moves."""
        self._hung_life, self._hung_steps = life, self._steps

    def hangs(self, life: str) -> bool:
        """Return whether the process with the id `life` was given up and has not moved since. The news of another
        process say nothing about it."""
        return bool(life) and life == self._hung_life

    def lose(self) -> None:
        """Forget the looks, because the connection has ended."""
        self._still_looks, self._heard = 0, False
