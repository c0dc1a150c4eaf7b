"""The projections of a base model that adapters may change, by which adapters are read and checked."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from engine.model.adapters.peft.dora import BaseLinears, base_linears
from engine.model.adapters.peft.experts import split_experts
from engine.model.adapters.peft.folder import PeftFolder
from engine.model.adapters.peft.fused import split_fused
from engine.model.adapters.peft.gguf import MAX_HEADER_BYTES, GgufBase
from engine.model.adapters.peft.kinds import as_lora
from engine.model.adapters.peft.settings import AdapterError
from engine.model.adapters.peft.tokens import NO_ENDS, ChangedTokens, Ends
from engine.model.adapters.shard import WHOLE_ADAPTERS, AdapterShard, Place, shard_adapters
from engine.model.layers.lora import ROUTER, dense_path, target_names, target_path, target_widths
from engine.model.ranks.shard import WHOLE, Shard
from engine.model.spec.config import ModelSpec
from engine.model.spec.fused import fused_name
from engine.model.weights.reader import WeightSource
from lora_kernels.layout import MAX_RANK

NO_GGUF = GgufBase()


@dataclass(frozen=True, slots=True)
class TargetShapes:
    """The projections of the base model that can be adapted."""

    layers: int
    """Decoder layers of the model."""
    targets: tuple[str, ...]
    """Names of the projections of one layer, in the order of `widths` and of the LoRA table."""
    widths: npt.NDArray[np.int32]
    """int32 [targets, 2]. (in_features, out_features) of each projection."""
    base_linears: BaseLinears
    """The projections' base weights, which DoRA needs for its norms."""
    base_names: tuple[str, ...] = ()
    """Names and paths of the base model; used only to make messages clearer."""
    gguf: GgufBase = NO_GGUF
    """What the form of adapters in GGUF files depends on."""
    shard: AdapterShard = WHOLE_ADAPTERS
    """The part of checked adapters that this rank packs."""
    fused: bool = False
    """True means that adapters have the projections of `FUSED` (engine/model/spec/fused.py) in place of their parts."""
    spec: ModelSpec | None = None
    """Shape of a model with experts. None means that every layer has one MLP."""
    ends: Ends = NO_ENDS
    """Shape of the embedding and the head, of which adapters may replace rows."""
    changed: ChangedTokens = field(default_factory=ChangedTokens, compare=False)
    """Remembers which tokens' rows checked adapters change."""
    most_numbers: int | None = None
    """The most numbers that an adapter can have and still fit into host memory. None means any number."""

    @property
    def packed_widths(self) -> npt.NDArray[np.int32]:
        """(in_features, out_features) of each projection's part that is packed, int32 [targets, 2]."""
        return self.shard.widths(self.widths)

    @property
    def max_file_bytes(self) -> int:
        """Maximum size in bytes of an adapter's weights file. A larger one would not fit into host memory, even if it
        has layers saved whole (`modules_to_save`), of which only changed rows are kept."""
        most, saved = self.layers * MAX_RANK * int(self.widths.sum()), 2 * self.ends.vocab_size * self.ends.hidden_size
        if self.most_numbers is not None:
            most = min(most, self.most_numbers)
        return MAX_HEADER_BYTES + (most + saved) * torch.float64.itemsize

    def reduce(self, folder: PeftFolder) -> PeftFolder:
        """Convert an adapter of another kind, or with fused projections or bare parameters of experts, to a plain LoRA
        of `targets`. Raises AdapterError if that is not exact, or they are not the model's."""
        folder = as_lora(folder, self.stored_widths())
        if self.spec is not None:
            modules = [path for path, (_, target) in self.places().items() if target < ROUTER]
            return split_experts(folder, self.spec, modules)
        if parameters := folder.settings.parameters:
            raise AdapterError(f"target_parameters names {min(parameters)[:120]!r}, and this model has no experts")
        if not self.fused:
            return folder
        return split_fused(folder, dict(zip(self.targets, self.widths[:, 1].tolist(), strict=True)))

    def stored_widths(self) -> dict[str, tuple[int, int]]:
        """Map the path of every module that adapters may change, as the base model has it (fused or not), to its
        in_features and out_features."""
        widths: dict[str, tuple[int, int]] = {}
        for module, (_, target) in self.places().items():
            path = fused_name(module) if self.fused else module
            in_features, out_features = self.widths[target].tolist()
            widths[path] = (in_features, out_features + (widths[path][1] if path in widths else 0))
        return widths

    def module(self, place: Place) -> str:
        """Return the path of a projection in the Hugging Face model, such as `model.layers.3.self_attn.q_proj`. Raises
        KeyError if its layer lacks it."""
        path = self._path(place)
        if path is None:
            raise KeyError(f"layer {place[0]} has no {self.targets[place[1]]}")
        return path

    def _path(self, place: Place) -> str | None:
        return dense_path(*place) if self.spec is None else target_path(self.spec, self.targets, *place)

    def places(self) -> dict[str, Place]:
        """Map the path of every projection that adapters may change to (layer, target index), in the order in which
        they are computed."""
        places = ((layer, target) for layer in range(self.layers) for target in range(len(self.targets)))
        return {path: place for place in places if (path := self._path(place))}


def target_shapes(spec: ModelSpec, source: WeightSource, name: str, shard: Shard = WHOLE) -> TargetShapes:
    """Return the projections of a model of this shape, whose weights `source` reads and whose folder has this name.
    `shard` is this rank's part of the model; `spec` and `source` are the whole model's."""
    linears, gguf = base_linears(spec, source), GgufBase(spec.model_type, spec.head_dim)
    part, names = shard_adapters(shard, spec), target_names(spec)
    of_experts = spec if spec.experts else None
    ends = Ends(spec.vocab_size, spec.hidden_size, spec.tied_embeddings)
    shapes = spec.layers, names, target_widths(spec), linears
    return TargetShapes(*shapes, (name,), gguf, part, spec.fused, of_experts, ends)
