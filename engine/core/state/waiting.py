"""The waiting queue: by lane and party, with each party's requests in an order that does not change while they wait.
As the urgency of all requests grows at the same rate, an order by arrival time, in which a priority level is worth a
fixed number of seconds, includes aging and never has to be sorted again."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from operator import attrgetter

from engine.core.messages.requests import Lane, LaneMode, tenant_of
from engine.core.state.sequence import Sequence

Key = tuple[float | str, ...]


@dataclass(frozen=True, slots=True)
class Order:
    """Functions that determine the place of a waiting sequence in a `WaitingQueue`.

    Attributes:
        lane: returns the lane in which the sequence waits.
        group: returns the name of its queue within the lane; the policy chooses between the queues of a lane.
        key: returns the sort key within that queue; the lowest is served first.
    """

    lane: Callable[[Sequence], Lane]
    group: Callable[[Sequence], str]
    key: Callable[[Sequence], Key]


def lanes_order(priority_s: float) -> Order:
    """Return the order of the engine's own policy, which has a queue for each lane and party (see
    fairness/accounts.py)."""
    return Order(attrgetter("request.lane"), attrgetter("request.party"), partial(lanes_key, priority_s=priority_s))


def lanes_key(seq: Sequence, priority_s: float) -> Key:
    """Return the sort key of the lanes policy within a party's queue. Sequences that were preempted, and those whose
    answer began in another engine, come first. Both groups are sorted by arrival time plus `priority_s` seconds per
    level of priority, so that a lower value of priority is served sooner."""
    request = seq.request
    has_begun = seq.preempted.times > 0 or bool(request.produced)
    return (float(not has_begun), request.arrival + request.priority * priority_s, seq.id)


class WaitingQueue:
    """Waiting sequences by lane and group (the party, or one group for all), with running totals of tokens. Only
    `commit/` changes it."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.lanes: dict[Lane, dict[str, list[Sequence]]] = {lane: {} for lane in Lane}
        """Sequences by lane and group, in order. Groups without sequences are removed."""
        self.urgent: list[Sequence] = []
        """Waiting batch sequences that have a deadline, the earliest deadline first."""
        self.num_tokens = dict.fromkeys(Lane, 0)
        """Number of known tokens (prompt and answer so far) of the waiting sequences, by lane."""
        self.num_outputs = dict.fromkeys(Lane, 0)
        """Predicted number of tokens that waiting sequences will still generate, by lane."""
        self.modes = dict.fromkeys(Lane, LaneMode.OPEN)
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
        self.num_outputs[seq.lane] += sign * max(0, seq.expected_length - seq.num_tokens)
        self.num_tokens[seq.lane] += sign * seq.num_tokens

    def last(self, above: Lane) -> Sequence | None:
        """Return the waiting sequence that must be refused so that a request of lane `above` finds a place in a full
        queue: in the lowest lane below `above` that has waiting sequences, of the tenant that has most of them there,
        the last one of its longest queue. None means that no lower lane has any. Nothing is removed."""
        for lane in sorted(Lane, reverse=True):
            if lane > above and self.lanes[lane]:
                counts: Counter[str] = Counter()
                for group, queue in self.lanes[lane].items():
                    counts[tenant_of(group)] += len(queue)
                _, longest = max(self.lanes[lane].items(), key=lambda item: (counts[tenant_of(item[0])], len(item[1])))
                return longest[-1]
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
