"""Parses command options that are whole numbers, in the notation of `engine.core.counts`, such as `100k`."""

from __future__ import annotations

from collections.abc import Callable

import typer

from engine.core.counts import parse_count


def count(least: int | None = None, most: int | None = None) -> Callable[[str | int], int]:
    """Return a parser for an option with the given bounds. None means no bound.

    The help text shows the name of the returned function as the type of the value.
    """

    def integer(value: str | int) -> int:
        number = _parsed(value) if isinstance(value, str) else value  # a default is a number already
        if (least is not None and number < least) or (most is not None and number > most):
            bounds = f"at least {least}" if most is None else f"from {least} to {most}"
            raise typer.BadParameter(f"it must be {bounds}, not {number}")
        return number

    return integer


def _parsed(text: str) -> int:
    try:
        return -parse_count(text[1:]) if text.startswith("-") else parse_count(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
