"""The interface of executors, which run step plans: on a model on this machine, or without one (fake.py, timed.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from engine.core.memory.adapters import HostAdapter
from engine.core.messages.commands import Answer
from engine.core.messages.moves import PageMemory
from engine.core.messages.step import Launch, StepPlan, StepResult


class RankDied(RuntimeError):
    """One of the processes that compute a model together has ended, and with it the engine. `signal` is the number of
    the signal that ended it; 0 means that none did."""

    def __init__(self, message: str, signal: int = 0) -> None:
        super().__init__(message)
        self.signal = signal


Report = Callable[[Answer], None]
"""Callback for the answers to adapter fetches and grammar preparations. The executor may call it from any thread."""


Claim = Callable[[HostAdapter], bool]
"""Callback that makes an adapter, which has just been read, known to the engine. Returns whether host memory was
reserved for it, and raises ValueError to reject the adapter."""


class Executor(Protocol):
    """Interface of what computes an engine's step plans, in the order of submission: a model, or a stand-in for tests
    and simulations. Only `load_host` may be called from threads other than the step loop."""

    @property
    def overlaps(self) -> bool:
        """Return whether a plan may be submitted while the previous one is executed. If not, the caller must collect
        the result of the previous plan before."""

    def connect(self, report: Report) -> None:
        """Set the callback for answers: it gets exactly one for each adapter fetch, cancelled ones included, and one
        for each grammar that a plan prepares, unless a later plan forgets the grammar before it is ready. Called once,
        before all other methods."""

    def submit(self, plan: StepPlan) -> Launch:
        """Start to execute a plan, in the order that `StepPlan` says. The plan is queued after the previous plan; a
        chunk may begin with a token that the previous plan samples. This call waits for such tokens only if grammars
        need them, and only once the device has its next work. An exception, here or in `collect`, is a bug and ends the
        engine.

        Returns:
            Whether the device was still busy when the step reached it, and when that was.
        """

    def collect(self) -> StepResult:
        """Block until the oldest plan that was submitted and not collected has finished, and return its result."""

    def load_host(self, path: str, claim: Claim) -> HostAdapter:
        """Read and validate an adapter folder, and call `claim`, which makes the adapter known to the engine. If it
        returns True, host memory was reserved: pack the adapter into host memory and report it like an adapter that was
        fetched. Blocks until done. Returns the adapter's description also if `claim` returns False.

        Raises:
            ValueError: the folder is not an adapter of this model, or `claim` raised it; the message says why.
        """

    @property
    def page_memory(self) -> PageMemory | None:
        """The host pages for KV, from and to which pages move between engines. None means that no single process holds
        them, or that there are none."""

    def close(self) -> None:
        """End the processes that the executor has started. Called once, after all other methods."""
