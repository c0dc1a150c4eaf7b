"""Splits an adapter's matrices of bare parameters (`target_parameters`), in which transformers 5 keeps all experts of a
layer, into those of experts' projections. Source: PEFT 0.21's lora.ParamWrapper."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from safetensors.torch import save
from torch import Tensor

from engine.model.adapters.peft.folder import PeftFolder
from engine.model.adapters.peft.fused import by_name
from engine.model.adapters.peft.hints import load_tensors
from engine.model.adapters.peft.settings import AdapterError, PeftSettings
from engine.model.spec.config import ExpertsSpec, ModelSpec

# PEFT has for a parameter A [experts * rank, in_features], expert by expert, and B [out_features, rank * experts], in
# which the columns of one rank lie together. Where both parameters of a layer are changed, the matrices of the first
# are named `experts.base_layer`. transformers 4 had a module for each parameter.

PARAMETERS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""The experts' parameters, in the order in which PEFT wraps them, and the projections that lie in each."""
KEY = re.compile(
    r"base_model\.model\.(?P<layer>model\.layers\.\d{1,9})\.(?P<module>.+)"
    r"\.lora_(?P<side>[AB])(?P<end>(?:\.[^.]+)?\.weight)"
)
GATE = "mlp.gate"
"""Path of a router in its layer, as `parameter_shapes` has it."""
Exact = dict[str, tuple[int, float]]
"""Path of a module -> its rank and alpha: see `PeftSettings.exact`."""


def split_experts(folder: PeftFolder, spec: ModelSpec, modules: Sequence[str]) -> PeftFolder:
    """Convert an adapter of bare parameters (`target_parameters`) to one of `modules` only, among them each expert's
    projections; return others, and every hash, as they are. Raises AdapterError if the file is damaged or does not
    fit."""
    settings, experts = folder.settings, spec.experts
    if not settings.parameters or experts is None:
        return folder
    exact = _exact(settings, spec, experts, modules)
    tensors = load_tensors(folder.data)
    split = by_name(part for key, tensor in tensors.items() for part in _parts(key, tensor, settings, spec, experts))
    return replace(folder, settings=replace(settings, exact=exact), data=memoryview(save(split)))


def _exact(settings: PeftSettings, spec: ModelSpec, experts: ExpertsSpec, modules: Sequence[str]) -> Exact:
    """Return the rank and alpha of each module that an adapter with `target_parameters` changes, including the experts'
    projections and routers whose parameters it changes. Raises AdapterError if `target_parameters` names a parameter of
    anything else."""
    exact: Exact = {module: settings.rank_and_alpha(module) for module in modules if settings.targets(module)}
    paths, router = dict[str, list[str]](), f"{experts.module}.{experts.router}.weight"
    for layer in (f"model.layers.{number}" for number in range(spec.layers) if spec.has_experts(number)):
        for parameter, names in PARAMETERS.items():
            projections = _projections(spec, experts, layer, names)
            paths |= {f"{layer}.{path}": projections for path in _paths(experts, parameter)}
        paths[f"{layer}.{router}"] = [module := spec.stored_name(f"{layer}.{GATE}")]
        if experts.stacks and settings.targets(module):  # a module beside parameters, as in transformers 4
            exact[module] = settings.rank_and_alpha(module)
    for path, of_path in paths.items():
        if settings.changes_parameter(path):
            exact |= dict.fromkeys(of_path, settings.rank_and_alpha(path))
    known = [name for name in settings.parameters if any(path == name or path.endswith(f".{name}") for path in paths)]
    if unknown := set(settings.parameters) - set(known):
        served = ", ".join((*(_paths(experts, parameter)[0] for parameter in PARAMETERS), router))
        raise AdapterError(
            f"target_parameters names {min(unknown)[:120]!r}, which is no parameter of the model's experts or routers "
            f"({served})"
        )
    return exact


def _paths(experts: ExpertsSpec, parameter: str) -> list[str]:
    """Return the paths, in its layer, of one of PARAMETERS, which holds a projection of all experts: the path in
    transformers 5 and, if checkpoints stack experts, the one in transformers 4."""
    path, stacks = f"{experts.module}.experts.{parameter}", experts.stacks
    return [path] if stacks is None else [path, stacks.gate_up if parameter == "gate_up_proj" else stacks.down]


def _projections(spec: ModelSpec, experts: ExpertsSpec, layer: str, names: Sequence[str]) -> list[str]:
    """Return the paths of the projections `names` of every expert of a layer."""
    numbers = range(experts.count)
    return [spec.stored_name(f"{layer}.mlp.experts.{number}.{name}") for number in numbers for name in names]


class _Found(NamedTuple):
    """The parameter that a tensor of an adapter changes: one of PARAMETERS, and its path."""

    parameter: str
    path: str


def _find(key: str, layer: str, module: str, settings: PeftSettings, experts: ExpertsSpec) -> _Found | None:
    """Return the parameter of experts that a tensor of the wrapped `module` belongs to, or None. Raises AdapterError if
    the settings do not name it."""
    of_experts = f"{experts.module}.experts"
    inner = module == f"{of_experts}.base_layer"
    if not inner and module != of_experts:
        stored = [_Found(name, f"{layer}.{path}") for name in PARAMETERS for path in _paths(experts, name)[1:]]
        return next((found for found in stored if found.path == f"{layer}.{module}.weight"), None)
    both = [_Found(name, f"{layer}.{of_experts}.{name}") for name in PARAMETERS]
    changed = [found for found in both if settings.changes_parameter(found.path)]
    if len(changed) < (2 if inner else 1):
        raise AdapterError(f"{key[:200]!r} belongs to a parameter that target_parameters does not name")
    return changed[0] if inner else changed[-1]


def _parts(
    key: str, tensor: Tensor, settings: PeftSettings, spec: ModelSpec, experts: ExpertsSpec
) -> Iterator[tuple[str, Tensor]]:
    """Split a tensor of an experts' parameter, and yield the tensors of each expert's projections by name. Yield other
    tensors whole."""
    named = KEY.fullmatch(key)
    found = named and _find(key, named["layer"], named["module"], settings, experts)
    if named is None or found is None:
        yield spec.stored_name(key.replace(f".{experts.module}.{experts.router}.lora_", f".{GATE}.lora_")), tensor
        return
    side, names = named["side"], PARAMETERS[found.parameter]
    by_expert = _by_expert(key, tensor, side, experts.count, settings.rank_of(found.path))
    if side == "B" and by_expert.shape[1] % len(names):
        raise AdapterError(f"{key[:200]!r} has {by_expert.shape[1]} rows, which {' and '.join(names)} cannot share")
    for number in range(experts.count):
        for name, part in zip(names, _of_names(by_expert[number], side, len(names), experts), strict=True):
            module = spec.stored_name(f"{named['layer']}.mlp.experts.{number}.{name}")
            yield f"base_model.model.{module}.lora_{side}{named['end']}", part.clone()


def _of_names(matrix: Tensor, side: str, count: int, experts: ExpertsSpec) -> Sequence[Tensor]:
    """Split one expert's A or B (`side`) of a parameter into those of the `count` projections that lie in it: each has
    all of A, and some rows of B."""
    if side == "A":
        return [matrix] * count
    if experts.stacks and experts.stacks.interleaved:
        return [matrix[first::count] for first in range(count)]
    return matrix.chunk(count)


def _by_expert(key: str, tensor: Tensor, side: str, count: int, rank: int) -> Tensor:
    """Separate a parameter's tensor by expert. Return A [experts, rank, in_features] or B [experts, out_features,
    rank]. Raises AdapterError if it is not of `count` experts of this rank."""
    axis = 0 if side == "A" else 1
    if tensor.dim() != 2 or tensor.shape[axis] != count * rank:
        raise AdapterError(
            f"{key[:200]!r} is {list(tensor.shape)}, and {count} experts of rank {rank} need {count * rank} "
            f"{'rows' if side == 'A' else 'columns'}"
        )
    return tensor.view(count, rank, -1) if side == "A" else tensor.view(-1, rank, count).permute(2, 0, 1)
