"""Converts (IA)³ (Liu et al. 2022) to scales of base outputs, as DoRA has them. Factors of the inputs of down_proj
become factors of the outputs of up_proj; those of other inputs are refused."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.model.adapters.peft.kinds.tensors import Adapter, Module
from engine.model.adapters.peft.settings import AdapterError
from engine.model.spec.fused import FUSED, fused_name


def from_ia3(adapter: Adapter) -> dict[str, dict[str, Tensor]]:
    """Convert an (IA)³ adapter to a LoRA of zeros, of rank 1, whose modules have the factors of their outputs as
    `output_scale` [out_features]."""
    factors: dict[str, Tensor] = {}
    for module in adapter.modules:
        path, values = _output_factors(module, adapter)
        factors[path] = factors[path] * values if path in factors else values
    return {path: _zeros(*adapter.widths[path]) | {"output_scale": values} for path, values in factors.items()}


def _zeros(in_features: int, out_features: int) -> dict[str, Tensor]:
    return {"A": torch.zeros(1, in_features), "B": torch.zeros(out_features, 1)}


def _output_factors(module: Module, adapter: Adapter) -> tuple[str, Tensor]:
    """Return a module's (IA)³ factors as factors of outputs, [out_features], and the path of the module with these
    outputs: for down_proj that of up_proj, or the projection it is fused into."""
    if not adapter.settings.scales_inputs(module.path):
        return module.path, module.part("ia3_l", module.out_features, 1)[:, 0]
    block, _, name = module.path.rpartition(".")
    if name != "down_proj":
        raise AdapterError(
            f"{module.path}: (IA)³ scales the inputs of this module, which is supported for down_proj only; retrain "
            "with feedforward_modules=['down_proj']"
        )
    values = module.part("ia3_l", 1, module.in_features)[0]
    path = f"{block}.up_proj"
    if path in adapter.widths:
        return path, values
    whole = fused_name("up_proj")  # its other outputs, before these, are left as they are
    first = FUSED[whole].index("up_proj") * module.in_features
    path = f"{block}.{whole}"
    return path, torch.cat((torch.ones(first), values, torch.ones(adapter.widths[path][1] - first - len(values))))
