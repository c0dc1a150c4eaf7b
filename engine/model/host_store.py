"""Adapters in host memory: packed once, ready to be copied into pages."""

from __future__ import annotations

from dataclasses import dataclass
from threading import Lock

from torch import Tensor

from engine.core.types import AdapterId
from engine.executor.base import HostAdapter
from lora_kernels.layout import AdapterLayout


class HostStoreFull(ValueError):
    """The adapter does not fit the host memory given to adapters; the message says by how much."""


@dataclass(frozen=True, slots=True)
class PackedAdapter:
    """A packed adapter. `blob` is [num_pages, page_elems] in the arena's dtype, pinned where a GPU copies from it."""

    id: AdapterId
    target_modules: tuple[str, ...]
    layout: AdapterLayout
    blob: Tensor

    @property
    def rank(self) -> int:
        """The largest of any layer and projection."""
        return int(self.layout.ranks.max(initial=0))

    @property
    def num_pages(self) -> int:
        return self.layout.num_pages

    @property
    def num_bytes(self) -> int:
        return self.blob.nbytes

    def describe(self) -> HostAdapter:
        """What everybody above the model needs to know of it."""
        return HostAdapter(self.id, self.rank, self.target_modules, self.num_pages, self.num_bytes)


class HostStore:
    """Packed adapters by content hash, bounded in bytes. Every method may be called from any thread."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._adapters: dict[AdapterId, PackedAdapter] = {}
        self._lock = Lock()

    @property
    def num_bytes(self) -> int:
        with self._lock:
            return self._used()

    def put(self, adapter: PackedAdapter) -> PackedAdapter:
        """Keeps an adapter, or the equal one that is here already, and returns the one kept.

        Raises:
            HostStoreFull: it does not fit beside the others.
        """
        with self._lock:
            if adapter.id not in self._adapters:
                self._check_room(adapter)
            return self._adapters.setdefault(adapter.id, adapter)

    def get(self, adapter_id: AdapterId) -> PackedAdapter | None:
        with self._lock:
            return self._adapters.get(adapter_id)

    def drop(self, adapter_id: AdapterId) -> None:
        """Forgets an adapter; one that is not here is nothing to forget."""
        with self._lock:
            self._adapters.pop(adapter_id, None)

    def _used(self) -> int:
        return sum(adapter.num_bytes for adapter in self._adapters.values())

    def _check_room(self, adapter: PackedAdapter) -> None:
        free = self._capacity - self._used()
        if adapter.num_bytes > free:
            raise HostStoreFull(
                f"the adapter needs {adapter.num_bytes / 2**20:.1f} MiB of host memory, {free / 2**20:.1f} MiB of "
                f"{self._capacity / 2**20:.1f} are free: unload adapters or raise engine.host_adapter_gb"
            )
