"""When a batch job's last line will have ended: the work in front of it, over what batch work gets of the device.

In front of a job's end are its own lines, those of its tenant's jobs that are due sooner, and other tenants' jobs that
are more urgent; with those as urgent as it is it takes turns. A line is taken to need what those of its job have needed
that have ended, on average; before one has, what those of the job have whose end is asked for, or of all jobs.

Prices of tokens, as the engine learns them, were tried first: they remember some twenty steps, so that on a busy
machine one job was foretold to take 500 s and 6,000 s within a minute; and they need lengths of lines besides.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from math import log2
from statistics import fmean


@dataclass(frozen=True, slots=True)
class OpenJob:
    """What is known of a job's remaining work."""

    id: str
    tenant: str
    seconds_left: float
    """Of its window."""
    lines: int
    """That have not ended."""
    line_seconds: float | None
    """Of device time that a line has taken; None: none has ended."""

    @property
    def due(self) -> tuple[float, str]:
        """What a tenant's own jobs are ordered by."""
        return self.seconds_left, self.id


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast batch work goes."""

    share: float
    """Of the device's time that it has been getting."""
    running: int = 0
    """Lines that are being worked on, half done on average."""


def urgency(seconds_left: float) -> int:
    """Of a job with so much of its window left: the least goes first. Jobs are equally urgent while it is the same to a
    factor of two."""
    return int(log2(max(1.0, seconds_left)))


def eta_seconds(job: OpenJob, others: Collection[OpenJob], pace: Pace) -> float | None:
    """Seconds until the last line of `job` has ended.

    None: no line of any job has ended, or batch work gets nothing.
    """
    known = [one.line_seconds for one in (job, *others) if one.line_seconds is not None]
    if not known or pace.share <= 0:
        return None
    line = fmean(known) if job.line_seconds is None else job.line_seconds
    work = job.lines * line
    ahead, rivals = 0.0, defaultdict[str, float](float)
    for other in others:
        seconds = other.lines * (line if other.line_seconds is None else other.line_seconds)
        if other.tenant == job.tenant:
            work += seconds if other.due < job.due else 0.0
        elif urgency(other.seconds_left) == urgency(job.seconds_left):
            rivals[other.tenant] += seconds
        elif other.seconds_left < job.seconds_left:
            ahead += seconds
    work += sum(min(work, seconds) for seconds in rivals.values()) + ahead
    return max(work / 2, work - pace.running / 2 * line) / pace.share
