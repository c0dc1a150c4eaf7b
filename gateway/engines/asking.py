"""Asks all engines of a pool at once, and decides what their answers and failures mean together."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeVar

from engine.rpc.client import EngineClient
from engine.rpc.stream import EngineUnavailable
from gateway.engines.replica import PooledEngine

T = TypeVar("T")


def reachable(engines: Iterable[PooledEngine]) -> list[PooledEngine]:
    """Return the engines that have a connection, also those that are being filled. Raises EngineUnavailable if there is
    none."""
    if not (connected := [engine for engine in engines if engine.is_reachable]):
        raise EngineUnavailable("no engine is connected")
    return connected


async def ask_all(
    engines: Sequence[PooledEngine], call: Callable[[EngineClient], Awaitable[T]]
) -> dict[PooledEngine, T]:
    """Call every engine at once, and return the answers of those that gave one. Raises the error of an engine that
    refused, or EngineUnavailable if none answered."""
    results = await asyncio.gather(*(call(engine.client) for engine in engines), return_exceptions=True)
    asked = zip(engines, results, strict=True)
    answers = {engine: result for engine, result in asked if not isinstance(result, BaseException)}
    failures = [result for result in results if isinstance(result, BaseException)]
    if not answers or any(not isinstance(failure, EngineUnavailable) for failure in failures):
        raise first_refusal(failures)
    return answers


def first_refusal(results: Sequence[object]) -> BaseException:
    """Return the first error that is a refusal or, if every engine is gone, the first error. Raises IndexError if there
    is no error."""
    errors = [result for result in results if isinstance(result, BaseException)]
    return next((error for error in errors if not isinstance(error, EngineUnavailable)), errors[0])
