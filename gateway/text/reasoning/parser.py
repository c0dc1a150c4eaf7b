"""Separates the reasoning of an answer from its text: what a model writes between two marks before it answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from types import MappingProxyType
from typing import Literal, NamedTuple, TypeAlias

from gateway.text.marks import MOST_WHITE, before_white, begun_mark
from gateway.text.reasoning import harmony
from gateway.text.reasoning.harmony import HarmonyParser
from gateway.text.reasoning.split import Split

ReasoningParserName = Literal["auto", "harmony", "think", "mistral", "seed", "none"]


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    """The texts that enclose the reasoning of a model."""

    opening: str
    closing: str
    in_channels: bool = False
    """True means that answers are messages in Harmony, gpt-oss's format, so that `HarmonyParser` splits them."""

    @property
    def kept(self) -> tuple[str, ...]:
        """Mark that the detokenizer must keep in an answer's text, so that the parser can split it there."""
        return harmony.MARKS if self.in_channels else (self.opening, self.closing)

    def are_open_in(self, text: str) -> bool:
        """Return whether a text ends within reasoning, so that an answer that continues it begins there."""
        return text.rfind(self.opening) > text.rfind(self.closing)


MARKS: Mapping[str, ReasoningMarks] = MappingProxyType(
    {
        "harmony": ReasoningMarks(
            f"{harmony.CHANNEL}{harmony.ANALYSIS}{harmony.MESSAGE}",
            f"{harmony.END}{harmony.START}{harmony.ASSISTANT}",
            in_channels=True,
        ),
        "think": ReasoningMarks("<think>", "</think>"),
        "mistral": ReasoningMarks("[THINK]", "[/THINK]"),
        "seed": ReasoningMarks("<seed:think>", "</seed:think>"),
    }
)
"""Marks by the value of the setting `reasoning_parser`: those of gpt-oss; of DeepSeek R1, Qwen 3, QwQ and many others;
of Magistral; and of Seed-OSS."""


def choose_marks(name: ReasoningParserName, template: str) -> ReasoningMarks | None:
    """Return the marks that the setting `name` asks for; `auto` finds them in the model's chat template. None means
    that the answers have no reasoning, or that it is part of their text."""
    if name == "auto":
        return next((marks for marks in MARKS.values() if marks.closing in template or marks.opening in template), None)
    return MARKS.get(name)


class Thinking(NamedTuple):
    """Marks of a model's reasoning, and whether the answers to a chat begin inside the reasoning."""

    marks: ReasoningMarks
    begun: bool
    """True means that the prompt ends within reasoning, so that an answer begins with the rest of it. Otherwise the
    model decides by writing the opening mark. In Harmony, True means that the prompt ends within a message of text."""
    calls: bool = False
    """True means that tool calls are read from the text later, so that `HarmonyParser` leaves their marks in it."""

    def parser(self) -> AnswerParser:
        if self.marks.in_channels:
            return HarmonyParser(begun=self.begun, calls=self.calls)
        return ReasoningParser(self.marks, begun=self.begun)


class _Place(Enum):
    START = auto()
    """Before anything but white space and, perhaps, the beginning of the opening mark."""
    INSIDE = auto()
    AFTER = auto()


class ReasoningParser:
    """Splits one answer, which comes in pieces, without white space around the marks (at most `MOST_WHITE` before one).
    Reasoning without an end mark goes on to the end; without the opening mark there is none."""

    def __init__(self, marks: ReasoningMarks, *, begun: bool) -> None:
        """`begun` says that the prompt ends with the opening mark, so that the answer begins with reasoning."""
        self._marks = marks
        self._place = _Place.INSIDE if begun else _Place.START
        self._held = ""
        """Text that may belong to a mark, or that is dropped if a mark follows it."""
        self._clipped = begun
        """True means that white space at the beginning of the next text is dropped, because a mark precedes it."""
        self.num_tokens = 0
        """Number of reasoning tokens so far, with those of the marks that the model wrote."""

    @property
    def kept(self) -> tuple[str, ...]:
        """Mark that the detokenizer must keep in the text from here on: the opening mark, then the closing mark, and
        none after the reasoning."""
        return {_Place.START: (self._marks.opening,), _Place.INSIDE: (self._marks.closing,)}.get(self._place, ())

    @property
    def is_inside(self) -> bool:
        """Return whether reasoning has begun and not ended."""
        return self._place is _Place.INSIDE

    @property
    def ended(self) -> bool:
        """Return whether the rest of the answer is text."""
        return self._place is _Place.AFTER

    def push(self, piece: str, num_tokens: int = 0) -> Split:
        """Split the next piece of the answer, which has `num_tokens` tokens. Text that may turn out to be a mark is
        held back. Until reasoning has `ended`, a piece of several tokens counts as reasoning if it has any."""
        if self._place is _Place.AFTER:
            return Split("", self._clip(piece))
        self.num_tokens += num_tokens
        known, self._held = self._held + piece, ""
        return self._begin(known) if self._place is _Place.START else self._reason(known)

    def flush(self) -> Split:
        """Return what was held back, after the last piece of the answer."""
        held, self._held = self._held, ""
        if self._place is not _Place.START:
            return Split(held.rstrip(), "")
        self.num_tokens = 0
        return Split("", held)

    def _begin(self, known: str) -> Split:
        begin = known.lstrip()
        if begin.startswith(self._marks.opening):
            self._place, self._clipped = _Place.INSIDE, True
            return self._reason(begin[len(self._marks.opening) :])
        if self._marks.opening.startswith(begin) and len(known) - len(begin) <= MOST_WHITE:
            self._held = known
            return Split("", "")
        self._place, self.num_tokens = _Place.AFTER, 0
        return Split("", known)

    def _reason(self, known: str) -> Split:
        reasoning, closing, text = known.partition(self._marks.closing)
        if closing:
            reasoning = self._clip(reasoning).rstrip()
            self._place, self._clipped = _Place.AFTER, True
            return Split(reasoning, self._clip(text))
        shown = before_white(known[: len(known) - begun_mark(known, self._marks.closing)])
        self._held = known[len(shown) :]
        return Split(self._clip(shown), "")

    def _clip(self, text: str) -> str:
        if self._clipped:
            text = text.lstrip()
            self._clipped = not text
        return text


AnswerParser: TypeAlias = ReasoningParser | HarmonyParser
