"""Counts what the rendering of a chat template computes: steps, what it reads, and the sizes of what it makes."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sized
from itertools import chain
from typing import Any

from jinja2.exceptions import TemplateRuntimeError

MOST_STEPS = 4_000_000
"""Maximum turns of loops, calls and reads of one rendering, which take seconds. The longest bodies have 300,000
messages."""
MOST_TEXT = 64 * 2**20
"""Maximum length of one text or list. The longest bodies have 8 MiB by default."""
MOST_WRITTEN = 2**30
"""Maximum length of all texts and lists of one rendering together."""
MEMBERS_A_STEP = 4
CHARACTERS_A_STEP = 1024
"""Parts that are read in the time of a step, roughly: members of containers, and characters."""
SMALL_INDENT = 16
"""Indentation with which JSON of 40,000 values in 100 levels, the most of a body, keeps to MOST_TEXT."""
SCALARS = frozenset((int, float, bool, type(None)))
CONTAINERS: tuple[type, ...] = (list, tuple, dict, set, frozenset, type({}.keys()), type({}.values()), type({}.items()))


class TooCostly(TemplateRuntimeError):
    """A template computes more than it may."""


class Budget(threading.local):
    """What the present rendering of a thread may still compute. Outside a rendering, as while a template is compiled,
    only single values are bounded."""

    steps = float("inf")
    written = float("inf")
    given: frozenset[int] = frozenset()
    """Identities of tools and of calls, and of their parts, which the caller gives: what is in them is there once."""

    def step(self, count: int = 1) -> None:
        """Count turns of a loop, or calls. Raises TooCostly."""
        self.steps -= count
        if self.steps < 0:
            raise TooCostly(f"it takes more than {MOST_STEPS:,} turns of loops and calls, or reads that take as long")

    def write(self, length: float) -> None:
        """Count a text or a list of this length. Raises TooCostly."""
        self.written -= length
        if length > MOST_TEXT or self.written < 0:
            raise TooCostly(f"it makes a text or list of over {MOST_TEXT:,} characters, or too many of them")

    def skim(self, value: Any) -> None:
        """Count the characters of a text, or the members of a container without what is in them. Raises TooCostly."""
        if isinstance(value, str):
            if len(value) >= CHARACTERS_A_STEP:
                self.step(len(value) // CHARACTERS_A_STEP)
        elif isinstance(value, Sized):
            self.step(len(value) // MEMBERS_A_STEP)

    def read(self, value: Any, indent: int = 0) -> None:
        """Count the characters of a text, or all that is in a container and in the containers in it, as often as it is
        there. `indent` is by how many characters each level is indented. Raises TooCostly."""
        if value.__class__ in SCALARS:
            return
        if not isinstance(value, CONTAINERS):
            self.skim(value)
            return
        level: list[Any] = [value]
        length = depth = 0
        while level:
            self.step(len(level) + sum(map(len, level)) // MEMBERS_A_STEP)
            members = list(chain.from_iterable(map(_members, level)))
            depth += 1
            length += sum(map(len, [one for one in members if one.__class__ is str])) + len(members) * depth * indent
            others = [one for one in members if one.__class__ is not str]
            length += sum([one.bit_length() // 3 for one in others if isinstance(one, int)])
            level = [one for one in others if isinstance(one, CONTAINERS)]
            if length > MOST_TEXT:
                raise TooCostly(f"it reads a list whose text has over {MOST_TEXT:,} characters")
        self.step(length // CHARACTERS_A_STEP)

    def write_json(self, value: Any, indent: int) -> None:
        """Count what JSON of a value takes. That of a tool or a call is bounded as the request is. Raises TooCostly."""
        if id(value) not in self.given or indent > SMALL_INDENT:
            self.read(value, indent)

    def compare(self, operator: str, left: Any, right: Any) -> None:
        """Count what a comparison reads. Raises TooCostly."""
        if operator not in ("in", "notin"):
            if left.__class__ in SCALARS:
                return
            if isinstance(left, CONTAINERS) and isinstance(right, CONTAINERS):
                self.read(left)
            elif isinstance(left, str) and isinstance(right, str):
                self.skim(left)
        elif isinstance(right, dict | set | frozenset | type({}.keys())):
            self.read(left)  # its hash is computed
        elif isinstance(left, CONTAINERS):
            self.read(right)
        else:
            self.skim(right)


def _members(container: Any) -> Iterable[Any]:
    return (*container, *container.values()) if isinstance(container, dict) else container
