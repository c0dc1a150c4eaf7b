"""Records about work that may have killed a gateway process, and the rule for giving it up.

A process that dies takes up to a few hundred lines with it, and nothing says which of them killed it. The next process
that claims one of their shards finds that its lease was never released: the shard is *suspect*. Its lines run one at a
time, each while no other line of a batch runs in the process (`gateway.batches.quarantine`), and each is marked in
Redis before it begins. A mark that is found later belongs to a line that ran alone when its process died. Marked lines
run last, and one with `MOST_MARKS` marks is not run again: it fails as `process_lost`.

The tasks of a batch that run no lines (`gateway.batches.tasks`) follow the same rule as a whole: each has a mark of
its own, and a task with `MOST_MARKS` marks is given up. A validation, which runs in a process of its own, is tried
beside ordinary work, but beside no other suspect.

This does not cover the death of an engine process: the request of a line goes on in the next engine, and a request that
makes engines crash ends by itself (`gateway.requests.answer.crash_trial`).

Losses and marks are stored with the fences of their leases, so that a process that lost a lease but lives can remove
its own: it releases the lease as soon as Redis answers. A shard that was claimed meanwhile is then no longer suspect,
and the rest of its lines run normally.
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
    """What Redis has recorded about a line or task that is about to be tried, without this lease's own mark."""

    losses: int
    """Number of processes that leased the task and may have died of it."""
    marks: int
    """Number of earlier trials of the line or task in which its process died or it failed by a bug."""


@dataclass(frozen=True, slots=True)
class TaskHistory:
    """What Redis has recorded about a task and the lines of its batch when the task is claimed."""

    losses: int
    """Number of processes that leased the task and may have died of it."""
    marks: Mapping[int, int]
    """Number of marks of each marked line of the batch, by position."""

    @classmethod
    def read(cls, fields: Mapping[bytes, bytes], task: str) -> TaskHistory:
        """Read a task's history from its batch's Redis hash: how many processes may have died of the task and, by the
        position of each marked line, the failed trials of the line alone. `task` is the task's name in Redis."""
        marks = {name[5:]: len(value.split()) for name, value in fields.items() if name.startswith(b"mark:")}
        lines = {int(name): count for name, count in marks.items() if name.isdigit()}
        return cls(len(fields.get(f"lost:{task}".encode(), b"").split()), lines)
