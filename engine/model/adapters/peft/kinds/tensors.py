"""Reads the tensors of an adapter that is no LoRA, by module and part, and checks that they are those it must have."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from engine.model.adapters.peft.folder import PeftFolder
from engine.model.adapters.peft.hints import load_tensors
from engine.model.adapters.peft.settings import AdapterError, PeftSettings
from engine.process.adapter_files import CONFIG_FILE, WEIGHTS_FILE
from lora_kernels.layout import MAX_RANK

Widths = Mapping[str, tuple[int, int]]
"""Path of a projection in the base model -> (in_features, out_features)."""


@dataclass(frozen=True, slots=True)
class Names:
    """Regular expressions for the names of the tensors of one PEFT kind of adapter: those that each module has, and
    those that all modules share."""

    parts: str
    shared: str = r"(?!)"  # matches nothing

    def find(self, key: str) -> tuple[str, str, str] | None:
        """Return the module, the part and the adapter's name in the key of a tensor of a weights file; the module is
        empty for a shared tensor. None means that the key is not one of the adapter's PEFT kind."""
        found = re.fullmatch(
            rf"base_model\.(?:model\.(?P<module>.+)\.(?P<part>{self.parts})|(?P<shared>{self.shared}))"
            r"(?:\.(?P<name>[^.]+))?",
            key,
        )
        if found is None:
            return None
        return found["module"] or "", found["part"] or found["shared"], found["name"] or ""


@dataclass(frozen=True, slots=True)
class Module:
    """The tensors of one module in an adapter that is no LoRA, by part, each in fp32."""

    path: str
    """The module's path in the base model."""
    in_features: int
    out_features: int
    """`in_features` and `out_features`: widths of the module."""
    parts: Mapping[str, Tensor]
    """Name of a part -> tensor."""

    def part(self, name: str, *shape: int | None) -> Tensor:
        """Return the module's tensor `name` in fp32. Raises AdapterError unless there is one of this shape; None stands
        for any length."""
        if name not in self.parts:
            raise AdapterError(f"{self.path} has no {name}; save the adapter again")
        return fitting(self.parts[name], f"{self.path}.{name}", *shape)

    def check_rank(self, rank: int, reason: str) -> None:
        """Raises AdapterError if `rank`, that of the LoRA to which the module is converted, is over MAX_RANK. `reason`
        says in the message where the rank comes from."""
        if rank > MAX_RANK:
            raise AdapterError(
                f"{self.path}: {reason} is of rank {rank}, and ranks of up to {MAX_RANK} are supported; train it with "
                "a smaller rank, or convert it with PEFT's save_as_lora"
            )


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter that is no LoRA: its settings, the modules that it changes, the tensors that all of these share, and
    the widths of all modules of the base model that adapters may change."""

    settings: PeftSettings
    modules: tuple[Module, ...]
    shared: Mapping[str, Tensor]
    widths: Widths


def fitting(tensor: Tensor, name: str, *shape: int | None) -> Tensor:
    """Return the tensor in fp32. Raises AdapterError, which names it `name`, unless it has the shape, in which None
    stands for any length, and a floating dtype."""
    found = list(tensor.shape)
    if len(found) != len(shape) or any(want not in (None, has) for has, want in zip(found, shape, strict=True)):
        needed = ", ".join("any" if length is None else str(length) for length in shape)
        raise AdapterError(f"{name} is {found}, and the model and {CONFIG_FILE} need [{needed}]")
    if not tensor.is_floating_point():
        raise AdapterError(f"{name} is of type {tensor.dtype}; save it as fp32, fp16 or bf16")
    return tensor.float()


def group_tensors(folder: PeftFolder, names: Names, widths: Widths) -> Adapter:
    """Group an adapter's tensors by module. Raises AdapterError if the file is damaged, a tensor belongs to no module
    that the configuration targets, or to a second adapter, or a targeted module has none."""
    settings = folder.settings
    wanted = _wanted(settings, widths)
    shared: dict[str, Tensor] = {}
    modules: dict[str, dict[str, Tensor]] = {}
    seen: set[str] = set()
    for key, tensor in sorted(load_tensors(folder.data).items()):  # the library's order differs from call to call
        found = names.find(key)
        if found is None or (found[0] and found[0] not in widths):
            raise AdapterError(f"{key[:200]!r} matches no module of the model that {settings.kind} adapters change")
        module, part, name = found
        seen.add(name)
        parts = modules.setdefault(module, {}) if module else shared
        if part in parts or len(seen) > 1:
            raise AdapterError(f"{WEIGHTS_FILE} holds more than one adapter ({key[:200]!r})")
        parts[part] = tensor
    _check_coverage(modules, wanted, settings)
    return Adapter(settings, tuple(Module(path, *widths[path], modules[path]) for path in wanted), shared, widths)


def _wanted(settings: PeftSettings, widths: Widths) -> list[str]:
    """Return the paths of the modules that the configuration targets, in the order in which they are computed."""
    layers = {int(path.split(".")[2]) for path in widths}
    if beyond := sorted(settings.layers - layers):
        raise AdapterError(
            f"layers_to_transform names layer {beyond[0]}, and this model has layers 0 to {max(layers)}: an adapter "
            "of another base?"
        )
    wanted = [path for path in widths if settings.targets(path)]
    if not wanted:
        projections = dict.fromkeys(path.rpartition(".")[2] for path in widths)
        raise AdapterError(f"target_modules match none of the model's projections ({', '.join(projections)})")
    return wanted


def _check_coverage(found: Iterable[str], wanted: Iterable[str], settings: PeftSettings) -> None:
    found, wanted = set(found), set(wanted)
    if stray := sorted(found - wanted):
        raise AdapterError(f"there are weights for {stray[0]}, which {CONFIG_FILE} does not target")
    if absent := sorted(wanted - found):
        raise settings.without_weights(absent)
