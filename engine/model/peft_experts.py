"""Splits an adapter's matrices of bare parameters (`target_parameters`) into those of experts' projections.

transformers 5 keeps the experts of a layer in two parameters, `mlp.experts.gate_up_proj` and `mlp.experts.down_proj`,
and the router in `mlp.gate.weight`. PEFT has for a parameter A [experts * rank, in_features], expert by expert, and B
[out_features, rank * experts], in which the columns of one rank lie together. Where both parameters of a layer are
changed, the matrices of the first are named `experts.base_layer`. Source: PEFT 0.21's lora.ParamWrapper.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from engine.model.peft_folder import PeftFolder
from engine.model.peft_fused import by_name
from engine.model.peft_settings import AdapterError, PeftSettings
from engine.model.spec import ModelSpec
from engine.process.adapter_files import WEIGHTS_FILE

PARAMETERS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""The experts' parameters, in the order in which PEFT wraps them, and the projections that lie in each."""
EXPERTS = re.compile(
    r"base_model\.model\.(?P<path>model\.layers\.(?P<layer>\d{1,9})\.mlp\.experts)(?P<inner>\.base_layer)?"
    r"\.lora_(?P<side>[AB])(?P<end>(?:\.[^.]+)?\.weight)"
)
ROUTER = "model.layers.{}.mlp.gate"
Exact = dict[str, tuple[int, float]]
"""See `PeftSettings.exact`."""


def split_experts(folder: PeftFolder, spec: ModelSpec, modules: Sequence[str]) -> PeftFolder:
    """Returns an adapter whose tensors and settings are those of modules, each expert's projections among them. Its
    hash stays as it is. An adapter without `target_parameters` is returned as it is.

    Args:
        spec: the shape of the model, which has experts.
        modules: the paths of all modules that can be adapted, without those of experts and routers.

    Raises:
        AdapterError: the file is damaged or has a projection twice, a parameter cannot be adapted, or a matrix is not
            of the model's experts.
    """
    settings = folder.settings
    if not settings.parameters:
        return folder
    exact = _exact(settings, spec, modules)
    try:
        tensors = load(bytes(folder.data))
    except (SafetensorError, KeyError) as error:
        raise AdapterError(f"{WEIGHTS_FILE} is damaged or cut short ({error}); copy it again") from error
    split = by_name(part for key, tensor in tensors.items() for part in _parts(key, tensor, settings, spec))
    return replace(folder, settings=replace(settings, exact=exact), data=memoryview(save(split)))


def _exact(settings: PeftSettings, spec: ModelSpec, modules: Sequence[str]) -> Exact:
    """Returns the rank and alpha of each module that the settings change. Raises AdapterError if a parameter that they
    name is not one of experts or a router."""
    exact: Exact = {module: settings.rank_and_alpha(module) for module in modules if settings.targets(module)}
    paths = dict[str, list[str]]()
    for layer in filter(spec.has_experts, range(spec.layers)):
        for parameter, names in PARAMETERS.items():
            paths[f"model.layers.{layer}.mlp.experts.{parameter}"] = _projections(spec, layer, names)
        paths[f"{ROUTER.format(layer)}.weight"] = [spec.stored_name(ROUTER.format(layer))]
    for path, of_path in paths.items():
        if settings.changes_parameter(path):
            exact |= dict.fromkeys(of_path, settings.rank_and_alpha(path))
    known = [name for name in settings.parameters if any(path == name or path.endswith(f".{name}") for path in paths)]
    if unknown := set(settings.parameters) - set(known):
        raise AdapterError(
            f"target_parameters names {min(unknown)[:120]!r}, which is no parameter of the model's experts or routers "
            "(mlp.experts.gate_up_proj, mlp.experts.down_proj, mlp.gate.weight)"
        )
    return exact


def _projections(spec: ModelSpec, layer: int, names: Sequence[str]) -> list[str]:
    """Returns the paths of projections of all experts of a layer."""
    numbers = range(spec.experts.count if spec.experts else 0)
    paths = (f"model.layers.{layer}.mlp.experts.{number}.{name}" for number in numbers for name in names)
    return [spec.stored_name(path) for path in paths]


def _parts(key: str, tensor: Tensor, settings: PeftSettings, spec: ModelSpec) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of experts' projections, by name, that lie in one of an experts' parameter; other tensors as
    they are."""
    found = EXPERTS.fullmatch(key)
    if found is None or spec.experts is None:
        yield spec.stored_name(key), tensor
        return
    changed = [name for name in PARAMETERS if settings.changes_parameter(f"{found['path']}.{name}")]
    if len(changed) < (2 if found["inner"] else 1):
        raise AdapterError(f"{key[:200]!r} belongs to a parameter that target_parameters does not name")
    parameter, count = changed[0] if found["inner"] else changed[-1], spec.experts.count
    rank = settings.rank_of(f"{found['path']}.{parameter}")
    by_expert = _by_expert(key, tensor, found["side"], count, rank)
    names = PARAMETERS[parameter]
    if found["side"] == "B" and by_expert.shape[1] % len(names):
        raise AdapterError(f"{key[:200]!r} has {by_expert.shape[1]} rows, which {' and '.join(names)} cannot share")
    for number in range(count):
        of_names = [by_expert[number]] * len(names) if found["side"] == "A" else by_expert[number].chunk(len(names))
        for name, part in zip(names, of_names, strict=True):
            module = spec.stored_name(f"{found['path']}.{number}.{name}")
            yield f"base_model.model.{module}.lora_{found['side']}{found['end']}", part.clone()


def _by_expert(key: str, tensor: Tensor, side: str, count: int, rank: int) -> Tensor:
    """Returns A [experts, rank, in_features] or B [experts, out_features, rank]."""
    axis = 0 if side == "A" else 1
    if tensor.dim() != 2 or tensor.shape[axis] != count * rank:
        raise AdapterError(
            f"{key[:200]!r} is {list(tensor.shape)}, and {count} experts of rank {rank} need {count * rank} "
            f"{'rows' if side == 'A' else 'columns'}"
        )
    return tensor.view(count, rank, -1) if side == "A" else tensor.view(-1, rank, count).permute(2, 0, 1)
