"""Adapters in host memory: packed once, ready to be copied into pages."""

from __future__ import annotations

from dataclasses import dataclass
from threading import Lock

from engine.core.types import AdapterId
from engine.model.host_memory import Blob, HostMemory
from lora_kernels.layout import AdapterLayout


@dataclass(frozen=True, slots=True)
class PackedAdapter:
    """A packed adapter. Its blob is in the arena's dtype, pinned where a GPU copies from it."""

    id: AdapterId
    layout: AdapterLayout
    blob: Blob


class HostStore:
    """Packed adapters by content hash. Every method may be called from any thread.

    The core says which adapters come and go: it has reserved their bytes before they are packed.

    Args:
        memory: what blobs are taken from; those of adapters that are dropped go back.
    """

    def __init__(self, memory: HostMemory) -> None:
        self._memory = memory
        self._adapters: dict[AdapterId, PackedAdapter] = {}
        self._lock = Lock()

    @property
    def num_bytes(self) -> int:
        with self._lock:
            return sum(adapter.blob.nbytes for adapter in self._adapters.values())

    def put(self, adapter: PackedAdapter) -> None:
        with self._lock:
            self._adapters[adapter.id] = adapter

    def get(self, adapter_id: AdapterId) -> PackedAdapter:
        """Raises KeyError: a plan names an adapter that is not here, which is a bug."""
        with self._lock:
            return self._adapters[adapter_id]

    def drop(self, adapter_id: AdapterId) -> None:
        """Forgets an adapter. Raises KeyError, likewise."""
        with self._lock:
            adapter = self._adapters.pop(adapter_id)
        self._memory.give(adapter.blob)
