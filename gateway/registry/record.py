"""What a registry keeps, whatever it is about."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Generic, Protocol, TypeVar

from gateway.core.errors import ApiError


class Record(Protocol):
    """A frozen value under a name."""

    @property
    def name(self) -> str: ...

    @property
    def source(self) -> str:
        """What a configuration has to say for it to be taken up again."""

    @property
    def aliases(self) -> tuple[str, ...]: ...

    @property
    def generation(self) -> int:
        """Of the registry when it was written; 0: the registry has not seen it."""


R = TypeVar("R", bound=Record)


@dataclass(frozen=True, slots=True)
class Kind(Generic[R]):
    """One sort of record."""

    noun: str
    encode: Callable[[R], bytes]
    decode: Callable[[bytes, int], R]
    """The inverse, with the generation it was written at."""
    conflict: Callable[[str], ApiError]
    """What somebody is told whose change came second."""


@dataclass(frozen=True, slots=True)
class Change(Generic[R]):
    """One entry of a registry's log."""

    generation: int
    name: str
    record: R | None
    """None: the name is gone."""
    drain_seconds: float | None = None
    """What an operator granted the requests of a name that is gone; None: the configured time."""


@dataclass(frozen=True, slots=True)
class Snapshot(Generic[R]):
    """A whole registry at one generation; generation 0: it has never been written to, or was lost."""

    generation: int = 0
    records: Mapping[str, R] = field(default_factory=lambda: MappingProxyType({}))
