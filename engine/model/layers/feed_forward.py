"""The feed-forward part of a layer: one MLP for all rows, experts that a router chooses for each row, or both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from torch import Tensor

from engine.model.layers.lora import ExpertGroups, LoraStep
from lora_kernels.backend import Backend
from lora_kernels.grouped import ExpertByExpert, GroupedLinear
from lora_kernels.layout import ProjectionGroup
from lora_kernels.linear import Linear
from lora_kernels.pointwise import BoundedSwiglu, Pointwise

Activation = Literal["silu", "gelu"] | BoundedSwiglu


def _activate(activation: Activation, pointwise: Pointwise) -> Callable[[Tensor], Tensor]:
    if isinstance(activation, BoundedSwiglu):
        return partial(pointwise.bounded_swiglu, bounds=activation)
    return pointwise.swiglu if activation == "silu" else pointwise.geglu


@dataclass(frozen=True, slots=True)
class Mlp:
    """One gated MLP that computes all rows. `gate_up` and `down` are its linears, and `groups` the projections in each
    of the two that adapters may change."""

    gate_up: Linear
    down: Linear
    groups: tuple[ProjectionGroup, ProjectionGroup]
    activation: Activation

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.gate_up, self.down

    def compute(self, x: Tensor, layer: int, backend: Backend, lora: LoraStep) -> Tensor:
        """Return the MLP's output for the rows `x`, [num_rows, hidden_size]. With several ranks it is this rank's part
        of a sum."""
        gate_up, down = self.groups
        inner = _activate(self.activation, backend.pointwise)(lora.apply(self.gate_up, x, layer, gate_up))
        return lora.apply(self.down, inner, layer, down)


@dataclass(frozen=True, slots=True)
class SharedMlp:
    """An MLP beside experts. The sigmoid of `gate`, a linear [num_rows, hidden_size] -> [num_rows, 1], says how much of
    its output is added."""

    mlp: Mlp
    gate: Linear


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts."""

    router: Linear
    """Gives each row's logits, [num_rows, experts]."""
    gate_up: GroupedLinear
    down: GroupedLinear
    """`gate_up` and `down`: the linears of the experts' MLPs."""
    top_k: int
    """Number of experts that compute a row."""
    normalised: bool
    """True means that the weights of a row's experts add up to 1: see `ExpertKernels.route`."""
    groups: ExpertGroups
    activation: Activation
    shared: SharedMlp | None = None
    """An MLP for all rows beside the experts. None means that there is none."""

    @property
    def linears(self) -> tuple[Linear | GroupedLinear, ...]:
        return self.router, self.gate_up, self.down

    @property
    def waits_for_routing(self) -> bool:
        """Return whether the host must wait for a layer's routing, because linears that run expert by expert need to
        know the rows of each one. Such a step cannot be captured."""
        return any(isinstance(linear, ExpertByExpert) for linear in (self.gate_up, self.down))

    def compute(self, x: Tensor, layer: int, backend: Backend, lora: LoraStep) -> Tensor:
        """Return the output of the mixture of experts for the rows `x`, [num_rows, hidden_size]. With several ranks it
        is this rank's part of a sum."""
        logits = lora.apply(self.router, x, layer, self.groups.router)
        routing, of_entries = lora.route(logits, self.top_k, self.normalised, layer, self.groups)
        gate_up, down = (partial(linear, starts=routing.starts) for linear in (self.gate_up, self.down))
        inner = of_entries.apply(gate_up, backend.experts.gather(x, routing), 0, self.groups.gate_up)
        inner = _activate(self.activation, backend.pointwise)(inner)
        out = backend.experts.combine(of_entries.apply(down, inner, 0, self.groups.down), routing)
        if self.shared is None:
            return out
        share = lora.apply(self.shared.gate, x, layer, self.groups.shared_gate).sigmoid()
        return out.add_(self.shared.mlp.compute(x, layer, backend, lora) * share)


FeedForward = Mlp | Experts
