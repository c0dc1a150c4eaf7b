"""Stores packed adapters in host memory, ready to be copied into pages."""

from __future__ import annotations

from dataclasses import dataclass
from threading import Lock

from engine.core.messages.requests import AdapterHash
from engine.model.memory.host import Blob, HostMemory
from lora_kernels.layout import AdapterLayout


@dataclass(frozen=True, slots=True)
class PackedAdapter:
    """An adapter in host memory, packed into pages as the arena holds it. Its blob has the arena's dtype, and is pinned
    if a GPU copies from it. `draft` is what it has for the draft model, if anything."""

    adapter_hash: AdapterHash
    layout: AdapterLayout
    blob: Blob
    draft: PackedAdapter | None = None

    @property
    def blobs(self) -> tuple[Blob, ...]:
        return (self.blob, *self.draft.blobs) if self.draft else (self.blob,)

    @property
    def num_bytes(self) -> int:
        """Bytes that the packed adapter takes in host memory, with its layout and its part for the draft model."""
        return self.blob.nbytes + self.layout.num_bytes + (self.draft.num_bytes if self.draft else 0)


class HostStore:
    """The packed adapters in host memory, by content hash. Thread-safe. The core decides which are added and dropped,
    and reserves their bytes first; `memory` frees the blobs of dropped ones."""

    def __init__(self, memory: HostMemory) -> None:
        self._memory = memory
        self._adapters: dict[AdapterHash, PackedAdapter] = {}
        self._lock = Lock()

    @property
    def num_bytes(self) -> int:
        with self._lock:
            return sum(adapter.num_bytes for adapter in self._adapters.values())

    def put(self, adapter: PackedAdapter) -> None:
        with self._lock:
            self._adapters[adapter.adapter_hash] = adapter

    def get(self, adapter_hash: AdapterHash) -> PackedAdapter:
        """Return a packed adapter. Raises KeyError if the adapter is not in the store: then the plan that names it has
        a bug."""
        with self._lock:
            return self._adapters[adapter_hash]

    def drop(self, adapter_hash: AdapterHash) -> None:
        """Remove a packed adapter and free its host memory. Raises KeyError if the adapter is not in the store."""
        with self._lock:
            adapter = self._adapters.pop(adapter_hash)
        for blob in adapter.blobs:
            self._memory.give(blob)
