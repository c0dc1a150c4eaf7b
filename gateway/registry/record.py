"""Records, changes and snapshots of a registry, independent of the kind of record."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Generic, Protocol, TypeVar

from gateway.core.errors import ApiError


class Record(Protocol):
    """An immutable, named record."""

    @property
    def name(self) -> str: ...

    @property
    def source(self) -> str:
        """The configuration that the record came from. A different one is applied again."""

    @property
    def aliases(self) -> tuple[str, ...]: ...

    @property
    def generation(self) -> int:
        """Generation of the registry at which the record was written; 0 if the registry does not have it."""


R = TypeVar("R", bound=Record)


@dataclass(frozen=True, slots=True)
class RecordKind(Generic[R]):
    """Name, encoding and errors of one kind of record."""

    noun: str
    encode: Callable[[R], bytes]
    decode: Callable[[bytes, int], R]
    """Decodes a record and sets the generation at which it was written."""
    conflict: Callable[[str], ApiError]
    """Makes the error for a change that conflicts with an earlier one, from a message."""


@dataclass(frozen=True, slots=True)
class RecordChange(Generic[R]):
    """An entry of a registry's log."""

    generation: int
    name: str
    record: R | None
    """The new record. None means that the record was removed."""
    drain_seconds: float | None = None
    """Seconds that an operator gave running requests of a removed record. None means the configured time."""


@dataclass(frozen=True, slots=True)
class RegistrySnapshot(Generic[R]):
    """A whole registry at one generation. Generation 0 means that it was never written to, or was lost."""

    generation: int = 0
    records: Mapping[str, R] = field(default_factory=lambda: MappingProxyType({}))
