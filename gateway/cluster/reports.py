"""Messages between a gateway process and the process that uses Ray for it: one JSON object a line, both ways."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct


class WantedEngine(Struct, frozen=True):
    """An engine that Ray should run."""

    resources: dict[str, float]
    """Amount of each Ray resource that the engine reserves on its node, by Ray's name of the resource."""
    orders: str
    """Instructions for the actor that hosts the engine, as text that only the actor reads."""


class Wanted(Struct, frozen=True):
    """All engines that Ray should run, by name. Those that are missing here are stopped."""

    engines: Mapping[str, WantedEngine]


class EngineReport(Struct, frozen=True):
    """State of one engine."""

    address: str = ""
    """Where the engine listens; empty while it does not."""
    problem: str = ""
    """Why it does not listen, if it should; empty while it only starts."""


class Reports(Struct, frozen=True):
    """The state of all engines, or why there is none."""

    engines: dict[str, EngineReport] = {}
    problem: str = ""
    """Why Ray cannot be used; empty if it can."""
