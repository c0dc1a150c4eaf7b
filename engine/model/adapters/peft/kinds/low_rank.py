"""Kinds of adapters whose delta is a product of two matrices of a small rank, written in another way.

Factors are multiplied in fp32. Every rank is checked before a matrix of that rank is allocated.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from engine.model.adapters.peft.kinds.tensors import Adapter, Module, fitting
from engine.model.adapters.peft.settings import AdapterError

Parts = dict[str, Tensor]


def from_adalora(adapter: Adapter) -> dict[str, Parts]:
    """Convert AdaLoRA (Zhang et al. 2023): B diag(E) A alpha / init_r. PEFT divides by init_r also where ranks were
    pruned, and adds 1e-5 to it. Modules whose ranks were all pruned are left out."""
    settings, converted = adapter.settings, dict[str, Parts]()
    for module in adapter.modules:
        a = module.part("lora_A", None, module.in_features)
        module.check_rank(len(a), "its lora_A")
        if len(a):
            values, b = module.part("lora_E", len(a), 1), module.part("lora_B", module.out_features, len(a))
            scale = (settings.alpha if settings.alpha > 0 else len(a)) / (settings.rank + 1e-5)
            converted[module.path] = {"A": a * values, "B": b * scale}
    return converted


def from_vera(adapter: Adapter) -> dict[str, Parts]:
    """Convert VeRA (Kopiczko et al. 2024): diag(b) B diag(d) A, where A and B are random matrices that all modules
    share, each of which uses as many of their columns and rows as it has inputs and outputs."""
    shared_a, shared_b = _shared_projections(adapter)
    converted = dict[str, Parts]()
    for module in adapter.modules:
        rows, columns = module.part("vera_lambda_b", module.out_features), module.part("vera_lambda_d", len(shared_a))
        a, b = shared_a[:, : module.in_features], shared_b[: module.out_features]
        converted[module.path] = {"A": columns[:, None] * a, "B": rows[:, None] * b}
    return converted


def _shared_projections(adapter: Adapter) -> tuple[Tensor, Tensor]:
    """Return VeRA's A [rank, largest in_features] and B [largest out_features, rank]: those of the file, or made from
    the seed as PEFT makes them."""
    settings, shared = adapter.settings, adapter.shared
    rank = settings.rank_of("VeRA's vera_A and vera_B")
    inputs = max(module.in_features for module in adapter.modules)
    outputs = max(module.out_features for module in adapter.modules)
    if settings.seed is not None:
        if shared:
            raise AdapterError(f"there is a {next(iter(shared))}, and the configuration says save_projection=false")
        generator = torch.Generator().manual_seed(settings.seed)
        return _random(rank, inputs, generator), _random(outputs, rank, generator)
    if len(shared) < 2:
        raise AdapterError(
            "vera_A or vera_B is missing, and the configuration says save_projection=true; save it again"
        )
    a, b = (fitting(shared[name], name, *shape) for name, shape in (("vera_A", (rank, None)), ("vera_B", (None, rank))))
    if a.shape[1] < inputs or len(b) < outputs:
        raise AdapterError(
            f"vera_A is {list(a.shape)} and vera_B {list(b.shape)}, and the model needs [{rank}, {inputs}] and "
            f"[{outputs}, {rank}]: an adapter of another base?"
        )
    return a, b


def _random(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """Return a matrix as PEFT's VeRA draws its shared ones: uniform, with a variance of 2 / columns (He et al.
    2015)."""
    bound = math.sqrt(3.0) * (math.sqrt(2) / math.sqrt(columns))
    return torch.empty(rows, columns).uniform_(-bound, bound, generator=generator)


def from_loha(adapter: Adapter) -> dict[str, Parts]:
    """Convert LoHa (Hyeon-Woo et al. 2022): (W1a W1b) * (W2a W2b) elementwise, times alpha / r, which is a product of
    rank r * r, of row-wise Khatri-Rao products."""
    return {module.path: _loha(module, adapter) for module in adapter.modules}


def _loha(module: Module, adapter: Adapter) -> Parts:
    rank, scale = adapter.settings.rank_of(module.path), adapter.settings.scale_of(module.path)
    module.check_rank(rank * rank, f"the elementwise product of two matrices of rank {rank}")
    (a1, b1), (a2, b2) = (
        (
            module.part(f"hada_w{one}_b", rank, module.in_features),
            module.part(f"hada_w{one}_a", module.out_features, rank),
        )
        for one in (1, 2)
    )
    return {
        "A": (a1[:, None] * a2[None]).reshape(rank * rank, module.in_features),
        "B": (b1[:, :, None] * b2[:, None, :]).reshape(module.out_features, rank * rank) * scale,
    }


def from_lokr(adapter: Adapter) -> dict[str, Parts]:
    """Convert LoKr (Yeh et al. 2024): the Kronecker product of W1 and W2, times alpha / r. With W1 = P1 Q1 and W2 = P2
    Q2 it is the product of kron(P1, P2) and kron(Q1, Q2)."""
    return {module.path: _lokr(module, adapter) for module in adapter.modules}


def _lokr(module: Module, adapter: Adapter) -> Parts:
    rank, scale = adapter.settings.rank_of(module.path), adapter.settings.scale_of(module.path)
    one, two = (_factor(module, f"lokr_w{number}", rank) for number in (1, 2))
    outputs, inputs = one.outputs * two.outputs, one.inputs * two.inputs
    if (outputs, inputs) != (module.out_features, module.in_features):
        raise AdapterError(
            f"{module.path}: the Kronecker product of lokr_w1 and lokr_w2 is [{outputs}, {inputs}], and the model "
            f"needs [{module.out_features}, {module.in_features}]: an adapter of another base?"
        )
    module.check_rank(one.rank * two.rank, f"the Kronecker product of two matrices of ranks {one.rank} and {two.rank}")
    (left1, right1), (left2, right2) = one.split(), two.split()
    return {"A": torch.kron(right1, right2), "B": torch.kron(left1, left2) * scale}


class _Factor(NamedTuple):
    """A factor of LoKr's Kronecker product: a matrix, or two whose product it is."""

    matrices: tuple[Tensor, ...]

    @property
    def outputs(self) -> int:
        return len(self.matrices[0])

    @property
    def inputs(self) -> int:
        return self.matrices[-1].shape[1]

    @property
    def rank(self) -> int:
        """The inner width of `split`: that of the product, or the smaller side of the matrix."""
        return self.matrices[1].shape[0] if len(self.matrices) == 2 else min(self.outputs, self.inputs)

    def split(self) -> tuple[Tensor, Tensor]:
        """Return two matrices whose product is exactly the factor; one of a whole matrix is the identity."""
        if len(self.matrices) == 2:
            return self.matrices[0], self.matrices[1]
        [whole], eye = self.matrices, torch.eye(self.rank)
        return (eye, whole) if self.outputs <= self.inputs else (whole, eye)


def _factor(module: Module, name: str, rank: int) -> _Factor:
    if f"{name}_a" not in module.parts:
        return _Factor((module.part(name, None, None),))
    if name in module.parts:
        raise AdapterError(f"{module.path} has both {name} and {name}_a; save the adapter again")
    return _Factor((module.part(f"{name}_a", None, rank), module.part(f"{name}_b", rank, None)))
