"""Format of tool calls in a dialect, from which a grammar is made that restricts answers to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.grammar_check.source import MAX_CHARACTERS, inline_schema
from gateway.text.reasoning.grammar import TokenOf, marked_terms

Json = Mapping[str, Any]


@dataclass(slots=True)
class Rules:
    """Rules of a grammar in Lark notation, which grows while the formats of tool calls are written."""

    marks: Sequence[str]
    """Marks for which the model may have tokens of their own."""
    token_of: TokenOf
    """Returns the id of the model's token for a mark, if it has one."""
    lines: list[str] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)
    """Names of the rules that `once` has added, by key."""
    size: int = 0
    """Number of characters of all lines."""

    def add(self, expression: str, *, terminal: bool = False) -> str:
        """Add a rule and return its name. A terminal is matched as one regular expression. Raises ValueError if the
        grammar becomes longer than any that is accepted."""
        name = f"{'T' if terminal else 't'}_{len(self.lines)}"
        self._append(name, expression)
        return name

    def once(self, key: str, expression: Callable[[], str], *, terminal: bool = False) -> str:
        """Return the name of the rule added under `key`, adding it first, if there is none, with what `expression`
        returns, which may call `once` for the same key. Raises ValueError as `add` does."""
        if key not in self.names:
            self.names[key] = name = f"{'N' if terminal else 'n'}_{len(self.names)}"
            self._append(name, expression())
        return self.names[key]

    def _append(self, name: str, expression: str) -> None:
        self.lines.append(f"{name}: {expression}")
        self.size += len(self.lines[-1])
        if self.size > MAX_CHARACTERS:
            raise ValueError(f"its grammar has more than {MAX_CHARACTERS} characters")

    def text(self, text: str) -> str:
        """Return the grammar terms for a text: each mark in it is the model's token for that mark, if there is one."""
        return marked_terms(text, self.marks, self.token_of)


Body = Callable[[str, Json, Rules], str]
"""Function that returns the grammar expression for a call of the tool with this name, whose arguments must follow this
JSON schema. The marks around the call are not included. Raises ValueError if the dialect cannot express the schema."""


@dataclass(frozen=True, slots=True)
class CallFrame:
    """Format of the tool calls of an answer. They stand in sections, with `gap` between two of them. A section consists
    of `mark`, `opening`, its calls with `separator` between two of them, and `end`."""

    body: Body
    mark: str = ""
    """Mark at the beginning of each section, anywhere in the text. Empty means that the one section must be the whole
    answer."""
    opening: str = ""
    separator: str | None = None
    """None means that each section has one call."""
    end: str = ""
    gap: str | None = None
    """None means that an answer has one section."""
    answer_opening: str = ""
    """Text that an answer without calls begins with. If it is not empty, an answer is either such text or calls."""
    marks: Sequence[str] = ()
    """All marks that occur in the texts of this format and in calls that `body` describes."""
    text: str = ""
    """Regular expression of a text that is not parsed as tool calls, if `mark` is empty."""


def json_body(before: str, between: str, after: str = "") -> Body:
    """Return the `Body` of calls that are written as `before`, the tool's name, `between`, the arguments in JSON, and
    `after`."""

    def body(name: str, schema: Json, rules: Rules) -> str:
        return f"{rules.text(before + name + between)} {inline_schema(schema)} {rules.text(after)}"

    return body
