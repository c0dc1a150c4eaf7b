"""What runs a plan: a model on this machine, a cost model, or replicas elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from engine.core.commands import Answer
from engine.core.types import AdapterId, StepPlan, StepResult

Report = Callable[[Answer], None]
"""Takes answers to fetches and about grammars, from any thread."""


@dataclass(frozen=True, slots=True)
class HostAdapter:
    """An adapter that has been read and can be served."""

    id: AdapterId
    rank: int
    """The largest of its projections."""
    target_modules: tuple[str, ...]
    num_pages: int
    num_bytes: int
    """Packed."""


Claim = Callable[[HostAdapter], bool]
"""Makes an adapter known; whether host memory is reserved for what has just been read."""


class Executor(Protocol):
    """Carries out plans one after the other. Only `load_host` may be called from other threads."""

    @property
    def overlaps(self) -> bool:
        """A plan may be submitted while the one before it is carried out; else only once its result is collected."""

    def connect(self, report: Report) -> None:
        """Where answers go: exactly one for each fetch, and one for each grammar that is not forgotten before. Called
        once, before everything else."""

    def submit(self, plan: StepPlan) -> bool:
        """Begins to carry out a plan: saves, releases, evicts, loads, begins fetches and preparations, restores, admits
        and computes, in this order and behind the plan before it, which it does not wait for. A chunk may begin with a
        token that only that one knows. Here as in `collect`, an exception is a bug and ends the engine.

        Returns:
            Whether the plan was late: that before it had been carried out already, and not been collected.
        """

    def collect(self) -> StepResult:
        """What came of the oldest plan that was submitted and not collected. Waits for it."""

    def load_host(self, path: str, claim: Claim) -> HostAdapter:
        """Reads and validates an adapter folder. Where `claim` says so, packs it into host memory and reports that, as
        if it had been fetched.

        Raises:
            ValueError: the folder is not an adapter of this model, or `claim` will not have it; the message says why.
        """

    def close(self) -> None:
        """End the processes that the executor has started. Called once, after everything else."""
