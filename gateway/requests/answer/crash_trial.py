"""Decides whether a request may have made engine processes crash, so that it does not take down one after another.

A new engine process reports which requests were in the last step of the process before it. They are resubmitted as
suspects: the engine computes their next tokens in separate steps (`engine.core.plan.next_step`), and a suspect that was
alone in the last step before another crash is not resubmitted.

Where there are several engines, a request moves to another one at once, before the successor of its own has reported
how that ended. It moves as a suspect, which costs a few steps. If its engine ends again while it is on trial, the
request waits for the successor's report, so that a request that crashes engines takes down no more than two. If no
successor comes in time, it ends with an error. If one comes that knows nothing of its predecessor, or the engine is
removed, the request goes on as a suspect, through `MOST_MOVES` engine processes at most. A request for a virtual model
that moves to another member because its engine ended comes there as a suspect, too.
"""

from __future__ import annotations

from engine.core.state.sequence import TRIAL_TOKENS_HELD
from engine.rpc.api import EngineApi
from engine.rpc.stream import CrashesEngines, EngineDrained, EngineUnavailable, GivenUp

MOST_MOVES = 3
"""Maximum number of engine processes in which a request continues after the first one. If more of them end, the request
is given up."""


class CrashTrial:
    """The engine processes that one request has lost, and whether it may have made them crash."""

    def __init__(self, engine: EngineApi, suspect: bool) -> None:
        """`suspect` says whether the request is a suspect from the start."""
        self._engine = engine
        self.is_suspect = suspect
        self.doubts = 0
        """Number of engine processes that ended while they had the request and may have crashed because of it."""
        self.awaits_report = False
        """True while the request waits for a report on how its engine process ended."""
        self.losses = 0
        """Number of engine processes that ended while they had the request. Those that were drained do not count."""
        self._is_due = False
        """True from the loss of an engine process until `judge` has decided about it."""
        self._proven_from = TRIAL_TOKENS_HELD if suspect else 0
        """Number of produced tokens from which on a suspect is not on trial any more."""
        self._life = self._request_id = ""
        """The engine process that has the request, or had it last, and the request's id there."""

    def note_submitted(self, life: str, request_id: str) -> None:
        """Record that the engine process `life` has the request, under the id `request_id`."""
        self._life, self._request_id = life, request_id

    def lose(self, loss: EngineUnavailable) -> None:
        """Record that the request has lost its engine process, unless that is only being drained. Raises GivenUp if it
        has lost `MOST_MOVES` before."""
        self._is_due = not isinstance(loss, EngineDrained)
        if not self._is_due:
            return
        self.losses += 1
        self.doubts += 1
        if self.losses > MOST_MOVES:
            raise GivenUp(f"{self.losses} engine processes ended while they had the request")

    async def judge(self, num_produced: int) -> None:
        """Decide whether the request may have made the lost engine process crash; do nothing if none was lost since.

        It becomes a suspect if it was in the last step of a process that crashed, or if that is not known; a request on
        trial first waits for the report. If it is cleared, `doubts` falls again. Raises CrashesEngines if it was a
        suspect already and alone in that step. `num_produced` is the number of tokens that the answer has."""
        if not self._is_due:
            return
        fate = self._engine.fate(self._life)
        if fate is None and self.is_suspect and num_produced < self._proven_from:
            self.awaits_report = True
            fate = await self._engine.learn_fate(self._life)
            self.awaits_report = False
            await self._engine.wait_ready()
        self._is_due = False
        if fate is not None and not (fate.crashed and self._request_id in fate.request_ids):
            self.doubts -= 1
            return
        if self.is_suspect and fate is not None and len(fate.request_ids) == 1:
            raise CrashesEngines("two engine processes crashed while they computed this request")
        self.is_suspect = True
        self._proven_from = num_produced + TRIAL_TOKENS_HELD
