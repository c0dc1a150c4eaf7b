"""Converts adapter folders, as PEFT saves them, to checked fp32 blocks, or refuses them with the reason. Nothing is
guessed or left out, and files are read once, so that the hashed bytes are the served bytes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, deserialize
from torch import Tensor

from engine.model.adapters.peft.dora import Block, fold_magnitude
from engine.model.adapters.peft.folder import PeftFolder, read_adapter
from engine.model.adapters.peft.hints import MLX_KEY, check_gathered, damaged
from engine.model.adapters.peft.settings import AdapterError, PeftSettings, short
from engine.model.adapters.peft.targets import TargetShapes
from engine.model.adapters.peft.tokens import (
    KnownRows,
    TrainedRows,
    read_rows,
    refuse_changed,
    split_stored,
    split_tokens,
)
from engine.model.adapters.shard import Place
from engine.model.layers.lora import FIRST_EXPERT, ROUTER, touched_names
from engine.process.adapter_files import CONFIG_FILE, FROM_MLX, WEIGHTS_FILE

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
KEY = re.compile(
    r"base_model\.model\.(?P<module>.+)\.lora_(?:"
    r"(?P<side>[AB])(?:\.(?P<name>[^.]+))?\.weight|"
    r"(?P<magnitude>magnitude_vector)(?:\.(?!weight$)(?P<dora_name>[^.]+))?(?:\.weight)?|"
    r"(?P<scale>output_scale)\.weight)"
)

PREFIX = "base_model.model."
"""Beginning of the names that PEFT gives to tensors."""
MAGNITUDE, OUTPUT_SCALE = "magnitude_vector", "output_scale"
"""Parts of adapters that scale base outputs. The second stands only in what `as_lora` has converted."""
MOST_NAMED = 12
"""Maximum number of projections that error messages name: enough for all but those of the second and later experts."""
Raw = Mapping[str, Any]
"""A tensor as it is stored in the file: dtype name, shape, data."""


@dataclass(frozen=True, slots=True, eq=False)
class LoadedAdapter:
    """A checked adapter, ready to be packed."""

    adapter_hash: str
    """Content hash of the configuration fields that affect the computation, and of the weights file."""
    blocks: Mapping[Place, Block]
    """(layer, target index) -> (A fp32 [rank, in_features], B fp32 [out_features, rank] times the LoRA scale and, for
    DoRA, magnitude / norm)."""
    scales: Mapping[Place, Tensor]
    """(layer, target index) -> scale tile, fp32 [2, out_features]; empty unless it is a DoRA adapter."""
    ranks: npt.NDArray[np.int32]
    """int32 [layers, targets]. 0 where the adapter does not touch the projection."""
    scaled: npt.NDArray[np.bool_]
    """bool [layers, targets]. True where a projection has an entry in `scales`."""
    target_modules: tuple[str, ...]
    """Names of the projections that the adapter changes in any layer, in the model's order."""
    rank: int
    """The largest of `ranks`."""
    base_model: str
    """Name of the base model in the adapter's configuration; may be empty."""
    tokens: TrainedRows | None = None
    """Rows of the embedding and of the head that stand in place of the base model's. None means that the adapter
    replaces none."""


def load_peft(path: Path, shapes: TargetShapes) -> LoadedAdapter:
    """Read and check an adapter (see `read_adapter`), and return its weights as fp32 blocks. Raises AdapterError if it
    is no LoRA adapter that fits the model and can be served as PEFT would serve it."""
    return check_peft(shapes.reduce(read_adapter(path, shapes.max_file_bytes, shapes.gguf)), shapes)


def check_peft(folder: PeftFolder, shapes: TargetShapes) -> LoadedAdapter:
    """Check every tensor of a folder and convert it to fp32. Raises AdapterError if the file is damaged, does not fit
    the model or the configuration, is incomplete, or has NaN or infinite values, also once scaled."""
    settings = folder.settings
    base = KnownRows(shapes.base_linears, shapes.changed, folder.adapter_hash)
    stored, rest = split_stored(_parse(folder.data), settings)
    refuse_changed(stored, shapes.ends, base, _tensor)
    found, tensors = split_tokens(rest, settings)
    tokens = read_rows(found, settings, shapes.ends, base, _tensor)
    pairs = pair_tensors(tensors, settings, shapes)
    # Of transformers 4, or with names that parameters of experts have got (see `PeftSettings.exact`).
    names_experts = settings.exact is not None or not settings.has_version
    changes_experts = names_experts or any(target >= ROUTER for _, target in pairs)
    wanted = _wanted(settings, shapes, changes_experts=changes_experts)
    _check_coverage(pairs, wanted, settings, shapes)
    of_experts = [module for (_, target), module in wanted.items() if target >= FIRST_EXPERT]
    if (settings.use_dora or settings.scales_outputs) and of_experts:
        raise AdapterError(f"DoRA and (IA)³ on experts ({of_experts[0]}) are not supported; retrain them as plain LoRA")
    blocks = {place: _block(pairs[place], place, settings, shapes) for place in wanted}
    scales: dict[Place, Tensor] = {}
    if settings.scales_outputs:
        scales = {place: _scale_tile(pairs[place], place, shapes) for place in wanted}
    if settings.use_dora:
        for place, block in blocks.items():
            blocks[place], scales[place] = _fold_magnitude(pairs[place], block, place, shapes)
    return replace(_assemble(folder.adapter_hash, blocks, scales, settings, shapes), tokens=tokens)


def _assemble(
    adapter_hash: str,
    blocks: dict[Place, Block],
    scales: dict[Place, Tensor],
    settings: PeftSettings,
    shapes: TargetShapes,
) -> LoadedAdapter:
    ranks = np.zeros((shapes.layers, len(shapes.targets)), dtype=np.int32)
    for place, (a, _) in blocks.items():
        ranks[place] = a.shape[0]
    touched = touched_names(shapes.targets, ranks)
    scaled = ranks.astype(np.bool_) & bool(scales)
    return LoadedAdapter(adapter_hash, blocks, scales, ranks, scaled, touched, int(ranks.max()), settings.base_model)


def _parse(data: memoryview) -> dict[str, Raw]:
    try:
        tensors = dict(sorted(deserialize(bytes(data))))  # the library's order differs from call to call
    except SafetensorError as error:
        raise damaged(data, error) from error
    check_gathered({name: raw["shape"] for name, raw in tensors.items()})
    return tensors


def _wanted(settings: PeftSettings, shapes: TargetShapes, *, changes_experts: bool) -> dict[Place, str]:
    """Map the projections that the configuration targets to their paths, in the order in which they are computed.
    Raises AdapterError if it targets none, missing layers, or only experts without having weights of experts."""
    # Experts and routers are no modules in transformers 5: unless the adapter `changes_experts`, names such as
    # gate_proj are those of other MLPs.
    if beyond := sorted(layer for layer in settings.layers if layer >= shapes.layers):
        raise AdapterError(f"layers_to_transform names layer {beyond[0]}, {_other_base(settings, shapes)}")
    places = shapes.places().items()
    modules = {place: module for module, place in places if changes_experts or place[1] < ROUTER}
    wanted = {place: module for place, module in modules.items() if settings.targets(module)}
    if not wanted:
        names = ", ".join(shapes.targets[:MOST_NAMED])
        raise AdapterError(f"target_modules match none of the model's projections ({names})")
    if not changes_experts:
        _refuse_names_of_experts(settings, shapes, {_last(module) for module in wanted.values()})
    return wanted


def _refuse_names_of_experts(settings: PeftSettings, shapes: TargetShapes, served: set[str]) -> None:
    """Raises AdapterError if the settings target an expert or router whose name is not among the `served` ones. PEFT
    turns such names into `target_parameters` with transformers 5."""
    targets = settings.target_modules
    if isinstance(targets, frozenset) and {_last(name) for name in targets} <= served:
        return
    for module, (_, target) in shapes.places().items():
        if target >= ROUTER and _last(module) not in served and settings.targets(module):
            raise AdapterError(
                f"{CONFIG_FILE} targets {module}, but there are no weights of experts or routers: the file is "
                f"incomplete, or {_last(module)!r} did not count when the adapter was trained; then remove it from "
                "target_modules"
            )


def _last(path: str) -> str:
    return path.rpartition(".")[2]


def _other_base(settings: PeftSettings, shapes: TargetShapes) -> str:
    names = f" ({' or '.join(shapes.base_names)})" if shapes.base_names else ""
    trained_on = f" It was trained on {settings.base_model!r}." if settings.base_model else ""
    return f"and this model{names} has layers 0 to {shapes.layers - 1}: an adapter of another base?{trained_on}"


def pair_tensors(
    tensors: Mapping[str, Raw], settings: PeftSettings, shapes: TargetShapes
) -> dict[Place, dict[str, Raw]]:
    """Group tensors by projection and part ("A", "B" or "magnitude_vector"). Raises AdapterError if one belongs to no
    projection, to a second adapter, or to DoRA although the configuration does not say so."""
    places, named = shapes.places(), dict[str | None, str]()
    pairs: dict[Place, dict[str, Raw]] = {}
    for key, raw in tensors.items():
        found = KEY.fullmatch(key)
        is_ours = found is None or not found["scale"] or settings.scales_outputs
        if found is None or not is_ours or found["module"] not in places:
            raise AdapterError(_stranger(key, settings, shapes))
        if found["magnitude"] and not settings.use_dora:
            raise AdapterError(f"{key!r} belongs to a DoRA adapter, and {CONFIG_FILE} does not say use_dora")
        named.setdefault(found["name"] or found["dora_name"], key)
        part, pair = found["side"] or found["magnitude"] or OUTPUT_SCALE, pairs.setdefault(places[found["module"]], {})
        if part in pair or len(named) > 1:
            keys = " and ".join(repr(key[:200]) for key in dict.fromkeys((*named.values(), key)))
            raise AdapterError(f"{WEIGHTS_FILE} holds more than one adapter ({keys})")
        pair[part] = raw
    return pairs


def _stranger(key: str, settings: PeftSettings, shapes: TargetShapes) -> str:
    """Return the message of the error for a tensor, named `key`, that belongs to no projection of the model."""
    shown, layer = repr(key[:200]), re.search(r"\.layers\.(\d{1,9})\.", key)
    if MLX_KEY.search(key):
        return f"{WEIGHTS_FILE} has {shown}, which makes it {FROM_MLX}"
    if key.endswith(".bias"):
        return f"{shown}: trained biases are not supported; retrain with bias='none' and lora_bias=false"
    if "lora_embedding_" in key or "embed_tokens" in key or "lm_head" in key:
        return f"{shown}: adapting the embeddings or lm_head is not supported; retrain with trainable_token_indices"
    if layer and int(layer[1]) >= shapes.layers:
        return f"{shown} is of layer {int(layer[1])}, {_other_base(settings, shapes)}"
    if (inner := re.search(r"(.*?)(?:model\.)?layers\.\d", key)) and inner[1] != PREFIX:
        return (
            f"{shown} matches no module: its prefix is {short(inner[1])}, and PEFT's names begin with {PREFIX!r}; save "
            "the adapter from the model without its wrapper, or rename its tensors"
        )
    return f"{shown} matches no module of the model, whose projections are {', '.join(shapes.targets[:MOST_NAMED])}"


def _check_coverage(
    pairs: Mapping[Place, Mapping[str, Raw]], wanted: Mapping[Place, str], settings: PeftSettings, shapes: TargetShapes
) -> None:
    parts = ("A", "B", *([MAGNITUDE] if settings.use_dora else ()))
    for place, pair in sorted(pairs.items()):
        if place not in wanted:
            raise AdapterError(f"there are weights for {shapes.module(place)}, which {CONFIG_FILE} does not target")
        if missing := [part for part in parts if part not in pair]:
            raise AdapterError(f"{shapes.module(place)} has no lora_{missing[0]}; save the adapter again")
    if absent := [module for place, module in wanted.items() if place not in pairs]:
        raise settings.without_weights(absent)


def _block(pair: Mapping[str, Raw], place: Place, settings: PeftSettings, shapes: TargetShapes) -> Block:
    module = shapes.module(place)
    rank, (in_features, out_features) = settings.rank_of(module), shapes.widths[place[1]].tolist()
    a = _tensor(pair["A"], f"{module}.lora_A", (rank, in_features), rank_axis=0)
    b = _tensor(pair["B"], f"{module}.lora_B", (out_features, rank), rank_axis=1)
    return a, _finite(b * settings.scale_of(module), f"{module}.lora_B times its scale")


def _fold_magnitude(pair: Mapping[str, Raw], block: Block, place: Place, shapes: TargetShapes) -> tuple[Block, Tensor]:
    module = shapes.module(place)
    name = f"{module}.lora_{MAGNITUDE}"
    magnitude = _tensor(pair[MAGNITUDE], name, (int(shapes.widths[place[1], 1]),))
    folded, scales = fold_magnitude(block, magnitude, *shapes.base_linears(module))
    _finite(scales, f"{name} over the norm of its weights")
    return (folded[0], _finite(folded[1], f"{module}.lora_B times its scales")), scales


def _scale_tile(pair: Mapping[str, Raw], place: Place, shapes: TargetShapes) -> Tensor:
    """Return the scale tile (lora_kernels/dora.py) of one projection that (IA)³ scales, fp32 [2, out_features]. (IA)³
    scales outputs together with their bias."""
    scale = _tensor(pair[OUTPUT_SCALE], f"{shapes.module(place)}'s scale", (int(shapes.widths[place[1], 1]),))
    return torch.stack((scale - 1, torch.zeros_like(scale)))


def _tensor(raw: Raw, name: str, shape: tuple[int, ...], rank_axis: int | None = None) -> Tensor:
    """Convert a tensor to fp32. Raises AdapterError, which names the tensor `name`, unless it has exactly the given
    shape, a floating dtype and only finite values. A difference at `rank_axis` alone is reported as a wrong rank."""
    found = tuple(raw["shape"])
    if rank_axis is not None and _differ_only_at(rank_axis, found, shape):
        raise AdapterError(f"{name} has rank {found[rank_axis]}, and {CONFIG_FILE} says {shape[rank_axis]}")
    if found != shape:
        raise AdapterError(f"{name} is {list(found)}, and the model needs {list(shape)}: an adapter of another base?")
    if raw["dtype"] not in DTYPES:
        raise AdapterError(f"{name} is of type {raw['dtype']}; save it as one of {', '.join(DTYPES)}")
    return _finite(torch.frombuffer(raw["data"], dtype=DTYPES[raw["dtype"]]).view(shape).float(), name)


def _differ_only_at(axis: int, found: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    return len(found) == len(shape) and [i for i in range(len(shape)) if found[i] != shape[i]] == [axis]


def _finite(tensor: Tensor, name: str) -> Tensor:
    if not bool(torch.isfinite(tensor).all()):
        raise AdapterError(f"{name} has NaN or infinite values: the training run diverged; use an earlier checkpoint")
    return tensor
