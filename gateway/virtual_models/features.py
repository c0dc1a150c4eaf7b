"""Cheap features of a request's text, from which a learned router predicts whether a small member suffices."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from msgspec import Struct

MOST_CHARACTERS = 8_192
"""Maximum number of characters whose kinds are counted, from the end of the question. Counting them takes a quarter of
a millisecond."""

SCRIPTS = ("latin", "greek_cyrillic", "hebrew_arabic", "indic", "east_asian")
"""Groups of scripts whose shares are features. Letters outside of them count for none."""
_BOUNDS = np.array([0x0370, 0x0590, 0x0900, 0x0E00, 0x2E80, 0x1F000], dtype=np.uint32)
"""Code points that divide Unicode into the ranges of `_GROUPS`; each begins a range. Between 0x0E00 and 0x2E80 are
punctuation and other scripts."""
_GROUPS = np.array([0, 1, 2, 3, 5, 4, 5])
"""Index into SCRIPTS of each range between `_BOUNDS`, the first below all of them and the last above; 5 means no
group."""

_DIGITS, _UPPER, _OPERATORS, _BRACKETS, _QUOTES, _SPACES = (1 << bit for bit in range(6))
_KINDS = {
    _DIGITS: "0123456789",
    _UPPER: "ABCDEFGHIJKLMNOPQRSTUVWXYZ",
    _OPERATORS: "+-*/=<>^%",
    _BRACKETS: "()[]{}",
    _QUOTES: "\"'`",
    _SPACES: " \t\r\n",
}
_KIND_OF = np.zeros(129, dtype=np.uint8)
"""Look-up table from an ASCII code to the bit of the character's kind (digit, upper case, operator, bracket, quote,
space), 0 for none; the last element stands for all other characters."""
for _kind, _characters in _KINDS.items():
    _KIND_OF[[ord(character) for character in _characters]] = _kind

NAMES = (
    "log_characters", "log_question_characters", "log_words", "log_lines", "log_turns",
    "log_digits", "log_longest_number", "log_numbers", "log_operators", "log_brackets", "log_quotes",
    "upper_share", "mean_word", "questions", "code",
    *(f"{script}_share" for script in SCRIPTS), "system", "tools", "log_tools", "schema",
)  # fmt: skip
"""Names of the features, in order. A feature whose meaning changes needs a new name, because router files store these
names."""

Features = npt.NDArray[np.float64]


class PromptFacts(Struct, frozen=True):
    """What text features need to know of a request."""

    texts: Sequence[str]
    """Texts of the messages in order, or of the prompt alone."""
    question: str
    """Text of the last message of the user, or the prompt."""
    system: bool = False
    """True means that there is a system message."""
    tools: int = 0
    """Number of offered tools."""
    schema: bool = False
    """True means that the answer must follow a grammar, such as a JSON schema."""


def text_features(facts: PromptFacts) -> Features:
    """Return the features in the order of NAMES, float64 [len(NAMES)]. Counts are logarithms of one plus the count, and
    shares are of the question's characters."""
    question = facts.question[-MOST_CHARACTERS:]
    points = np.frombuffer(question.encode("utf-32-le", "replace"), dtype="<u4")
    kinds = _KIND_OF[np.minimum(points, 128)]
    is_digit, is_space = (kinds & _DIGITS) != 0, (kinds & _SPACES) != 0
    starts = _starts(~is_space)
    words = len(starts)
    letters = max(1, len(points) - int(is_space.sum()))
    number_lengths = _run_lengths(is_digit)
    counts = [
        sum(map(len, facts.texts)), len(facts.question), words, question.count("\n"), len(facts.texts),
        is_digit.sum(), number_lengths.max(initial=0), len(number_lengths),
        *(((kinds & kind) != 0).sum() for kind in (_OPERATORS, _BRACKETS, _QUOTES)),
    ]  # fmt: skip
    shares = [((kinds & _UPPER) != 0).sum() / letters, letters / max(1, words)]
    marks = [question.count("?"), "```" in question]
    rest = [facts.system, facts.tools > 0, np.log1p(facts.tools), facts.schema]
    scripts = _script_shares(points[~(is_space | is_digit)])
    return np.array([*np.log1p(counts), *shares, *marks, *scripts, *rest], dtype=np.float64)


def _script_shares(points: npt.NDArray[np.uint32]) -> npt.NDArray[np.float64]:
    """Return the share of each of SCRIPTS among code points."""
    groups = _GROUPS[np.searchsorted(_BOUNDS, points, side="right")]
    return np.bincount(groups, minlength=6)[: len(SCRIPTS)] / max(1, len(points))


def _starts(mask: npt.NDArray[np.bool_]) -> npt.NDArray[np.intp]:
    """Return the positions at which runs of True begin."""
    return np.flatnonzero(np.diff(mask.astype(np.int8), prepend=np.int8(0)) == 1)


def _run_lengths(mask: npt.NDArray[np.bool_]) -> npt.NDArray[np.intp]:
    """Return the length of each run of True."""
    ends = np.flatnonzero(np.diff(mask.astype(np.int8), append=np.int8(0)) == -1) + 1
    return ends - _starts(mask)
