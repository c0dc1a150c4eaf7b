"""The console on which commands print: what a server, a file or a model says cannot command the terminal."""

from __future__ import annotations

import re
from collections.abc import Iterable

import rich.console
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Control characters of C0, but for tab and line feed, DEL and those of C1. With them, text could change a terminal's
title or colours, overwrite what was printed, or have the terminal type an answer."""


class Console(rich.console.Console):
    """rich's console, which leaves control characters out of all text. Styles and cursor movements of rich itself are
    no text."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(plain(segment.text), segment.style)


def plain(text: str) -> str:
    """Return a text without control characters, except for tabs and line feeds."""
    return CONTROL.sub("", text)
