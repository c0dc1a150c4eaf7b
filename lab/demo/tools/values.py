"""Draws argument values, both as people write them in a request and as a tool call writes them in JSON."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

STARTS = (
    "ba",
    "ke",
    "lo",
    "mi",
    "ru",
    "sa",
    "ta",
    "vo",
    "zu",
    "dar",
    "fen",
    "gal",
    "hol",
    "jur",
    "kan",
    "lem",
    "mor",
    "nor",
    "pel",
    "quin",
    "ros",
    "sel",
    "tor",
    "ul",
    "vex",
    "wil",
    "yan",
)
ENDS = (
    "dale",
    "ford",
    "mar",
    "nia",
    "rik",
    "sen",
    "ton",
    "va",
    "wick",
    "zor",
    "lin",
    "ska",
    "burg",
    "dor",
    "la",
    "mont",
    "ris",
    "bury",
)
"""Invented words begin with a syllable of `STARTS` and end with one of `ENDS`."""
INVENTED = frozenset(("city", "person", "company", "title", "word", "street"))
"""Pools to which invented words are added, so that the model learns to copy values instead of remembering them."""

CLOSED = frozenset(("day", "time", "currency", "airport"))
"""Pools whose values are used by both the training set and the held-out set."""

HELD_OUT = 6
"""Every sixth value of the pools that are not in `CLOSED` is held out from training."""

OPERATORS = ("+", "-", "*", "/")


@dataclass(frozen=True, slots=True)
class Value:
    """One value of a tool call's argument, in two notations: the text in the request, and the JSON value in the
    call."""

    text: str
    """The value as a request writes it."""
    json: Any
    """The value as a tool call writes it."""


class Values:
    """Draws argument values with `rng`. The training and held-out sets draw words from disjoint parts of every pool
    that is not in `CLOSED`. The rest is shared: lists of foods, invented words, numbers and enums."""

    def __init__(self, rng: random.Random, *, held_out: bool = False) -> None:
        self.rng = rng
        self._held_out = held_out
        self._special: dict[str, Callable[[], Value]] = {
            "code": self._code, "email": self._email, "sum": self._expression, "phone": self._phone, "list": self._list,
        }  # fmt: skip

    def draw(self, kind: str) -> Value:
        """Draw a value of a kind: the name of a pool in values.txt, `int:LOW:HIGH`, `float:LOW:HIGH`, `enum:A,B,C`, or
        one of code, email, sum (such as 3 + 4), phone and list (of foods)."""
        name, _, options = kind.partition(":")
        if name == "int":
            number = self.rng.randint(*map(int, options.split(":")))
            return Value(str(number), number)
        if name == "float":
            return self._decimal(*map(float, options.split(":")))
        if name == "enum":
            return _said(self.rng.choice(options.split(",")))
        return self._special[name]() if name in self._special else _said(self._word(name))

    def _word(self, name: str) -> str:
        if name in INVENTED and self.rng.random() < 0.35:
            return self._invented(name)
        values = enumerate(_pools()[name])
        return self.rng.choice(
            [one for i, one in values if name in CLOSED or (i % HELD_OUT == HELD_OUT - 1) == self._held_out]
        )

    def _invented(self, name: str) -> str:
        words = [self._syllables().capitalize() for _ in range(1 + (self.rng.random() < 0.4))]
        text = " ".join(words)
        return f"{self.rng.randint(1, 250)} {text} Street" if name == "street" else text

    def _syllables(self) -> str:
        return (
            self.rng.choice(STARTS)
            + (self.rng.choice(STARTS) if self.rng.random() < 0.4 else "")
            + self.rng.choice(ENDS)
        )

    def _decimal(self, low: float, high: float) -> Value:
        number = round(self.rng.uniform(low, high), self.rng.choice((0, 1, 2)))
        plain: float = int(number) if number == int(number) else number
        return Value(str(plain), plain)

    def _code(self) -> Value:
        rng = self.rng
        letters = "".join(rng.choice("ABCDEFGHKLMNPQRSTXYZ") for _ in range(rng.choice((1, 2, 3))))
        return _said(f"{letters}{rng.choice(('-', '-', ''))}{rng.randint(10, 99999)}")

    def _email(self) -> Value:
        return _said(
            f"{self._word('person').split()[0].lower()}@{self._syllables()}.{self.rng.choice(('com', 'org', 'io'))}"
        )

    def _phone(self) -> Value:
        return _said(f"{self.rng.randint(200, 999)}-{self.rng.randint(1000, 9999)}")

    def _expression(self) -> Value:
        rng = self.rng
        parts = [str(rng.randint(2, 999))]
        for _ in range(rng.choice((1, 1, 2))):
            parts += [rng.choice(OPERATORS), str(rng.randint(2, 999))]
        return _said(" ".join(parts))

    def _list(self) -> Value:
        items = self.rng.sample(_pools()["food"], self.rng.choice((2, 3, 3, 4)))
        return Value(", ".join(items[:-1]) + f" and {items[-1]}", items)


def json_type(kind: str) -> dict[str, Any]:
    """Return the JSON schema of the values of a kind, which is named as in `Values.draw`."""
    name, _, options = kind.partition(":")
    if name == "enum":
        return {"type": "string", "enum": options.split(",")}
    if name == "list":
        return {"type": "array", "items": {"type": "string"}}
    return {"type": {"int": "integer", "float": "number"}.get(name, "string")}


@cache
def _pools() -> dict[str, list[str]]:
    """Read values.txt (once) and return the pools from which argument values are drawn: name -> sorted values."""
    lines = Path(__file__).with_name("values.txt").read_text().splitlines()
    entries = [line.partition(" = ") for line in lines if not line.startswith("#")]
    return {name: sorted(values.split("|")) for name, _, values in entries}


def _said(text: str) -> Value:
    return Value(text, text)
