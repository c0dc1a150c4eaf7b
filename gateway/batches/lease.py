"""Leases of batch tasks: a process leases one task for a limited time, identified by a fence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, cast

from gateway.batches.record import Batch, read_fields
from gateway.batches.trial import TaskHistory

TaskKind = Literal["validate", "shard", "finalize", "sweep"]
ALL_TASKS: frozenset[TaskKind] = frozenset(("validate", "shard", "finalize", "sweep"))
CONTROL_TASKS: frozenset[TaskKind] = ALL_TASKS - {"shard"}
"""Tasks that run no lines and take only seconds. They are claimed separately, because they would otherwise wait for the
shards of more urgent batches."""
SHARD_SIZE = 128
"""Number of positions (lines) in a shard. It is a multiple of 8, so that each shard has whole bytes in the bitmap."""

Standing = Literal["yours", "lost", "ending"]
"""State of a lease in Redis. `yours`: it is valid. `lost`: another process has the task or the task is over; nothing
that the holder still does counts. `ending`: the batch is being cancelled or its window is over. The holder must then
stop its lines, commit the answers that it has and release the lease, which is no longer extended."""


@dataclass(frozen=True, slots=True)
class Lease:
    """One task of a batch that a process has leased. A batch has one task at a time, except for its shards: validate,
    then all shards in parallel, then finalize, then sweep.

    Positions are places in the batch's index (`gateway.batches.line_reader`), which has the lines in the order in which
    they run best. A shard is the range of positions from `first` to before `last`; `done` has its committed ones. The
    task `sweep` belongs to a batch that has ended: its objects and keys are to be deleted and its input unpinned.
    """

    batch: Batch = field(hash=False)
    """The batch as it was when the lease was claimed."""
    task: TaskKind
    fence: int
    """Fencing number. Later leases of the batch have greater ones, and only the task's last lease can commit."""
    seconds_left: float = field(compare=False)
    """Seconds left in the batch's window when the lease was claimed; negative if the window was over."""
    shard: int = 0
    first: int = 0
    last: int = 0
    """End (exclusive) of the positions from `first` on: those of the shard, or all of them in finalize."""
    done: bytes = field(default=b"", compare=False, repr=False)
    """Bitmap of the positions from `first` on, most significant bit first: set if an answer was already committed."""
    losses: int = field(default=0, compare=False)
    """Number of processes that leased the task, and may have died of it: they neither released it nor reported
    since."""
    marks: Mapping[int, int] = field(default_factory=dict, compare=False, repr=False)
    """Number of processes that died while the line at a position ran alone, on trial (`gateway.batches.trial`), by
    position."""

    @property
    def batch_id(self) -> str:
        return self.batch.id

    @property
    def tenant(self) -> str:
        return self.batch.tenant

    @property
    def task_name(self) -> str:
        """Name of the task in Redis: its kind, or the zero-padded number of the shard."""
        return f"{self.shard:06d}" if self.task == "shard" else self.task

    def is_done(self, position: int) -> bool:
        byte, bit = divmod(position - self.first, 8)
        return byte < len(self.done) and bool(self.done[byte] & 0x80 >> bit)

    def open_positions(self) -> Iterator[int]:
        """Yield the positions from `first` to before `last` without a committed answer, in order."""
        return (position for position in range(self.first, self.last) if not self.is_done(position))


def read_lease(task: str, fence: bytes, microseconds_left: bytes, done: bytes, words: Sequence[bytes]) -> Lease:
    """Return the lease that `claim.lua` describes: the task's name, its fence, the microseconds left in the batch's
    window, the bitmap of committed positions, and in `words` the fields of the batch, each followed by its value."""
    fields = dict(zip(words[::2], words[1::2], strict=True))
    batch, left, trial = read_fields(fields), int(microseconds_left) / 1e6, TaskHistory.read(fields, task)
    if task.isdecimal():
        first = int(task) * batch.lines.shard_size
        last = min(batch.lines.total, first + batch.lines.shard_size)
        return Lease(batch, "shard", int(fence), left, int(task), first, last, done, trial.losses, trial.marks)
    last = batch.lines.total if task == "finalize" else 0
    return Lease(batch, cast(TaskKind, task), int(fence), left, last=last, done=done, losses=trial.losses)
