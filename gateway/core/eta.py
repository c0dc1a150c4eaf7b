"""When a batch job's last line will have ended: the work in front of it, over what batch work gets of the device.

In front of a job's end are its own lines, those of its tenant's jobs that are due sooner, and other tenants' jobs that
are more urgent; with those as urgent as it is it takes turns. A line is taken to be like those of its job that have
ended, and before one has, like those of the job whose end is asked for, or of all jobs. Tokens become device seconds by
what they cost in the steps of late, and those become seconds by the share of the device that batch work has been
getting, both as the engine's ledger has them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from math import log2


@dataclass(frozen=True, slots=True)
class Tokens:
    """Of a line, on average."""

    prompt: float
    """Without those that the prefix cache had, which cost next to nothing."""
    output: float


@dataclass(frozen=True, slots=True)
class OpenJob:
    """What is known of a job's remaining work."""

    id: str
    tenant: str
    seconds_left: float
    """Of its window."""
    lines: int
    """That have not ended."""
    line: Tokens | None
    """None: none has ended."""

    @property
    def due(self) -> tuple[float, str]:
        """What a tenant's own jobs are ordered by."""
        return self.seconds_left, self.id


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast batch work goes."""

    prompt_seconds: float
    """Of device time that a token of a prompt costs."""
    output_seconds: float
    """And a generated one."""
    share: float
    """Of the device's time that batch work has been getting."""
    running: int = 0
    """Lines that are being worked on, half done on average."""

    def seconds(self, line: Tokens) -> float:
        """Of device time."""
        return line.prompt * self.prompt_seconds + line.output * self.output_seconds


def urgency(seconds_left: float) -> int:
    """Of a job with so much of its window left: the least goes first. Jobs are equally urgent while it is the same to a
    factor of two."""
    return int(log2(max(1.0, seconds_left)))


def eta_seconds(job: OpenJob, others: Collection[OpenJob], pace: Pace) -> float | None:
    """Seconds until the last line of `job` has ended.

    None: nobody knows what any job's lines are like, or batch work gets nothing.
    """
    known = [pace.seconds(one.line) for one in (job, *others) if one.line]
    if not known or pace.share <= 0:
        return None
    line = pace.seconds(job.line) if job.line else sum(known) / len(known)
    work = job.lines * line
    ahead, rivals = 0.0, defaultdict[str, float](float)
    for other in others:
        seconds = other.lines * (pace.seconds(other.line) if other.line else line)
        if other.tenant == job.tenant:
            work += seconds if other.due < job.due else 0.0
        elif urgency(other.seconds_left) == urgency(job.seconds_left):
            rivals[other.tenant] += seconds
        elif other.seconds_left < job.seconds_left:
            ahead += seconds
    work += sum(min(work, seconds) for seconds in rivals.values()) + ahead
    return max(work / 2, work - pace.running / 2 * line) / pace.share
