"""Which part of an adapter a rank has: that of its part of the base model's projections, in its stage's layers, with
all of A and some outputs of B, or some inputs of A and all of B."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from torch import Tensor

from engine.model.layers.lora import ROUTERS, target_names
from engine.model.ranks.shard import Cut, Shard
from engine.model.spec.config import ModelSpec
from lora_kernels.layout import AdapterLayout, plan_layout
from lora_kernels.token_rows import TokenIds

Place = tuple[int, int]
"""A projection: (layer, target index)."""


@dataclass(frozen=True, slots=True)
class AdapterShard:
    """One rank's part of every adapter of a model that is split by tensor or pipeline parallelism."""

    cuts: tuple[Cut | None, ...] = ()
    """The rank's part of each projection, in the order of the LoRA table; None means the whole projection, as for
    routers. Empty means that the rank has every projection whole."""
    is_first: bool = True
    """True means that this is rank 0 of its stage. Only this rank adds what a sum over ranks must contain once, such as
    DoRA's shifts."""
    stages: tuple[range, ...] = ()
    """The layers of each stage. Empty means that one stage has all layers."""
    stage: int = 0
    """Number of the rank's stage."""

    def place(self, place: Place) -> Place | None:
        """Convert the (layer, target index) of a projection in the whole model to that in the rank's pipeline stage,
        which counts its layers from 0. None means that another stage has the layer."""
        if not self.stages:
            return place
        layer, own = place[0], self.stages[self.stage]
        return (layer - own.start, place[1]) if layer in own else None

    def most_elements(self, page_elems: int) -> int:
        """Return the number of elements of a page on the pipeline stage that has most layers, and so the largest pages.
        `page_elems` is that of a page on this rank."""
        if not self.stages:
            return page_elems
        return page_elems // len(self.stages[self.stage]) * max(map(len, self.stages))

    def layout(
        self,
        ranks: npt.NDArray[np.int32],
        widths: npt.NDArray[np.int32],
        page_elems: int,
        scaled: npt.NDArray[np.bool_] | None = None,
        fp8: bool = False,
        tokens: TokenIds | None = None,
    ) -> AdapterLayout:
        """Return the layout of the rank's part of an adapter: see `plan_layout`. `ranks` and `scaled` are those of all
        layers, `widths` those of the part. Only ranks of the first stage have `tokens`."""
        # An adapter has the same pages in every stage, so their number is that of the stage that needs most.
        if not self.stages:
            return plan_layout(ranks, widths, page_elems, scaled, fp8, tokens)
        layer_elems, layouts = page_elems // len(self.stages[self.stage]), []
        for number, layers in enumerate(self.stages):
            part = slice(layers.start, layers.stop)
            own_scaled = None if scaled is None else scaled[part]
            rows = None if number else tokens
            layouts.append(plan_layout(ranks[part], widths, layer_elems * len(layers), own_scaled, fp8, rows))
        return replace(layouts[self.stage], num_pages=max(layout.num_pages for layout in layouts))

    def _cut(self, target: int) -> Cut | None:
        return self.cuts[target] if self.cuts else None

    def widths(self, widths: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Return (in_features, out_features) of this rank's part of each projection, int32 [targets, 2], from those of
        the whole model."""
        widths = widths.copy()
        for target, cut in enumerate(self.cuts):
            if cut is not None:
                widths[target, 1 - cut.axis] = cut.stop - cut.start
        return widths

    def block(self, target: int, block: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the parts of a projection's A [rank, in_features] and B [out_features, rank] that this rank packs.
        `rank` of the shapes is the LoRA rank."""
        (a, b), cut = block, self._cut(target)
        if cut is None:
            return block
        return (a, b[cut.slice]) if cut.axis == 0 else (a[:, cut.slice], b)

    def scales(self, target: int, scales: Tensor) -> Tensor:
        """Return the rank's part of a projection's scale tile [2, out_features] (see lora_kernels/dora.py). Where ranks
        add up their outputs, each applies the scale, and only rank 0 adds the shift."""
        cut = self._cut(target)
        if cut is None:
            return scales
        if cut.axis == 0:
            return scales[:, cut.slice]
        if self.is_first:
            return scales
        scales = scales.clone()
        scales[1] = 0
        return scales

    def starts(self, target: int) -> tuple[int, int]:
        """Return (input, output): the indices in the whole projection, LoRA target `target`, at which this rank's part
        of it begins."""
        cut = self._cut(target)
        if cut is None:
            return 0, 0
        return (0, cut.start) if cut.axis == 0 else (cut.start, 0)


WHOLE_ADAPTERS = AdapterShard()
"""The `AdapterShard` of an engine with one rank: all of every adapter."""


def shard_adapters(shard: Shard, spec: ModelSpec) -> AdapterShard:
    """Return which part of every adapter a rank has, whose part of the model is `shard`. `spec` is the whole model's
    shape."""
    cuts: tuple[Cut | None, ...] = ()
    if shard.size > 1:
        cuts = tuple(None if name in ROUTERS else shard.columns(name, spec) for name in target_names(spec))
    return AdapterShard(cuts, shard.rank == 0, shard.stages, shard.stage)
