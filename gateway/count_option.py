"""How options that are whole numbers are read: written as everywhere else, `100k` included."""

from __future__ import annotations

from collections.abc import Callable

import typer

from engine.core.counts import parse_count


def count(least: int | None = None, most: int | None = None) -> Callable[[str | int], int]:
    """Return the parser of an option, with its bounds. Its name is what help shows for the value."""

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
