"""What a worker holds while it works on a batch: one task, for a while, under a fence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, cast

from gateway.batches.record import Batch, read_fields
from gateway.batches.trial import Trial

TaskKind = Literal["validate", "shard", "finalize", "sweep"]
ALL_TASKS: frozenset[TaskKind] = frozenset(("validate", "shard", "finalize", "sweep"))
SMALL_TASKS: frozenset[TaskKind] = ALL_TASKS - {"shard"}
"""Over in seconds: ask for these by themselves too, or they wait behind every line of more urgent batches."""
SHARD_SIZE = 128
"""Positions of a shard: a multiple of 8, so that each has bytes of its own in the bitmap."""

Standing = Literal["yours", "lost", "ending"]
"""Of a lease. lost: somebody else works on it, or nobody needs to; nothing that its holder does counts any more.
ending: the batch is being cancelled or its window is over; stop its lines, commit what is done, release. Such a lease
is no longer extended."""


@dataclass(frozen=True, slots=True)
class Lease:
    """A batch has one task at a time, but for its shards: validate, the shards side by side, finalize, sweep.

    Positions are places in the batch's index (`gateway.batches.index`), where lines are in the order in which they are
    best run; a shard is a range of them. Task `sweep`: the batch has ended; its folder is to be deleted, its input
    unpinned.
    """

    batch: Batch = field(hash=False)
    """As it was when this was claimed."""
    task: TaskKind
    fence: int
    """Of all leases of the batch, a later one's is greater. Nobody's commit counts but that of the task's last."""
    seconds_left: float = field(compare=False)
    """Of the batch's window, when this was claimed; negative: it is over."""
    shard: int = 0
    first: int = 0
    last: int = 0
    """Positions from `first` to before `last`: the shard's, or all of them in finalize."""
    done: bytes = field(default=b"", compare=False, repr=False)
    """One bit a position from `first` on, the highest of a byte first: set where an answer was committed already."""
    losses: int = field(default=0, compare=False)
    """How many processes may have died of this task: each held it, never handed it back and was not heard of again."""
    marks: Mapping[int, int] = field(default_factory=dict, compare=False, repr=False)
    """Positions that were alone on trial when their process died, and how often (`gateway.batches.trial`)."""

    @property
    def batch_id(self) -> str:
        return self.batch.id

    @property
    def tenant(self) -> str:
        return self.batch.tenant

    @property
    def member(self) -> str:
        """The task by the name it is kept under."""
        return f"{self.shard:06d}" if self.task == "shard" else self.task

    def is_done(self, position: int) -> bool:
        byte, bit = divmod(position - self.first, 8)
        return byte < len(self.done) and bool(self.done[byte] & 0x80 >> bit)

    def open_positions(self) -> Iterator[int]:
        """Those that nobody has committed, in order."""
        return (position for position in range(self.first, self.last) if not self.is_done(position))


def read_lease(task: str, fence: bytes, microseconds_left: bytes, done: bytes, words: Sequence[bytes]) -> Lease:
    """Read what `claim.lua` returns: `words` are the fields of the batch, each followed by its value."""
    fields = dict(zip(words[::2], words[1::2], strict=True))
    batch, left, trial = read_fields(fields), int(microseconds_left) / 1e6, Trial.read(fields, task)
    if task.isdecimal():
        first = int(task) * batch.shard_size
        last = min(batch.total, first + batch.shard_size)
        return Lease(batch, "shard", int(fence), left, int(task), first, last, done, trial.losses, trial.marks)
    last = batch.total if task == "finalize" else 0
    return Lease(batch, cast(TaskKind, task), int(fence), left, last=last, done=done, losses=trial.losses)
