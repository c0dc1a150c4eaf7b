"""Modes and goals of the lanes of a pool, which every engine that joins gets."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping

from engine.core.config import LaneGoals
from engine.core.types import Lane, LaneMode
from engine.pb import engine_pb2 as pb
from engine.rpc.client import EngineClient, LaneRejected
from engine.rpc.wire import lane_mode_from_pb


class PoolLanes:
    """Remembers what was set through this pool, and the modes that other gateways have set, from the engines' reports.
    An engine that joins while no other one can be asked so gets them, too."""

    def __init__(self) -> None:
        self.changes = 0
        """Counts the beginnings and ends of changes through this pool. Reports that were asked for before the last one
        are out of date."""
        self._modes: dict[Lane, LaneMode] = {}
        self._goals: dict[Lane, LaneGoals] = {}

    @contextlib.contextmanager
    def changing(self, lane: Lane, mode: LaneMode) -> Iterator[None]:
        """Note the mode that the body sets in the engines, unless it raises."""
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
        """Take over the modes in which all serving engines report a lane to be. `changes` is the number of changes when
        they were asked."""
        if changes != self.changes:
            return
        found: dict[Lane, set[LaneMode]] = {}
        for report in reports:
            for lane in report.lanes:
                found.setdefault(Lane(lane.lane), set()).add(lane_mode_from_pb(lane.mode))
        self._modes |= {lane: modes.pop() for lane, modes in found.items() if len(modes) == 1}

    async def apply(self, client: EngineClient) -> None:
        """Set the modes and goals of a new engine process, in which every lane is open. Raises EngineUnavailable if it
        is gone again."""
        for lane, goals in tuple(self._goals.items()):
            await client.set_goals(lane, goals)
        changes = self.changes
        await _set_modes(client, {lane: mode for lane, mode in self._modes.items() if mode is not LaneMode.OPEN})
        while changes != self.changes:  # one of the calls may have undone a change that came meanwhile
            changes = self.changes
            await _set_modes(client, dict(self._modes))


async def _set_modes(client: EngineClient, modes: Mapping[Lane, LaneMode]) -> None:
    for lane, mode in modes.items():
        with contextlib.suppress(LaneRejected):  # its policy has one queue for all lanes
            await client.set_lane(lane, mode)
