"""Recipes for packing adapters without examining every tensor again: tables of the source and destination of each tile,
for all adapters with the same configuration and header. Only checked content may be packed like this."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.model.adapters.peft.folder import PeftFolder
from engine.model.adapters.peft.loader import pair_tensors
from engine.model.adapters.peft.settings import PeftSettings
from engine.model.adapters.peft.targets import TargetShapes
from engine.model.adapters.shard import Place
from engine.model.memory.host import Blob
from lora_kernels.layout import RANK_TILE, SIDE_A, SIDE_B, AdapterLayout

MOST_KNOWN = 64
"""Maximum number of structures remembered, one for each way in which an operator trains. Each is some 100 KB."""
MOST_BYTES = 64 << 20
"""Maximum size in bytes of all structures but one: with adapters of experts, one may have 10 MB."""
SOURCES: dict[str, npt.DTypeLike] = {"BF16": np.uint16, "F32": np.float32}
"""Stored types of weights that recipes support, and the numpy types in which they are read."""

Structure = tuple[bytes, bool, bytes]


@dataclass(frozen=True, slots=True, eq=False)
class Recipe:
    """The copies by which adapters of one structure (the same configuration and the same header of the weights file)
    are packed."""

    layout: AdapterLayout
    """Layout of the rank's part."""
    ranks: npt.NDArray[np.int32]
    """int32 [layers, targets], of all layers."""
    largest_scale: float
    """The largest LoRA scale of any projection, and at least 1."""
    start: int
    end: int
    """`start` and `end`: byte range of the numbers in the weights file."""
    source: npt.DTypeLike
    """Numpy type in which the numbers are read."""
    tiles: npt.NDArray[np.int64]
    """int64 [tiles, 6]. Source and destination of each tile; see `pack_tiles`."""
    scales: npt.NDArray[np.float32]
    """fp32 [tiles]. Factor of each tile: 1 for A, the LoRA scale for B."""

    @property
    def num_bytes(self) -> int:
        """Size of the recipe's arrays in bytes."""
        return self.layout.num_bytes + self.ranks.nbytes + self.tiles.nbytes + self.scales.nbytes

    def tiles_in(self, blob: Blob) -> npt.NDArray[np.int64]:
        """Return the recipe's `tiles` for packing into `blob`: a copy whose last column, offsets in the blob, is mapped
        to offsets in the blob's memory."""
        return np.column_stack([self.tiles[:, :-1], blob.places(self.tiles[:, -1])])


class Recipes:
    """Cache of the recipes of the most recently packed structures of adapters, up to MOST_KNOWN and MOST_BYTES.
    Thread-safe."""

    def __init__(self, shapes: TargetShapes, page_elems: int) -> None:
        self._shapes = shapes
        self._page_elems = page_elems
        self._known: OrderedDict[Structure, Recipe | None] = OrderedDict()
        self._lock = Lock()

    def known(self, folder: PeftFolder) -> Recipe | None:
        """Return the cached recipe of the folder's structure if an adapter of it was packed, and so checked, before.
        None means that no such adapter was, or that the structure has no recipe."""
        with self._lock:
            return self._known.get(_structure(folder))

    def find(self, folder: PeftFolder) -> Recipe | None:
        """Return the recipe of a checked folder's structure, and work it out if it is new. None means that tensors need
        more than a copy, are not all bf16 or all fp32, or are not aligned."""
        key = _structure(folder)
        with self._lock:
            if key in self._known:
                self._known.move_to_end(key)
                return self._known[key]
        recipe = self._work_out(folder.settings, key[-1])
        with self._lock:
            self._known[key] = recipe
            while len(self._known) > MOST_KNOWN or (len(self._known) > 1 and self._num_bytes() > MOST_BYTES):
                self._known.popitem(last=False)
        return recipe

    def _num_bytes(self) -> int:
        of_recipes = sum(recipe.num_bytes for recipe in self._known.values() if recipe is not None)
        return of_recipes + sum(len(settings) + len(header) for settings, _, header in self._known)

    def _work_out(self, settings: PeftSettings, header: bytes) -> Recipe | None:
        tensors = {name: raw for name, raw in json.loads(header[8:]).items() if name != "__metadata__"}
        types = {raw["dtype"] for raw in tensors.values()}
        if not settings.has_only_deltas or len(types) != 1 or not types <= SOURCES.keys():
            return None
        source = SOURCES[types.pop()]
        pairs = pair_tensors(tensors, settings, self._shapes)
        ranks = self._ranks(pairs)
        layout = self._shapes.shard.layout(ranks, self._shapes.packed_widths, self._page_elems)
        largest = max((abs(settings.scale_of(self._shapes.module(place))) for place in pairs), default=1.0)
        rows = list(self._tiles(pairs, settings, layout, np.dtype(source).itemsize))
        if any(raw["data_offsets"][0] % np.dtype(source).itemsize for raw in tensors.values()):
            return None
        tiles, scales = np.array([tile for tile, _ in rows], np.int64), [scale for _, scale in rows]
        end = len(header) + max(raw["data_offsets"][1] for raw in tensors.values())
        fields = (layout, ranks, max(1.0, largest), len(header), end, source)
        return Recipe(*fields, tiles.reshape(-1, 6), np.array(scales, np.float32))

    def _ranks(self, pairs: Mapping[Place, Mapping[str, Any]]) -> npt.NDArray[np.int32]:
        ranks = np.zeros((self._shapes.layers, len(self._shapes.targets)), dtype=np.int32)
        for place, pair in pairs.items():
            ranks[place] = pair["A"]["shape"][0]
        return ranks

    def _tiles(
        self, pairs: Mapping[Place, Mapping[str, Any]], settings: PeftSettings, layout: AdapterLayout, itemsize: int
    ) -> Iterator[tuple[tuple[int, ...], float]]:
        """Yield the copies of a recipe: for each tile of the rank's layers, its row of `Recipe.tiles` and its scale.
        A's rows are copied as they are, B's columns become rows."""
        widths = self._shapes.packed_widths.tolist()
        for place, pair in pairs.items():
            own = self._shapes.shard.place(place)
            if own is None:
                continue
            layer, target = own
            rank, stride = int(layout.ranks[own]), int(self._shapes.widths[target, 0])
            (width_in, width_out), (skip_in, skip_out) = widths[target], self._shapes.shard.starts(target)
            scale = settings.scale_of(self._shapes.module(place))
            first_a, first_b = (pair[side]["data_offsets"][0] // itemsize for side in "AB")
            for tile, row in enumerate(range(0, rank, RANK_TILE)):
                rows = min(RANK_TILE, rank - row)
                to_a, to_b = layout.offsets[layer, target, (SIDE_A, SIDE_B), tile].tolist()
                yield (first_a + row * stride + skip_in, stride, 1, rows, width_in, to_a), 1.0
                yield (first_b + row + skip_out * rank, 1, rank, rows, width_out, to_b), scale


def _structure(folder: PeftFolder) -> Structure:
    """Return the key of a folder's structure: the canonical configuration, whether it asks for DoRA (in which case a
    file without magnitudes is refused), and the header of the weights file, which ends where the numbers begin."""
    header = bytes(folder.data[: 8 + int.from_bytes(folder.data[:8], "little")])
    return folder.settings.canonical(), folder.settings.use_dora, header
