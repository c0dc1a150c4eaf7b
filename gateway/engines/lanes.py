"""Modes and goals of the lanes of a pool, which every engine that joins gets."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping

from engine.core.config import LaneGoals
from engine.core.messages.requests import Lane, LaneMode
from engine.pb import engine_pb2 as pb
from engine.rpc.client import EngineClient
from engine.rpc.wire import lane_mode_from_pb


class PoolLanes:
    """Remembers the modes and goals of lanes that were set through this pool, and modes that other gateways set, so
    that an engine that joins gets them even if no other can be asked."""

    def __init__(self) -> None:
        self.changes = 0
        """Number of mode changes through this pool that have begun, plus those that have ended. Reports that were
        requested when it was lower are out of date."""
        self._modes: dict[Lane, LaneMode] = {}
        self._goals: dict[Lane, LaneGoals] = {}

    @contextlib.contextmanager
    def changing(self, lane: Lane, mode: LaneMode) -> Iterator[None]:
        """Remember the mode of a lane, which the body sets in the engines. If the body raises, restore what was
        remembered before."""
        before = dict(self._modes)
        self._modes[lane], self.changes = mode, self.changes + 1
        try:
            yield
        except BaseException:
            self._modes = before
            raise
        finally:
            self.changes += 1

    def note_goals(self, lane: Lane, goals: LaneGoals) -> None:
        self._goals[lane] = goals

    def learn(self, reports: Iterable[pb.EngineStats], changes: int) -> None:
        """Remember the mode of each lane for which the reports of all serving engines agree. `changes` is the value of
        `self.changes` when the reports were requested; if it has changed since, they are ignored."""
        if changes != self.changes:
            return
        found: dict[Lane, set[LaneMode]] = {}
        for report in reports:
            for lane in report.lanes:
                found.setdefault(Lane(lane.lane), set()).add(lane_mode_from_pb(lane.mode))
        self._modes |= {lane: modes.pop() for lane, modes in found.items() if len(modes) == 1}

    async def apply(self, client: EngineClient) -> None:
        """Set the remembered modes and goals in a new engine process, which starts with all lanes open. Raises
        EngineUnavailable if the engine is gone again."""
        for lane, goals in tuple(self._goals.items()):
            await client.set_goals(lane, goals)
        changes = self.changes
        await _set_modes(client, {lane: mode for lane, mode in self._modes.items() if mode is not LaneMode.OPEN})
        while changes != self.changes:  # one of the calls may have undone a change that came meanwhile
            changes = self.changes
            await _set_modes(client, dict(self._modes))


async def _set_modes(client: EngineClient, modes: Mapping[Lane, LaneMode]) -> None:
    for lane, mode in modes.items():
        await client.set_lane(lane, mode)
