"""Estimates when a batch job will finish: the device time of the work ahead of its end, divided by the share of the
device that batch work gets.

The work ahead of a job's end consists of its own lines, the lines of its tenant's jobs that are due sooner, and the
lines of other tenants' jobs that are more urgent. Equally urgent jobs of other tenants take turns with it. A line is
assumed to need the average device time of the finished lines of its job; if its job has none, the average of the job
whose end is estimated; if that has none either, the average of all jobs. Token costs that the engine learns are not
used: they cover some twenty steps, so that one job's estimate was 500 s and 6,000 s within a minute.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from math import log2
from statistics import fmean


@dataclass(frozen=True, slots=True)
class OpenJob:
    """Snapshot of an unfinished batch job's remaining work, as input of an estimate."""

    id: str
    tenant: str
    seconds_left: float
    """Seconds left in the job's completion window."""
    lines: int
    """Number of lines that have not ended."""
    line_seconds: float | None
    """Average device time of the job's finished lines, in seconds. None means that no line has ended."""

    @property
    def due(self) -> tuple[float, str]:
        """Sort key of the jobs of one tenant: the earliest deadline first, ties by id."""
        return self.seconds_left, self.id


@dataclass(frozen=True, slots=True)
class BatchSpeed:
    """Current speed of batch work: its recent share of the device's time, and the number of running lines."""

    share: float
    """Recent share of the device's time that batch work got, from 0 to 1."""
    running: int = 0
    """Number of lines that the engine is running. They are assumed to be half done on average."""


def urgency(seconds_left: float) -> int:
    """Return the urgency class of a job: the logarithm to base 2 of `seconds_left`, the rest of its completion window,
    rounded down, at least 0. Jobs of a lower class run first; those of the same class are equally urgent."""
    return int(log2(max(1.0, seconds_left)))


def eta_seconds(job: OpenJob, others: Collection[OpenJob], speed: BatchSpeed) -> float | None:
    """Return the estimated seconds until the last line of `job` has ended. `others` are all other open jobs.

    None means that no estimate is possible: no line of any job has ended, or batch work gets no device time.
    """
    known = [one.line_seconds for one in (job, *others) if one.line_seconds is not None]
    if not known or speed.share <= 0:
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
    return max(work / 2, work - speed.running / 2 * line) / speed.share
