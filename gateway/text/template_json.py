"""Writes JSON for chat templates without keeping Python's lock for long: a document of more than LARGE values in
several calls, because the standard library takes 25 ms for 7 MB in one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from gateway.core.json_bounds import CHARACTERS_PER_VALUE, has_more_values

LARGE = 256
"""Maximum number of values of a document that is written in one call, counted as in `has_more_values`. It takes a
millisecond."""
PIECE = LARGE * CHARACTERS_PER_VALUE
"""Characters of a long text that are written in one call."""


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return a document as JSON. This is the filter `tojson` of chat templates, with the options that transformers
    gives it."""
    writer = _Writer(ensure_ascii, indent, separators, sort_keys)
    return "".join(writer.pieces(value, "\n"))


class _Writer:
    """Writes the documents of one call of `to_json`."""

    def __init__(
        self, ensure_ascii: bool, indent: int | str | None, separators: tuple[str, str] | None, sort_keys: bool
    ) -> None:
        self._options: dict[str, Any] = {
            "ensure_ascii": ensure_ascii,
            "indent": indent,
            "separators": separators,
            "sort_keys": sort_keys,
        }
        self._comma, self._colon = separators or (", " if indent is None else ",", ": ")
        self._step = " " * indent if isinstance(indent, int) else indent
        """What one more level is indented by. None means that all is in one line."""

    def pieces(self, value: Any, line: str) -> Iterator[str]:
        """Yield the JSON of a value in pieces. `line` is what begins a line at its level."""
        if not has_more_values((value,), LARGE):
            text = json.dumps(value, **self._options)
            yield text if self._step is None else text.replace("\n", line)
        elif isinstance(value, str):
            yield from self._text(value)
        elif isinstance(value, dict):
            yield from self._members(value, line)
        else:
            yield from self._joined("[]", (self.pieces(one, self._within(line)) for one in value), line)

    def _members(self, value: dict[Any, Any], line: str) -> Iterator[str]:
        items = sorted(value.items()) if self._options["sort_keys"] else value.items()
        within = self._within(line)
        return self._joined("{}", (self._member(key, one, within) for key, one in items), line)

    def _member(self, key: Any, value: Any, line: str) -> Iterator[str]:
        yield from self._text(key if isinstance(key, str) else _name(key))
        yield self._colon
        yield from self.pieces(value, line)

    def _joined(self, brackets: str, members: Iterator[Iterator[str]], line: str) -> Iterator[str]:
        """Yield a list or an object that has members."""
        within, before = self._within(line), brackets[0]
        for member in members:
            yield before if self._step is None else before + within
            yield from member
            before = self._comma
        yield brackets[1] if self._step is None else line + brackets[1]

    def _text(self, text: str) -> Iterator[str]:
        yield '"'
        for start in range(0, len(text), PIECE):
            yield json.dumps(text[start : start + PIECE], ensure_ascii=self._options["ensure_ascii"])[1:-1]
        yield '"'

    def _within(self, line: str) -> str:
        return line + (self._step or "")


def _name(key: Any) -> str:
    """Return the name of a member whose key is no text. Raises TypeError if the key cannot be one's."""
    [name] = json.loads(json.dumps({key: None}))
    return str(name)
