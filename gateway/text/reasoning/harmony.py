"""Separates the channels of an answer in Harmony, the format of gpt-oss (OpenAI, 2025): `analysis` is reasoning,
`final` and `commentary` are text, and a header that names a recipient begins a tool call."""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import Enum, auto

from gateway.text.marks import begun_mark
from gateway.text.reasoning.split import Split

START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN = MARKS = tuple(
    f"<|{name}|>" for name in ("start", "channel", "message", "constrain", "end", "call", "return")
)
"""Marks around messages and in their headers, which are special tokens."""
ASSISTANT, TO, ANALYSIS, FINAL = "assistant", "to=", "analysis", "final"
FINAL_OPENING = f"{CHANNEL}{FINAL}{MESSAGE}"
CALL_OPENING = f"{CHANNEL}commentary to="
"""What a tool call begins with, before the tool's name."""
MOST_HEADER = 256
"""Maximum number of characters of a header."""
LONGEST_MARK = max(map(len, MARKS))
ANY_MARK = re.compile("|".join(map(re.escape, MARKS)))
RECIPIENT = re.compile(r"to=(?:functions\.)?(?P<name>[\w.-]+)")


class _Place(Enum):
    OPEN = auto()
    """At the beginning of the answer, where it is not known yet whether the text continues a header that the prompt
    began or has no header."""
    HEADER = auto()
    BETWEEN = auto()
    """After the end of a message and before the header of the next one."""
    REASONING = auto()
    TEXT = auto()
    CALL = auto()


HEADERS = (_Place.OPEN, _Place.HEADER)
NOTHING = Split("", "")


class HarmonyParser:
    """Splits one answer, which comes in pieces, as `ReasoningParser` does. Marks and headers are dropped, and messages
    of a kind joined by new lines. Tool calls run from `CALL_OPENING` to `CALL`."""

    # Malformed messages become text, also where the model leaves out the header after its reasoning: otherwise the
    # answer would count as reasoning, and callers would wait for it.
    def __init__(self, *, begun: bool, calls: bool) -> None:
        """Initialize the parser.

        Args:
            begun: whether the answer begins within the content of a message, which is text.
            calls: whether tool calls are read from the text. Otherwise their contents are text.
        """
        self._place = _Place.TEXT if begun else _Place.OPEN
        self._calls = calls
        self._held = ""
        """Text that may be the beginning of a mark."""
        self._header = ""
        self._header_tokens = 0
        self._name = ""
        """Name of the tool whose call is open, until its arguments begin; empty otherwise."""
        self._spoken: set[_Place] = set()
        """Kinds of messages that had content."""
        self._apart: set[_Place] = set()
        """Kinds of messages whose next content begins a new line, because content of an earlier message of that kind
        precedes it, or because both together would form a mark."""
        self._tails: dict[_Place, str] = {}
        """Last characters of the content of each kind of message, enough to contain the beginning of any mark."""
        self.num_tokens = 0
        """Number of reasoning tokens so far, including those of the marks and headers of reasoning messages."""

    @property
    def kept(self) -> tuple[str, ...]:
        """Mark that the detokenizer must keep in the text from here on, although they are special tokens."""
        return MARKS

    @property
    def is_inside(self) -> bool:
        """Return whether a message of reasoning has begun and not ended."""
        return self._place is _Place.REASONING

    @property
    def ended(self) -> bool:
        """Return False: another message of reasoning may always follow, so the rest of the answer is never known to be
        text."""
        return False

    def push(self, piece: str, num_tokens: int = 0) -> Split:
        """Split the next piece of the answer, which has `num_tokens` tokens. Text that may turn out to be a mark or a
        header is held back."""
        was_inside, known = self.is_inside, self._held + piece
        begun = max(begun_mark(known, mark) for mark in MARKS)
        known, self._held = known[: len(known) - begun], known[len(known) - begun :]
        shown, at = list[Split](), 0
        for found in ANY_MARK.finditer(known):
            shown += [self._read(known[at : found.start()]), self._mark(found[0])]
            at = found.end()
        shown.append(self._read(known[at:]))
        self._count(num_tokens, was_inside=was_inside)
        return _joined(shown)

    def flush(self) -> Split:
        """Return what was held back, after the last piece of the answer. A header that is cut off is dropped."""
        held, self._held = self._held, ""
        return _joined([self._read(held), self._unopened(), Split("", self._without_arguments())])

    def _count(self, num_tokens: int, *, was_inside: bool) -> None:
        """Add the `num_tokens` of a piece to the count of reasoning tokens if it belongs to reasoning. Tokens of a
        header wait until it is known whether its message is reasoning."""
        self._header_tokens += num_tokens
        if was_inside or self.is_inside:
            self.num_tokens += self._header_tokens
        if was_inside or self._place not in (*HEADERS, _Place.BETWEEN):
            self._header_tokens = 0

    def _mark(self, mark: str) -> Split:
        if mark == MESSAGE and self._place in HEADERS:
            self._begin()
        elif mark in (END, CALL, RETURN):
            return self._end(_Place.BETWEEN)
        elif mark == START or (mark == CHANNEL and self._place not in HEADERS):
            ended, self._header = self._end(_Place.HEADER), mark  # also where a model leaves out the end of a message
            return ended
        elif mark in (CHANNEL, CONSTRAIN) and self._place in HEADERS:
            self._place, self._header = _Place.HEADER, self._header + mark
        else:
            self._part()
        return NOTHING

    def _part(self) -> None:
        """Keep texts around a dropped mark from forming a new one: where a kind's shown content ends with the beginning
        of a mark, its next content begins on a new line."""
        self._apart |= {kind for kind, tail in self._tails.items() if any(begun_mark(tail, mark) for mark in MARKS)}

    def _end(self, following: _Place) -> Split:
        """End the open message, if any, and continue in the state `following`. Return text that is still due: what was
        held back of the message, and the closing mark of a tool call."""
        text = self._unopened().text if following is _Place.BETWEEN else ""
        rest = text + self._without_arguments() + (CALL if self._place is _Place.CALL and self._calls else "")
        if self._place in (_Place.REASONING, _Place.TEXT):
            self._apart = self._spoken.copy()
        self._place, self._header = following, ""
        return Split("", rest)

    def _unopened(self) -> Split:
        """Return as text what was held back at the beginning of the answer because it could have been a header. Return
        nothing if the answer is past its beginning."""
        return self._say(self._header, _Place.TEXT) if self._place is _Place.OPEN else NOTHING

    def _without_arguments(self) -> str:
        """Return the text of a tool call whose header has come but no arguments, with {} in their place; empty if no
        such call is open."""
        name, self._name = self._name, ""
        return f"{CALL_OPENING}functions.{name}{MESSAGE}{{}}" if name and self._calls else ""

    def _begin(self) -> None:
        """Begin the content of a message: its complete header tells whether it is reasoning, text or a tool call."""
        header, self._header = self._header, ""
        recipient, channel = RECIPIENT.search(header), header.partition(CHANNEL)[2].strip()
        self._place = _Place.REASONING if channel.startswith(ANALYSIS) else _Place.TEXT
        if recipient and recipient["name"] != ASSISTANT:
            self._place, self._name = _Place.CALL, recipient["name"]

    def _read(self, text: str) -> Split:
        """Read text without marks, as part of a header or of a message's content, and return what can be shown."""
        if self._place in HEADERS:
            self._header += text
            return NOTHING if self._may_be_header() else self._resume(self._without_role())
        if self._place is _Place.CALL:
            return self._call(text)
        if self._place is _Place.BETWEEN:
            return self._resume(begun) if (begun := text.lstrip()) else NOTHING
        return self._say(text, self._place)

    def _may_be_header(self) -> bool:
        """Return whether the text that was read as a header so far may still become a complete one."""
        if len(self._header) > MOST_HEADER:
            return False
        begun = self._header.lstrip()
        if self._place is _Place.OPEN:
            return any(begun.startswith(word) or word.startswith(begun) for word in (ASSISTANT, TO))
        if CHANNEL in begun or CONSTRAIN in begun:
            return True
        role = begun.removeprefix(START).lstrip()
        if not role.startswith(ASSISTANT):  # some other role, or its beginning
            return True
        rest = role.removeprefix(ASSISTANT).lstrip()
        return rest.startswith(TO) or TO.startswith(rest)

    def _without_role(self) -> str:
        """Return the header without its marks and, if it has begun with the mark of a message, without the role."""
        text = ANY_MARK.sub("", self._header)
        return text.lstrip().removeprefix(ASSISTANT).lstrip() if self._header.startswith(START) else text

    def _resume(self, text: str) -> Split:
        """Show text that turned out to belong to no message as text of the answer, as well as what follows it."""
        self._place, self._header = _Place.TEXT, ""
        self._apart.discard(_Place.TEXT)
        self._part()
        return self._say(text, _Place.TEXT)

    def _call(self, text: str) -> Split:
        """Read the content of a tool call: a JSON object is the call's arguments; any other content is shown as text,
        as all of it is if tool calls are not parsed."""
        if not self._name:
            return Split("", text)
        if not (begun := text.lstrip()):
            return NOTHING
        name, self._name = self._name, ""
        if self._calls and begun.startswith("{"):
            return Split("", f"{CALL_OPENING}functions.{name}{MESSAGE}{begun}")
        self._place = _Place.TEXT
        return self._say(begun, _Place.TEXT)

    def _say(self, text: str, kind: _Place) -> Split:
        if not text:
            return NOTHING
        if kind in self._apart:
            self._apart.discard(kind)
            text = "\n" + text
        self._spoken.add(kind)
        self._tails[kind] = (self._tails.get(kind, "") + text)[-LONGEST_MARK:]
        return Split(text, "") if kind is _Place.REASONING else Split("", text)


def _joined(shown: Sequence[Split]) -> Split:
    return Split("".join(one.reasoning for one in shown), "".join(one.text for one in shown))
