"""What a client got, whichever it is."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Choice:
    text: str = ""
    finish: str | None = None
    calls: dict[int, list[str]] = field(default_factory=lambda: defaultdict(lambda: ["", ""]))
    """Name and arguments, by the call's number."""
    logprobs: list[Any] = field(default_factory=list)


@dataclass
class Reply:
    choices: dict[int, Choice] = field(default_factory=lambda: defaultdict(Choice))
    usage: tuple[int, int] | None = None
    """Tokens of the prompt and of the completion."""
    pieces: int = 0

    @property
    def only(self) -> Choice:
        [choice] = self.choices.values()
        return choice
