"""The waiting queue: by lane, by tenant, each tenant's requests in an order that does not change while they wait.

Waiting makes everybody's claim grow alike, so an order by arrival with priorities worth so many seconds ages by itself
and never has to be sorted again.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from engine.core.config import Scheduling
from engine.core.sequence import Sequence
from engine.core.types import Lane

Key = tuple[float | str, ...]


@dataclass(frozen=True, slots=True)
class Order:
    """Where a sequence waits.

    Attributes:
        lane: in which lane.
        group: with whom it shares a queue; between groups a policy chooses.
        key: its place in that queue.
    """

    lane: Callable[[Sequence], Lane]
    group: Callable[[Sequence], str]
    key: Callable[[Sequence], Key]


def order_of(scheduling: Scheduling) -> Order:
    """The order each policy keeps its waiting sequences in."""
    if scheduling.policy == "lanes":
        seconds = scheduling.priority_s
        return Order(lambda seq: seq.request.lane, lambda seq: seq.request.tenant, lambda seq: lanes_key(seq, seconds))
    keys = {"fcfs": fcfs_key, "sjf": sjf_key, "priority": priority_key}
    return Order(lambda seq: Lane.INTERACTIVE, lambda seq: "", keys[scheduling.policy])


def lanes_key(seq: Sequence, priority_s: float) -> Key:
    """The preempted first, then by arrival; a step of priority is worth `priority_s` seconds of it."""
    request = seq.request
    return (float(seq.num_preemptions == 0), request.arrival + request.priority * priority_s, seq.id)


def fcfs_key(seq: Sequence) -> Key:
    return (seq.request.arrival, seq.id)


def sjf_key(seq: Sequence) -> Key:
    """Shortest job first, by the tokens that it may cost or, under a ceiling, probably costs."""
    return (float(seq.expected_length), seq.request.arrival, seq.id)


def priority_key(seq: Sequence) -> Key:
    """Lane, then priority (lower is sooner), then arrival, as servers with a priority flag do."""
    return (float(seq.request.lane), float(seq.request.priority), seq.request.arrival, seq.id)


class WaitingQueue:
    """`commit.py` is its only writer."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.lanes: dict[Lane, dict[str, list[Sequence]]] = {lane: {} for lane in Lane}
        """Lane -> group -> its sequences in order; groups without any are not there."""
        self.urgent: list[Sequence] = []
        """Batch sequences that have a deadline, the earliest first."""
        self.num_tokens = dict.fromkeys(Lane, 0)
        """Of a lane's waiting sequences."""
        self.num_outputs = dict.fromkeys(Lane, 0)
        """Tokens that those which asked for a maximum may still generate."""
        self.num_expected = dict.fromkeys(Lane, 0)
        """Tokens that those whose maximum is only a ceiling will probably still generate."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Sequence]:
        for groups in self.lanes.values():
            for queue in groups.values():
                yield from queue

    def groups(self, lane: Lane) -> Mapping[str, list[Sequence]]:
        return self.lanes[lane]

    def count(self, lane: Lane) -> int:
        return sum(map(len, self.lanes[lane].values()))

    def add(self, seq: Sequence) -> None:
        insort(self.lanes[seq.lane].setdefault(self.order.group(seq), []), seq, key=self.order.key)
        if _is_urgent(seq):
            insort(self.urgent, seq, key=_deadline_key)
        self._count_in(seq, 1)

    def remove(self, seq: Sequence) -> None:
        groups, group = self.lanes[seq.lane], self.order.group(seq)
        _take_out(groups[group], seq, self.order.key)
        if not groups[group]:
            del groups[group]
        if _is_urgent(seq):
            _take_out(self.urgent, seq, _deadline_key)
        self._count_in(seq, -1)

    def _count_in(self, seq: Sequence, sign: int) -> None:
        self._count += sign
        outputs = self.num_outputs if seq.request.expected_tokens is None else self.num_expected
        outputs[seq.lane] += sign * max(0, seq.expected_length - seq.num_tokens)
        self.num_tokens[seq.lane] += sign * seq.num_tokens

    def last(self, above: Lane) -> Sequence | None:
        """Who gives up a place for a request of lane `above`: the last of the longest queue of a lower lane."""
        for lane in sorted(Lane, reverse=True):
            if lane > above and self.lanes[lane]:
                return max(self.lanes[lane].values(), key=len)[-1]
        return None


def _is_urgent(seq: Sequence) -> bool:
    return seq.request.deadline is not None and seq.lane is not Lane.INTERACTIVE


def _deadline_key(seq: Sequence) -> Key:
    return (seq.request.deadline or 0.0, seq.id)


def _take_out(queue: list[Sequence], seq: Sequence, key: Callable[[Sequence], Key]) -> None:
    place = bisect_left(queue, key(seq), key=key)
    if queue[place] is not seq:
        raise LookupError(f"{seq.id} does not wait where its order says")
    del queue[place]
