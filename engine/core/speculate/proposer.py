"""Proposers guess the next tokens of a sequence, so that one step can verify several of them."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, Protocol

from engine.core.messages.requests import Request
from engine.core.speculate.follower import Follower

LONGEST_MATCH = 4
"""Maximum number of a sequence's last tokens that a lookup compares with an earlier place; the shortest match has 2. A
longer match would be a little more reliable, but the measured acceptance tells the same."""
FOLLOWED_FROM = LONGEST_MATCH
"""Number of the answer's last tokens that must match at a place for the answer to be followed from there (see
speculate/follower.py). With 3, wrong places are followed, too: an answer in which a name is changed had 3.7 tokens a
step in place of 4.8."""
MOST_CANDIDATES = 8
"""Maximum number of earlier places that one lookup compares, the latest first, so that its time is bounded."""
MOST_REMEMBERED = 4096
"""Maximum number of tokens of one `AnswerMemory`: some 1 MB, and dozens of answers in JSON."""
LONGEST_REMEMBERED = 1024
"""Maximum number of tokens of an answer that are remembered, its first ones: to take note of them takes 0.3 ms."""
MOST_MEMORIES = 64


PROMPT, ANSWERS = "prompt", "answers"
"""Names of the sources of `PromptLookup`, in counts of proposals: the request's own tokens, and earlier answers."""


class Guess(NamedTuple):
    """Proposed tokens, and the name of their proposer; no tokens if there is no guess."""

    tokens: tuple[int, ...] = ()
    proposer: str = ""


class Proposer(Protocol):
    """Guesses the tokens that follow a sequence, so that one step can verify several of them (speculation). It belongs
    to one request, whose tokens are only ever appended to."""

    def learn(self, tokens: Sequence[int], most: int) -> None:
        """Take note of at most `most` of the request's `tokens` that are new since the last call."""

    def propose(self, tokens: Sequence[int], most: int) -> Guess:
        """Return at most `most` tokens that may follow `tokens`, whose last ones may not have been passed to `learn`
        yet. This changes nothing."""

    def end(self, tokens: Sequence[int]) -> None:
        """Take note that the request ended with these tokens (prompt and answer), which may serve later requests."""


class PairChains:
    """Index of a text that finds where the last tokens of a sequence occurred in it. For every pair of adjacent tokens,
    it keeps a chain of the places after the pair, the latest first, as LZ77 coders do: about 150 bytes for each
    distinct pair."""

    def __init__(self) -> None:
        self._latest: dict[int, int] = {}
        """Pair of adjacent tokens, packed into one number -> position of the known token after its latest
        occurrence."""
        self._earlier = array("I", (0, 0))
        """For each position in the text, the previous position that follows the same pair of tokens; 0 means none."""

    @property
    def length(self) -> int:
        """Number of leading tokens of the text that the index covers; 2 before anything was indexed."""
        return len(self._earlier)

    def learn(self, text: Sequence[int], end: int) -> None:
        """Index the positions of `text` that no earlier call has indexed, up to but without `end`."""
        latest, earlier = self._latest, self._earlier
        for place in range(len(earlier), min(len(text), end)):
            pair = text[place - 2] << 32 | text[place - 1]
            earlier.append(latest.get(pair, 0))
            latest[pair] = place

    def find(self, text: Sequence[int], tokens: Sequence[int]) -> tuple[int, int]:
        """Find the last of `tokens` in `text`, the indexed text. Return the position after the longest match (the
        latest among equals) and the match's length in tokens; (0, 0) means that there is none."""
        if len(tokens) < 2:
            return 0, 0
        place = self._latest.get(tokens[-2] << 32 | tokens[-1], 0)
        best = longest = 0
        for _ in range(MOST_CANDIDATES):
            if not place or longest == LONGEST_MATCH:
                break
            length, most = 2, min(LONGEST_MATCH, place, len(tokens))
            while length < most and text[place - 1 - length] == tokens[-1 - length]:
                length += 1
            if length > longest:
                best, longest = place, length
            place = self._earlier[place]
        return best, longest


class AnswerMemory:
    """Index of the latest answers that followed one grammar, in which `PromptLookup` finds proposals for the next
    answer. Such answers share the grammar's structure, down to white space, which a grammar seldom forces."""

    def __init__(self) -> None:
        self.text: list[int] = []
        self._chains = PairChains()

    def add(self, tokens: Sequence[int]) -> None:
        """Remember the end of a prompt and the beginning of its answer: `tokens` are the prompt's last two tokens and
        the answer, and the first `LONGEST_REMEMBERED` of them are kept. All earlier answers are forgotten if these do
        not fit beside them."""
        tokens = tokens[:LONGEST_REMEMBERED]
        if len(self.text) + len(tokens) > MOST_REMEMBERED:
            self.text, self._chains = [], PairChains()
        self.text += tokens
        self._chains.learn(self.text, len(self.text))

    def find(self, tokens: Sequence[int]) -> tuple[int, int]:
        """Look for the last of `tokens` in the remembered answers. Return the position in `text`, which holds these
        answers, after the longest match, and the match's length in tokens (see `PairChains.find`)."""
        return self._chains.find(self.text, tokens)


class AnswerMemories:
    """Keeps an `AnswerMemory` for each of the `MOST_MEMORIES` kinds of answers that were used last. Answers of a kind
    have the same tenant, cache salt, adapter and grammar: proposals change how fast answers come, which must not tell
    one caller of another's."""

    def __init__(self) -> None:
        self._memories: OrderedDict[tuple[object, ...], AnswerMemory] = OrderedDict()

    def of(self, request: Request) -> AnswerMemory | None:
        """Return the memory of earlier answers of a request's kind (the same tenant, cache salt, adapter and grammar).
        It is created if need be. None means that the request has no grammar."""
        grammar = request.params.grammar
        if grammar is None:
            return None
        key = (request.tenant, request.cache_salt, request.adapter_hash, grammar)
        memory = self._memories.setdefault(key, AnswerMemory())
        self._memories.move_to_end(key)
        if len(self._memories) > MOST_MEMORIES:
            self._memories.popitem(last=False)
        return memory


def repeated(tokens: Sequence[int], period: int, length: int) -> tuple[int, ...]:
    """Return `tokens`, extended to `length` by tokens that each equal the one `period` places before. There must be at
    least `period` or `length` of them."""
    found = list(tokens)
    while len(found) < length:
        found.append(found[len(found) - period])
    return tuple(found)


class PromptLookup:
    """A `Proposer` that finds the last tokens of a sequence in its prompt and answer, and proposes what followed there
    (prompt lookup decoding, Saxena 2023). Extractions, edits of code and summaries repeat their prompts. A place after
    four tokens is followed from there on, past tokens that differ (see speculate/follower.py), unless another match is
    longer. If a longer match is in `answers`, it proposes what followed there."""

    def __init__(self, num_prompt: int = 0, answers: AnswerMemory | None = None) -> None:
        """`num_prompt` is the length of the prompt, after which the answer begins. `answers` are earlier answers that
        are searched, too; None means that only the request's own tokens are."""
        self._num_prompt = num_prompt
        self._answers = answers
        self._chains = PairChains()
        self._follower = Follower(FOLLOWED_FROM, is_lost=True)
        self._seen = num_prompt
        """Number of the request's leading tokens that the follower has processed, including those of the prompt, which
        need not be followed."""

    def learn(self, tokens: Sequence[int], most: int) -> None:
        """Add at most `most` new tokens of the request to the index in which `propose` looks for matches. Tokens of the
        answer are added one by one, and each is also followed through the prompt and the answer so far (see
        speculate/follower.py)."""
        find = partial(self._place_after, tokens)
        end = min(len(tokens), self._chains.length + most)
        self._chains.learn(tokens, min(end, self._num_prompt))
        for number in range(self._seen, end):
            self._chains.learn(tokens, number)
            self._follower.follow(tokens, tokens, number, find)
            self._seen = number + 1
        self._chains.learn(tokens, end)

    def _place_after(self, tokens: Sequence[int], last: Sequence[int]) -> int:
        """Return the position in `tokens` after the latest earlier occurrence of all of `last`, from which the follower
        goes on; 0 means that there is none."""
        place, length = self._chains.find(tokens, last)
        return place if length == FOLLOWED_FROM else 0

    def propose(self, tokens: Sequence[int], most: int) -> Guess:
        """Guess the next tokens: those after the longest earlier match of the last of `tokens`, in `tokens` themselves
        or in the remembered answers. If they reach the end of `tokens`, the guess goes on periodically, as in a text
        that repeats itself."""
        place, length = self._chains.find(tokens, tokens)
        unseen = tokens[self._seen :]
        found = self._follower.expected(tokens, unseen, most)
        if found and self._follower.run + len(unseen) >= length:
            place, length = self._follower.place + len(unseen), self._follower.run + len(unseen)
        else:
            found = tuple(tokens[place : place + most]) if place else ()
        if self._answers is not None and length < LONGEST_MATCH:
            other, its_length = self._answers.find(tokens)
            if its_length > length:
                return Guess(tuple(self._answers.text[other : other + most]), ANSWERS)
        return Guess(repeated(found, len(tokens) - place, most), PROMPT) if found else Guess()

    def end(self, tokens: Sequence[int]) -> None:
        if self._answers is not None and len(tokens) > self._num_prompt:
            self._answers.add(tokens[max(0, self._num_prompt - 2) :])
