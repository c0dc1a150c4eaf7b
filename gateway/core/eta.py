"""When a batch job's last line will have ended: the work in front of it, over what batch work gets of the device.

Jobs are worked on in the order of their deadlines, so before a job ends come its own lines and those of all due sooner. A
line is taken to be like those of its job that have ended; before the first has, like what was asked for. Tokens become
device seconds by what they cost in the steps of late, and those become seconds by the share of the device that batch
work has been getting, both as the engine's ledger has them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tokens:
    """Of one line, on average. Prompt tokens that the prefix cache had are left out: they cost next to nothing."""

    prompt: float
    output: float


@dataclass(frozen=True, slots=True)
class JobAhead:
    """What is known of one job's remaining work."""

    lines: int
    """That have not ended."""
    done: Tokens | None = None
    """Of lines that have; None: none has."""
    asked: Tokens | None = None
    """Of all lines as they were handed in, `output` being the most they may generate; None: nobody has looked."""


@dataclass(frozen=True, slots=True)
class Pace:
    """What the engine says of batch work."""

    prompt_seconds: float
    """Of device time that a token of a prompt costs."""
    output_seconds: float
    """And a generated one."""
    used_share: float
    """Of the tokens it may generate, how many a request does."""
    share: float
    """Of the device's time that batch work has been getting."""
    running: int = 0
    """Lines being worked on, half done on average."""

    def seconds(self, tokens: Tokens) -> float:
        return tokens.prompt * self.prompt_seconds + tokens.output * self.output_seconds


def eta_seconds(jobs: Iterable[JobAhead], pace: Pace) -> float | None:
    """Seconds until the last of `jobs` is done, which are in the order of their deadlines.

    None: nothing has been computed yet, batch work gets nothing, or nobody knows what the lines of one are like.
    """
    if not (pace.prompt_seconds or pace.output_seconds) or pace.share <= 0:
        return None
    work, running = 0.0, pace.running
    for job in jobs:
        tokens = _line(job, pace)
        if tokens is None and job.lines:
            return None
        begun = min(running, job.lines)
        running -= begun
        work += (job.lines - begun / 2) * (pace.seconds(tokens) if tokens else 0.0)
    return work / pace.share


def _line(job: JobAhead, pace: Pace) -> Tokens | None:
    if job.done is not None or job.asked is None:
        return job.done
    return Tokens(job.asked.prompt, job.asked.output * pace.used_share)
