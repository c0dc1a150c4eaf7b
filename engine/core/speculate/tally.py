"""Counts of the tokens that speculation proposed for one request, and of those that were accepted, by proposer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain

from engine.core.messages.requests import ProposalCount


def sum_proposals(*counts: Sequence[ProposalCount]) -> tuple[ProposalCount, ...]:
    """Add up counts of proposed and accepted tokens (speculation) by proposer, such as the counts that several engine
    processes have made for one request."""
    proposed, accepted = Counter[str](), Counter[str]()
    for one in chain.from_iterable(counts):
        proposed[one.proposer] += one.proposed
        accepted[one.proposer] += one.accepted
    return tuple(ProposalCount(name, count, accepted[name]) for name, count in proposed.items())


class ProposalTally:
    """Counts, by proposer, the tokens that speculation proposed for a request, and those that became part of its
    answer, which excludes accepted tokens after a stop token."""

    __slots__ = ("_accepted", "_proposed", "_under_way", "counts")

    def __init__(self) -> None:
        self._proposed: dict[str, int] = {}
        self._accepted: dict[str, int] = {}
        self._under_way: Sequence[str] = ()
        """Proposers of the step's proposals that were not accepted yet, in order."""
        self.counts: tuple[ProposalCount, ...] = ()

    def propose(self, sources: Sequence[str]) -> None:
        """Count the proposed tokens of a step whose result has come. `sources` has the name of the proposer of each of
        them, in order."""
        self._under_way = sources
        for source in sources:
            self._proposed[source] = self._proposed.get(source, 0) + 1
        self._update()

    def accept(self) -> None:
        """Count one more token of the last step's proposals, the next in order, as accepted."""
        source, self._under_way = self._under_way[0], self._under_way[1:]
        self._accepted[source] = self._accepted.get(source, 0) + 1
        self._update()

    def _update(self) -> None:
        self.counts = tuple(
            ProposalCount(source, proposed, self._accepted.get(source, 0))
            for source, proposed in self._proposed.items()
        )
