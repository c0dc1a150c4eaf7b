"""Converts adapters of PEFT's other kinds to the LoRA that computes exactly the same, with the tensors in fp32 that
PEFT would write for it. Kinds that have no such form are refused by `parse_config`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

from safetensors.torch import save
from torch import Tensor

from engine.model.adapters.peft.fields import ADALORA, IA3, LOHA, LOKR, LORA, VERA
from engine.model.adapters.peft.folder import PeftFolder
from engine.model.adapters.peft.kinds.ia3 import from_ia3
from engine.model.adapters.peft.kinds.low_rank import from_adalora, from_loha, from_lokr, from_vera
from engine.model.adapters.peft.kinds.tensors import Adapter, Names, Widths, group_tensors
from engine.model.adapters.peft.settings import AdapterError, settings_of_ranks
from engine.process.adapter_files import WEIGHTS_FILE

Converted = Mapping[str, Mapping[str, Tensor]]
"""Path of a module -> part of its LoRA (`A`, `B`, `output_scale`) -> fp32 tensor."""


class _Kind(NamedTuple):
    names: Names
    convert: Callable[[Adapter], Converted]


CONVERTERS = {
    ADALORA: _Kind(Names("lora_[ABE]"), from_adalora),
    VERA: _Kind(Names("vera_lambda_[bd]", "vera_[AB]"), from_vera),
    LOHA: _Kind(Names("hada_w[12]_[ab]"), from_loha),
    LOKR: _Kind(Names("lokr_w[12](?:_[ab])?"), from_lokr),
    IA3: _Kind(Names("ia3_l"), from_ia3),
}


def as_lora(folder: PeftFolder, widths: Widths) -> PeftFolder:
    """Convert an adapter of another PEFT kind to a LoRA that computes the same; a LoRA, and the hash, stay as they are.
    `widths` maps paths to (in_features, out_features). Raises AdapterError if the file does not fit or a rank exceeds
    MAX_RANK."""
    if folder.settings.kind == LORA:
        return folder
    kind = CONVERTERS[folder.settings.kind]
    converted = kind.convert(group_tensors(folder, kind.names, widths))
    if not converted:
        raise AdapterError(f"every rank of the adapter in {WEIGHTS_FILE} is 0: it changes nothing")
    settings = replace(
        settings_of_ranks({path: len(parts["A"]) for path, parts in converted.items()}),
        base_model=folder.settings.base_model,
        warnings=folder.settings.warnings,
        scales_outputs=folder.settings.kind == IA3,
    )
    tensors = {
        f"base_model.model.{path}.lora_{part}.weight": tensor.contiguous()
        for path, parts in converted.items()
        for part, tensor in parts.items()
    }
    return replace(folder, settings=settings, data=memoryview(save(tensors)))
