"""What the engine knows of its draft model: its KV and its guesses for each sequence, and what drafting costs.

A draft model is a small model that guesses the next tokens of sequences, one after the other, for the large one to
verify (speculative decoding, Leviathan et al., ICML 2023). Its KV is in pages of the same pool, of which a sequence
gets some when it is first drafted for. These pages are worth less than any other use of them: they go to whatever else
needs pages, before anything is preempted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple

from engine.core.messages.requests import AdapterHash, PageId
from engine.core.messages.step import Drafted
from engine.core.predict.least_squares import Matrix, non_negative_solution

DRAFT = "draft"
"""Name of the draft model as a proposer, in counts of proposals."""
FIRST_ACCEPTANCE, FIRST_DRAFTED = 0.5, 0.8
"""Initial acceptance, which is the share of proposals that are accepted: of any other proposer, and of the draft model,
which is trained to be right."""
NEWEST_PROPOSAL = 1 / 8
"""Weight of the newest proposal in the moving average of an acceptance, which thus adapts to a repetitive passage
within a few steps."""
NEWEST_SEQUENCE, RETRY, MOST_ADAPTERS = 1 / 4, 1 / 64, 1024
"""Constants of the acceptance that the sequences of an adapter begin with, a moving average: weight of the newest
sequence that has ended, part of the way back to `FIRST_DRAFTED` that it goes with each new sequence, and maximum number
of adapters for which it is kept."""
FORGETTING, FIRST_WORK = 0.95, ((1, 1), (4, 8), (1, 32))
"""Factor by which `DraftCosts` discounts earlier observations with each new one, and the (passes, rows) of the assumed
observations that it begins with."""
RIDGE = 1e-6


def updated(acceptance: float, accepted: int, *, is_refused: bool) -> float:
    """Return the moving average `acceptance`, the share of a proposer's tokens that verification accepts, after
    `accepted` more proposals were accepted and, if `is_refused`, the next one was refused. Proposals after a refused
    one do not count."""
    keep = 1 - NEWEST_PROPOSAL
    acceptance = 1 - (1 - acceptance) * keep**accepted
    return acceptance * keep if is_refused else acceptance


@dataclass(slots=True)
class Drafting:
    """State of the draft model for one sequence: its KV, its guesses, and the share of its proposals that was
    accepted."""

    pages: list[PageId] = field(default_factory=list)
    """Pages of the draft model's KV, which no other sequence shares."""
    num_held: int = 0
    """Number of leading tokens whose KV is in `pages`, including those of `tokens` that the draft model computed."""
    tokens: tuple[int, ...] = ()
    """Guesses of the tokens after the first `num_known` ones."""
    num_known: int = 0
    acceptance: float = FIRST_DRAFTED
    """Share of the draft model's proposals that were accepted, among those whose predecessors were: a moving
    average."""
    is_tried: bool = False
    """True once a step has verified proposals of the draft model for the sequence."""

    def follow(self, known: Sequence[int]) -> None:
        """Compare the draft model's guesses with the sequence's tokens after a step, and discard the guesses. KV of the
        leading guesses that were right stays in use (`num_held`)."""
        new = known[self.num_known : self.num_known + len(self.tokens)]
        right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(new, self.tokens, strict=False)))
        self.num_held = min(self.num_held, self.num_known + right)
        self.tokens, self.num_known = (), len(known)

    def take(self, drafted: Drafted) -> None:
        """Store the guesses and the KV length of a `DraftAsk`'s result. Must be called after `follow`."""
        self.num_held, self.tokens = drafted.num_held, drafted.tokens

    def clear(self) -> list[PageId]:
        """Forget the guesses and the KV of a sequence that the draft model has forgotten, but not the acceptance.
        Returns the pages, which the caller frees."""
        pages, self.pages = self.pages, []
        self.num_held, self.tokens = 0, ()
        return pages


class DraftPrices(NamedTuple):
    """Seconds that drafting takes for each pass over the draft model's weights and each row that passes compute."""

    one_pass: float
    row: float

    def seconds(self, work: tuple[int, int]) -> float:
        """Return the predicted seconds of `work`: (number of passes, number of rows)."""
        return self.one_pass * work[0] + self.row * work[1]


def work_of(sequences: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return (passes, rows) that the draft model computes for sequences, each given as (known tokens to compute, tokens
    to guess). The pass that computes known tokens makes the first guesses."""
    passes = max((max(1, guessed) for _, guessed in sequences), default=0)
    return passes, sum(known + max(0, guessed - 1) for known, guessed in sequences)


class DraftCosts:
    """Learns and predicts the seconds that drafting takes, separately from the step-time model, whose prices it does
    not affect. Both use recursive least squares on relative errors."""

    def __init__(self) -> None:
        self._normal: Matrix = [[0.0] * 2 for _ in range(2)]
        self._right = [0.0] * 2
        self._prices = [0.0] * 2
        self._is_begun = False

    def prices(self, first: DraftPrices) -> DraftPrices:
        """Return the learned prices of drafting, in seconds for each pass of the draft model and each row. The first
        call begins the learning with `first`, as if work of the sizes `FIRST_WORK` had been observed at these prices,
        because later observations of a single size cannot tell the price of a pass from that of a row."""
        if not self._is_begun:
            self._is_begun = True
            for work in FIRST_WORK:
                self._note(work, first.seconds(work))
        one_pass, row = self._prices
        return DraftPrices(one_pass, row)

    def observe(self, drafted: Sequence[Drafted], seconds: float) -> None:
        """Learn the price of drafting from one step, whose drafting took `seconds`."""
        self._note(work_of([(one.num_computed, len(one.tokens)) for one in drafted]), seconds)

    def _note(self, work: tuple[int, int], seconds: float) -> None:
        if seconds <= 0:
            return
        for i, term in enumerate(work):
            self._normal[i] = [
                have * FORGETTING + term * other / seconds**2 for have, other in zip(self._normal[i], work, strict=True)
            ]
            self._right[i] = self._right[i] * FORGETTING + term / seconds
        normal = [list(row) for row in self._normal]
        for i, row in enumerate(normal):
            row[i] += RIDGE * max(one[j] for j, one in enumerate(self._normal))
        self._prices = non_negative_solution(normal, self._right, self._prices)


class DraftRecord:
    """What the engine has learned of its draft model: `costs`, and which share of its proposals is accepted, by
    adapter."""

    def __init__(self) -> None:
        self.costs = DraftCosts()
        self._acceptances: OrderedDict[AdapterHash | None, float] = OrderedDict()

    def begin(self, adapter_hash: AdapterHash | None) -> Drafting:
        """Return the draft model's state for a new sequence, without KV or guesses. Its acceptance is the average of
        earlier sequences with its adapter, which each call moves a little towards `FIRST_DRAFTED`, so that the draft
        model is eventually tried again."""
        return Drafting(acceptance=self._note(adapter_hash, FIRST_DRAFTED, RETRY))

    def end(self, adapter_hash: AdapterHash | None, drafting: Drafting) -> None:
        """Add the acceptance of a sequence that has ended to the average of its adapter, if a step verified proposals
        of the draft model for it."""
        if drafting.is_tried:
            self._note(adapter_hash, drafting.acceptance, NEWEST_SEQUENCE)

    def _note(self, adapter_hash: AdapterHash | None, acceptance: float, weight: float) -> float:
        before = self._acceptances.pop(adapter_hash, FIRST_DRAFTED)
        self._acceptances[adapter_hash] = before + weight * (acceptance - before)
        if len(self._acceptances) > MOST_ADAPTERS:
            self._acceptances.popitem(last=False)
        return self._acceptances[adapter_hash]
