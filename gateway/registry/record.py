"""Records, changes and snapshots of a registry, independent of the kind of record."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Generic, Protocol, TypeVar

from gateway.core.errors import ApiError


class Record(Protocol):
    """An immutable, named record of a registry. `aliases` are further names, unique in the registry."""

    @property
    def name(self) -> str: ...

    @property
    def source(self) -> str:
        """Text of the configuration that the record came from. Only a configuration with a different text is applied
        again."""

    @property
    def aliases(self) -> tuple[str, ...]: ...

    @property
    def generation(self) -> int:
        """Number of the registry's change that wrote the record; 0 if the registry does not have it."""


R = TypeVar("R", bound=Record)


@dataclass(frozen=True, slots=True)
class RecordKind(Generic[R]):
    """Name, encoding and errors of one kind of record. `noun` stands in messages; `encode` makes the stored bytes."""

    noun: str
    encode: Callable[[R], bytes]
    decode: Callable[[bytes, int], R]
    """Decodes a record from its stored bytes and its generation. Raises ValueError or msgspec.MsgspecError."""
    conflict: Callable[[str], ApiError]
    """Makes the error, from a message, for a change that another change preceded or whose name is taken."""


@dataclass(frozen=True, slots=True)
class RecordChange(Generic[R]):
    """One entry of a registry's log: change number `generation` wrote the record `name`, or removed it."""

    generation: int
    name: str
    record: R | None
    """The new record. None means that the record was removed."""
    drain_seconds: float | None = None
    """Seconds that an operator gave running requests of a removed record to end. None means the configured time."""


@dataclass(frozen=True, slots=True)
class RegistrySnapshot(Generic[R]):
    """All records of a registry by name. `generation` is the number of its last change; 0: never written, or lost."""

    generation: int = 0
    records: Mapping[str, R] = field(default_factory=lambda: MappingProxyType({}))
    num_aliases: int = 0
    """Number of aliases that the registry has. It is less than that of its records' if Redis has evicted some."""
    was_lost: bool = False
    """True if there are no records, although the last change left some: Redis has evicted them."""
