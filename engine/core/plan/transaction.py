"""Taking from several budgets as one."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType


class Transaction:
    """What one sequence takes from several budgets of a plan. When the `with` block ends, all of it is given back, what
    was taken last first, unless the block has called `keep`. (An `ExitStack` does the same, and takes far longer.)"""

    __slots__ = ("_taken",)

    def __init__(self) -> None:
        self._taken: list[tuple[Callable[..., object], tuple[object, ...]]] = []

    def took(self, give_back: Callable[..., object], *what: object) -> None:
        """Record that something was taken, which `give_back(*what)` gives back."""
        self._taken.append((give_back, what))

    def keep(self) -> None:
        """Give nothing back that was taken so far."""
        self._taken.clear()

    def __enter__(self) -> Transaction:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for give_back, what in reversed(self._taken):
            give_back(*what)
