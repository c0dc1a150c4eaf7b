"""Work that may have taken a gateway process with it: what is noted of it, and when it is given up.

A process that dies takes up to a few hundred lines with it, and nothing says which of them it died of. The next process
that claims one of their shards finds that its lease was never handed back: the shard is *suspect*. Its lines are run
one at a time, each while no other line of a batch runs in the process (`gateway.batches.quarantine`), and each is
marked in Redis before it is begun. A mark that is found later belongs to a line that was alone when its process died.
Marked lines are run last, and one with `MOST_MARKS` marks is not run again: it fails as `process_lost`.

The tasks of a batch that run no lines (`gateway.batches.errand`) follow the same rule as a whole: each has a mark of
its own, and a task with `MOST_MARKS` marks is given up by name (`gateway.batches.given_up`).

An engine process that dies is none of this: the request of a line goes on in the next one, and a request that makes
engines crash ends by itself (`gateway.resumption`).

Losses and marks are kept by the fences of the leases they belong to, so that a process that lost a lease and lives can
take back its own: it hands the lease back as soon as Redis answers. A shard that was claimed meanwhile is no longer
suspect then, and the rest of its lines run as others do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

MOST_MARKS = 2
LOST_CODE = "process_lost"
LOST_MESSAGE = (
    f"a gateway process ended unexpectedly {MOST_MARKS} times while it ran this line as its only suspect, so the line "
    "is not tried again"
)


@dataclass(frozen=True, slots=True)
class Suspicion:
    """What Redis knows of a line or a task when it is about to be tried."""

    losses: int
    """How many processes may have died of the task."""
    marks: int
    """How many processes ended while they ran the line, or the task, as their only suspect."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What Redis knows of a task and its lines when it is claimed."""

    losses: int
    """How many processes may have died of the task."""
    marks: Mapping[int, int]
    """Marks of the batch's lines by position."""

    @classmethod
    def read(cls, fields: Mapping[bytes, bytes], task: str) -> Trial:
        """Read the fields of a batch in Redis."""
        marks = {name[5:]: len(value.split()) for name, value in fields.items() if name.startswith(b"mark:")}
        lines = {int(name): count for name, count in marks.items() if name.isdigit()}
        return cls(len(fields.get(f"lost:{task}".encode(), b"").split()), lines)
