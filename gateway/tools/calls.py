"""A call of a tool, read from a JSON object with its name and arguments while that is written."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass

from gateway.tools.members import ObjectReader, Piece

ARGUMENTS = ("arguments", "parameters")


@dataclass(frozen=True, slots=True)
class Call:
    """Some news of a call. The first has its name; the arguments of all together are a JSON text."""

    index: int
    """Calls of an answer are counted from 0."""
    name: str = ""
    arguments: str = ""


class CallReader:
    """Nothing is told of a call before its name is known, whichever order its members come in."""

    def __init__(self, index: int, names: Collection[str] | None = None) -> None:
        """`names`: those of tools; any other name makes an object no call. None: every name will do."""
        self._object = ObjectReader()
        self.index = index
        self._names = names
        self._name: list[str] = []
        self._key = ""
        """The member that holds the arguments, once it has been met."""
        self._quoted = False
        """The arguments are written as a text, and told as what it says."""
        self._untold: list[str] = []
        self._refused = False
        self.begun = False
        """Its name is known, and told."""

    @property
    def ended(self) -> bool:
        return self._object.ended

    @property
    def broken(self) -> bool:
        """This is no call, or, if it has `begun`, not a whole one."""
        return self._refused or self._object.broken or (self.ended and not self.begun)

    def push(self, text: str) -> tuple[list[Call], int]:
        """News, and how many characters they took: all, unless it has `ended` or is `broken`."""
        pieces, used = self._object.push(text)
        news = [call for piece in pieces for call in self._member(piece)]
        if self.ended and self.begun and not self._key:
            news.append(Call(self.index, arguments="{}"))
        return news, used

    def _member(self, piece: Piece) -> list[Call]:
        if piece.key == "name" and not self.begun:
            return self._named(piece)
        return self._argued(piece) if piece.key in ARGUMENTS else []

    def _named(self, piece: Piece) -> list[Call]:
        self._name.append(piece.text)
        if not piece.last:
            return []
        name = _said("".join(self._name))
        self._refused = not name or (self._names is not None and name not in self._names)
        if self._refused:
            return []
        self.begun = True
        return [Call(self.index, name), *self._tell()]

    def _argued(self, piece: Piece) -> list[Call]:
        if not self._key:
            self._key, self._quoted = piece.key, piece.text.startswith('"')
        if piece.key != self._key:
            return []
        self._untold.append(piece.text)
        return self._tell() if self.begun and (piece.last or not self._quoted) else []

    def _tell(self) -> list[Call]:
        text = "".join(self._untold)
        self._untold.clear()
        if not text:
            return []
        return [Call(self.index, arguments=_said(text) if self._quoted else text)]


def _said(written: str) -> str:
    """What a JSON text says; nothing if it is none. Half of a surrogate pair, which JSON can spell, is no character."""
    try:
        text = json.loads(written)
    except ValueError:
        return ""
    return text.encode("utf-8", "replace").decode() if isinstance(text, str) else ""
