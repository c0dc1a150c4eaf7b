"""The device memory: one pool of pages that hold KV cache and adapters alike, and which of them steps use."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.core.messages.requests import AdapterHash, PageId
from engine.core.messages.step import PageCopy
from engine.model.layers.lora import TARGETS
from engine.model.memory.adapter_copies import Flags, make_copies
from engine.model.memory.allocation import populate, zeros
from engine.model.memory.host import Blob
from engine.model.spec.config import ModelSpec
from lora_kernels.backend import KvCoding
from lora_kernels.layout import MAX_ELEMENTS, AdapterLayout, LoraTable
from lora_kernels.pinned import upload

PageArray = NDArray[np.integer]


@dataclass(frozen=True, slots=True)
class PageShape:
    """Shape of a page, which holds K and V of `block_size` tokens for all layers: moving a page is one contiguous copy.
    With `fp8_kv`, each 16-bit element of a page holds two numbers of K or V (float8_e4m3fn)."""

    layers: int
    block_size: int
    kv_heads: int
    head_dim: int
    fp8_kv: bool = False

    @property
    def elements(self) -> int:
        return self.layers * 2 * self.block_size * self.kv_heads * self.head_dim // (2 if self.fp8_kv else 1)


def page_shape(spec: ModelSpec, block_size: int, fp8_kv: bool = False) -> PageShape:
    return PageShape(spec.layers, block_size, spec.kv_heads, spec.head_dim, fp8_kv)


class Arena:
    """The page pool of a device, zeroed at first, and the table of resident adapters. Page 0, the null page, is never
    written. Raises ValueError if `table` could not address all pages.

    Args:
        kv_codings: of each layer, for pages with `shape.fp8_kv`.
        pages: pages of another model's arena to use, [num_pages, at least shape.elements], or None.
        num_targets: number of linears of a layer that adapters may change.
    """

    def __init__(
        self,
        shape: PageShape,
        num_pages: int,
        max_adapters: int,
        dtype: torch.dtype,
        device: torch.device,
        fp8_adapters: bool = False,
        kv_codings: tuple[KvCoding, ...] | None = None,
        pages: Tensor | None = None,
        num_targets: int = len(TARGETS),
    ) -> None:
        if num_pages * shape.elements > MAX_ELEMENTS:
            raise ValueError(
                f"at most {MAX_ELEMENTS // shape.elements} pages can hold adapters; lower engine.num_pages"
            )
        self.shape = shape
        self._populating = None
        if pages is None:
            pages = zeros(num_pages * shape.elements, dtype, device).view(num_pages, shape.elements)
            self._populating = populate(pages)
        self.pages = pages
        """[num_pages, page_elems]."""
        self.table = LoraTable(max_adapters, shape.layers, num_targets, pages.shape[1], device, fp8_adapters)
        """Tells kernels where the tiles of resident adapters are. It has `max_adapters` adapter slots."""
        split = (shape.layers, 2, shape.block_size, shape.kv_heads, shape.head_dim)
        of_kv = pages.view(torch.float8_e4m3fn) if shape.fp8_kv else pages[:, : shape.elements]
        by_layer = of_kv.unflatten(1, split)
        self._kv = tuple(by_layer[:, layer] for layer in range(shape.layers))
        self._kv_codings = kv_codings or (None,) * shape.layers
        self.copies = make_copies(self.pages)
        """Copies adapters into pages, and makes computation wait for them."""
        self._adapter_slots: dict[AdapterHash, int] = {}
        self._adapter_pages: dict[int, PageArray] = {}
        """Adapter slot -> pages of its adapter."""
        self._free_adapter_slots = list(range(max_adapters - 1, -1, -1))

    def close(self) -> None:
        """Cancel the timer that would have the system provide the pages' memory (see `populate`). The timer would
        otherwise keep the pages alive after the arena is dropped."""
        if self._populating is not None:
            self._populating.cancel()

    @property
    def flat(self) -> Tensor:
        """The arena's pages as [num_pages * page_elems], from which LoRA kernels read adapter tiles."""
        return self.pages.view(-1)

    def kv(self, layer: int) -> Tensor:
        """Return a view of one layer's KV, [num_pages, 2, block_size, kv_heads, head_dim], strided across pages; on the
        second axis, 0 = K and 1 = V. The dtype is float8_e4m3fn with `shape.fp8_kv`, else the arena's."""
        return self._kv[layer]

    def kv_coding(self, layer: int) -> KvCoding | None:
        """Return the scales and the key shift with which one layer's K and V are stored in FP8. None means that K and V
        are stored as they are, in the arena's dtype."""
        return self._kv_codings[layer]

    def fork(self, forks: NDArray[np.int64]) -> None:
        """Copy KV pages to other pages of the arena, which starting sequences go on to fill, ordered with the kernels.
        Each row of `forks`, int64 [num_forks, 2], is (source page, target page)."""
        sources, targets = upload(np.ascontiguousarray(forks.T), self.pages.device)
        self.pages.index_copy_(0, targets, self.pages.index_select(0, sources))

    def load_adapter(
        self,
        adapter_hash: AdapterHash,
        layout: AdapterLayout,
        blob: Blob,
        pages: tuple[PageId, ...],
        busy: Flags | None = None,
    ) -> None:
        """Start to copy a packed adapter into `pages` (see `AdapterCopies.begin`), and enter it in the table under a
        free slot. Raises ValueError if it is resident, no slot is free, or pages or FP8 do not fit."""
        if adapter_hash in self._adapter_slots:
            raise ValueError(f"adapter {adapter_hash} is resident already")
        if not self._free_adapter_slots:
            raise ValueError(f"adapter {adapter_hash} does not fit: all {len(self._adapter_slots)} slots are taken")
        if len(pages) != layout.num_pages:
            raise ValueError(f"adapter {adapter_hash} needs {layout.num_pages} pages, not {len(pages)}")
        self.table.set(self._free_adapter_slots[-1], layout, pages)  # first, because it may refuse the layout
        self.copies.begin(blob, pages, layout, busy)
        self._adapter_slots[adapter_hash] = adapter_slot = self._free_adapter_slots.pop()
        self._adapter_pages[adapter_slot] = np.asarray(pages, dtype=np.int64)

    def evict_adapter(self, adapter_hash: AdapterHash) -> None:
        """Free the adapter's slot and clear it in the table: kernels launched later do not read its pages. Raises
        KeyError if the adapter is not resident."""
        adapter_slot = self._adapter_slots.pop(adapter_hash)
        del self._adapter_pages[adapter_slot]
        self.table.clear(adapter_slot)
        self._free_adapter_slots.append(adapter_slot)

    def adapter_slot(self, adapter_hash: AdapterHash | None) -> int:
        """Return the adapter's slot in the table, -1 for None (the base model). Raises KeyError if it is not
        resident."""
        return -1 if adapter_hash is None else self._adapter_slots[adapter_hash]

    def adapter_pages(self, adapter_slot: int) -> PageArray:
        """Return the pages (int64) of the adapter in a slot. Raises KeyError if the slot is free."""
        return self._adapter_pages[adapter_slot]


@dataclass(frozen=True, slots=True)
class PageUses:
    """The pages that the kernels and copies of a submitted step read or write; an adapter copied into others need not
    wait for it. `used_pages` looks through the step's arrays only when a plan loads an adapter."""

    copies: tuple[PageCopy, ...] = ()
    """The step's saves and restores of KV."""
    arrays: Sequence[PageArray] = ()
    """Pages in arrays of any shape: the block tables of the step's sequences, and its adapters' pages."""


def used_pages(uses: Iterable[PageUses], num_pages: int) -> NDArray[np.bool_]:
    """Return bool [num_pages]: whether any of the steps whose `uses` are given reads or writes each page of the
    pool."""
    used = np.zeros(num_pages, dtype=np.bool_)
    for use in uses:
        for array in use.arrays:
            used[array] = True
        used[[copy.page for copy in use.copies]] = True
    return used
