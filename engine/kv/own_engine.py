"""The engine on whose behalf this process moves pages, as the threads that fetch and send them know it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.core.kv_moves import MoveReport
from engine.executor.base import PageMemory
from engine.kv.line import Clock


@dataclass(frozen=True, slots=True)
class OwnEngine:
    """What moves need of the engine of this process.

    Attributes:
        identity: see `EngineInfo.kv_identity`.
        memory: the host pages.
        report: passes a report to the engine.
        clock: the engine's clock, in seconds.
    """

    identity: str
    memory: PageMemory
    report: Callable[[MoveReport], None]
    clock: Clock
