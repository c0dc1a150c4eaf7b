"""Turns adapter folders into blobs in kernel layout: checks them when they are loaded, packs them when needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from threading import Event, Thread

import numpy as np
import numpy.typing as npt
import structlog
import torch

from engine.core.memory.adapters import HostAdapter
from engine.model.adapters.peft.folder import PeftFolder, ReadBuffer, read_adapter, read_draft
from engine.model.adapters.peft.loader import LoadedAdapter, check_peft
from engine.model.adapters.peft.settings import AdapterError
from engine.model.adapters.peft.targets import TargetShapes
from engine.model.adapters.recipes import Recipe, Recipes
from engine.model.layers.lora import touched_names
from engine.model.memory.host import Blob, HostMemory
from engine.model.memory.host_store import PackedAdapter
from lora_kernels.layout import AdapterLayout, pack_adapter

log = structlog.get_logger("engine")


def has_recipes(dtype: torch.dtype, *, fp8: bool) -> bool:
    """Return whether adapters can be packed by recipes (see `Packer`): numba must be installed, the arena's dtype be
    bf16 or fp32, and adapters not be stored in FP8."""
    return find_spec("numba") is not None and not fp8 and dtype in (torch.bfloat16, torch.float32)


def load_kernels(dtype: torch.dtype) -> None:
    """Compile the CPU kernels that pack adapters into an arena of `dtype`, or load them from their cache. Adapters can
    be packed without them, more slowly."""
    from lora_kernels.cpu.numba_pack import compile_kernels

    compile_kernels(to_bf16=dtype is torch.bfloat16)


def load_ahead(dtype: torch.dtype, *, fp8: bool) -> Event | None:
    """Start a thread that loads the kernels that pack adapters (4.5 s when they are compiled), and return an event that
    is set then; if loading fails, never. None means that they are not used (see `has_recipes`)."""
    if not has_recipes(dtype, fp8=fp8):
        return None
    loaded = Event()

    def load() -> None:
        try:
            load_kernels(dtype)
        except Exception:
            log.exception("packing_kernels_not_loaded", consequence="adapters are packed slowly, tensor by tensor")
        else:
            loaded.set()

    Thread(target=load, name="packing-kernels", daemon=True).start()
    return loaded


class Packer:
    """Reads adapters from their folders, checks them, and packs them into host memory as the arena holds them.
    Thread-safe.

    Args:
        dtype, page_elems: of the arena.
        kernels: from `load_ahead`.
        fp8: whether A and B are stored in e4m3, for which there are no recipes.
        draft: packs adapters of the draft model, or None.
    """

    # Once the kernels are loaded, checked content is packed by a recipe, and later adapters of the same structure have
    # only their numbers checked. Without recipes the result is the same, tensor by tensor.
    def __init__(
        self,
        shapes: TargetShapes,
        page_elems: int,
        dtype: torch.dtype,
        memory: HostMemory,
        kernels: Event | None,
        *,
        fp8: bool = False,
        draft: Packer | None = None,
    ) -> None:
        self._shapes = shapes
        self._draft = draft
        self._draft_buffer = ReadBuffer()
        self._page_elems = page_elems
        self._dtype = dtype
        self._memory = memory
        self._fp8 = fp8
        self._buffer = ReadBuffer()
        self._kernels = kernels
        self._all_recipes = Recipes(shapes, page_elems)

    @property
    def _recipes(self) -> Recipes | None:
        """The packer's recipes (tables of copies, by the structure of adapters). None means that the kernels that
        follow them are not loaded yet, or that there are none."""
        return self._all_recipes if self._kernels is not None and self._kernels.is_set() else None

    def read(self, path: str) -> PeftFolder:
        """Read an adapter (see `read_adapter`); its tensors are not checked yet. The result is valid until this thread
        reads another one. Raises AdapterError if it cannot be read or its configuration cannot be served."""
        read = read_adapter(Path(path), self._shapes.max_file_bytes, self._shapes.gguf, self._buffer)
        folder = self._shapes.reduce(read)
        shapes = (self._draft or self)._shapes
        draft = read_draft(Path(path), shapes.max_file_bytes, shapes.gguf, self._draft_buffer)
        return folder.with_draft(shapes.reduce(draft)) if draft else folder

    def check(self, folder: PeftFolder) -> HostAdapter:
        """Check an adapter's tensors, and return its hash, largest rank, changed projections and packed size. Raises
        AdapterError if the adapter cannot be served."""
        host = self._check(folder)
        if folder.draft is None or self._draft is None:
            return host
        try:
            draft = self._draft.check(folder.draft)
        except AdapterError as error:
            raise AdapterError(f"its adapter of the draft model cannot be served: {error}") from error.__cause__
        return replace(host, num_pages=host.num_pages + draft.num_pages, num_bytes=host.num_bytes + draft.num_bytes)

    def _check(self, folder: PeftFolder) -> HostAdapter:
        recipes = self._recipes
        recipe = recipes.known(folder) if recipes else None
        if recipe is not None and self._is_sound(recipe, folder.data):
            return self._describe(folder, recipe.ranks, recipe.layout)
        loaded = check_peft(folder, self._shapes)
        return self._describe(folder, loaded.ranks, self._layout(loaded))

    def _describe(self, folder: PeftFolder, ranks: npt.NDArray[np.int32], layout: AdapterLayout) -> HostAdapter:
        """Describe an adapter of these ranks (int32 [layers, targets]). Its bytes are those of its pages, on the
        pipeline stage where pages are largest, and of its layout, which has 5 MB with 48 layers of 128 experts."""
        page_bytes = self._shapes.shard.most_elements(self._page_elems) * self._dtype.itemsize
        sizes = layout.num_pages, layout.num_pages * page_bytes + layout.num_bytes
        touched = touched_names(self._shapes.targets, ranks)
        settings = folder.settings
        largest = int(ranks.max())
        return HostAdapter(folder.adapter_hash, largest, touched, *sizes, settings.invocation, settings.warnings)

    def _is_sound(self, recipe: Recipe, data: memoryview) -> bool:
        """Return whether an adapter's weights file, whose structure has this recipe, has the right length, and numbers
        that are finite before and after scaling. If not, the caller makes a full check, which says why."""
        from lora_kernels.cpu.numba_pack import is_finite

        if len(data) != recipe.end:
            return False
        return is_finite(np.frombuffer(data, recipe.source, offset=recipe.start), recipe.largest_scale)

    @torch.inference_mode()
    def pack(self, folder: PeftFolder) -> PackedAdapter:
        """Allocate a blob in host memory, pack an adapter into it, and return it with its layout. `folder` must have
        been checked, now or when it was loaded. The blob is freed if packing fails."""
        packed = self._pack(folder)
        if folder.draft is None or self._draft is None:
            return packed
        try:
            return replace(packed, draft=self._draft.pack(folder.draft))
        except BaseException:
            self._memory.give(packed.blob)
            raise

    def _pack(self, folder: PeftFolder) -> PackedAdapter:
        recipes = self._recipes
        recipe = recipes.find(folder) if recipes else None
        if recipe is not None:
            return self._packed(folder.adapter_hash, recipe.layout, partial(self._follow, recipe, folder.data))
        loaded = check_peft(folder, self._shapes)
        layout = self._layout(loaded)
        part = self._shapes.shard
        blocks = {
            own: part.block(own[1], block) for place, block in loaded.blocks.items() if (own := part.place(place))
        }
        scales = {own: part.scales(own[1], tile) for place, tile in loaded.scales.items() if (own := part.place(place))}
        rows = loaded.tokens.rows if loaded.tokens and layout.tokens else ()
        contents = pack_adapter(layout, blocks, self._page_elems, self._dtype, scales, rows)
        return self._packed(folder.adapter_hash, layout, lambda blob: blob.fill(contents))

    def _packed(self, adapter_hash: str, layout: AdapterLayout, fill: Callable[[Blob], None]) -> PackedAdapter:
        blob = self._memory.take(layout.num_pages)
        try:
            fill(blob)
        except BaseException:
            self._memory.give(blob)
            raise
        return PackedAdapter(adapter_hash, layout, blob)

    def _layout(self, loaded: LoadedAdapter) -> AdapterLayout:
        widths = self._shapes.packed_widths
        tokens = loaded.tokens.ids if loaded.tokens else None
        layout = self._shapes.shard.layout
        try:
            return layout(loaded.ranks, widths, self._page_elems, loaded.scaled, self._fp8, tokens)
        except ValueError as error:
            raise AdapterError(f"{error}: raise engine.block_size, with which pages grow, or lower the rank") from error

    def _follow(self, recipe: Recipe, data: memoryview, blob: Blob) -> None:
        """Pack an adapter, whose weights file is `data`, into `blob` as its recipe says."""
        from lora_kernels.cpu.numba_pack import pack_tiles

        words = blob.memory.view(torch.uint16) if self._dtype is torch.bfloat16 else blob.memory
        source = np.frombuffer(data, recipe.source, offset=recipe.start)
        pack_tiles(source, recipe.tiles_in(blob), recipe.scales, words.view(-1).numpy())
