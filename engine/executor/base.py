"""What runs a plan: a model on this machine, a cost model, or replicas elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from engine.core.types import AdapterId, StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class HostAdapter:
    """An adapter validated and packed in host memory, ready to be copied into pages."""

    id: AdapterId
    rank: int
    """The largest of its projections."""
    target_modules: tuple[str, ...]
    num_pages: int
    num_bytes: int


class Executor(Protocol):
    """Carries out plans one after the other. Only `load_host` and `drop_host` may be called from other threads."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Releases, evicts, loads, admits and computes, in this order. An exception is a bug and ends the engine."""

    def load_host(self, path: str) -> HostAdapter:
        """Reads, validates and packs an adapter folder. Loading the same content twice is free.

        Raises:
            ValueError: the folder is not an adapter of this model, or host memory is full; the message says why.
        """

    def drop_host(self, adapter: AdapterId) -> None:
        """Forgets an adapter no request uses any more. Unknown ones are ignored."""
