"""Which layers, and which part of each of their parameters and heads, a rank has."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from engine.model.checkpoints.stored import Shape, WeightsError
from engine.model.spec.config import ModelSpec
from engine.model.spec.fused import select_rows
from engine.model.weights.reader import WeightSource, parameter_shapes
from lora_kernels.fp8 import Fp8Weight
from lora_kernels.quantized import QuantizedWeight, Weight

LAYER = re.compile(r"model\.layers\.(?P<number>\d+)\.")
PROJECTION = re.compile(r"\.(?P<module>[a-z]+_proj)\.(?P<kind>weight|bias)$")
EXPERT = re.compile(r"(?<![^.])experts\.\d+\.[a-z]+_proj$")
BY_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
"""Projections of which each rank computes some outputs, from all inputs. Each rank computes all outputs of the others,
o_proj and down_proj, from some inputs: the ranks' results are added."""


class Cut(NamedTuple):
    """A rank's part of a parameter: the indices from `start` to before `stop` on an axis, 0 for outputs or 1 for
    inputs."""

    axis: int
    start: int
    stop: int

    @property
    def slice(self) -> slice:
        return slice(self.start, self.stop)


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a model that one rank has: of the layers of its stage, which `size` ranks compute together, its part
    of every large weight. The first stage has the embedding, the final norm and the head as well."""

    rank: int = 0
    size: int = 1
    stages: tuple[range, ...] = ()
    """The layers of each stage. Empty means that one stage has all layers."""
    stage: int = 0
    """Number of the rank's stage."""

    @property
    def everyone(self) -> list[Shard]:
        """The parts of the model that all ranks of the engine have, in the order of their numbers."""
        places = product(range(max(1, len(self.stages))), range(self.size))
        return [replace(self, stage=stage, rank=rank) for stage, rank in places]

    def layers(self, spec: ModelSpec) -> range:
        """Return the numbers, in the whole model, of the layers of the rank's stage."""
        return self.stages[self.stage] if self.stages else range(spec.layers)

    def most_layers(self, spec: ModelSpec) -> int:
        """Return the number of layers of the stage that has most."""
        return max(map(len, self.stages), default=spec.layers)

    def has(self, name: str) -> bool:
        """Return whether the rank's pipeline stage has the parameter `name`."""
        if not self.stages:
            return True
        found = LAYER.match(name)
        return int(found["number"]) in self.stages[self.stage] if found else self.stage == 0

    def spec(self, spec: ModelSpec) -> ModelSpec:
        """Return the shape of the rank's part of a model, with fewer layers, heads and inner features; ranks may share
        a KV head. Raises ValueError if these cannot be divided, or an RMSNorm spans all heads."""
        size, layers = self.size, self.layers(spec)
        has_mlps = any(map(spec.has_mlp, range(spec.layers)))
        part = slice(layers.start, layers.stop)
        experts = spec.experts and replace(spec.experts, layers=spec.experts.layers[part])
        spec = replace(spec, layers=len(layers), windows=spec.windows[part], ropes=spec.ropes[part], experts=experts)
        if size == 1:
            return spec
        if spec.qk_norm == "projection":
            raise ValueError(
                f"engine.tensor_parallel {size}: {spec.model_type} normalises queries and keys of all heads together"
            )
        if spec.heads % size:
            raise _refusal(size, f"the model's {spec.heads} attention heads")
        if spec.kv_heads % size and size % spec.kv_heads:
            raise _refusal(size, f"the model's {spec.kv_heads} KV heads, nor is it a multiple of them")
        if has_mlps and spec.intermediate_size % size:
            raise _refusal(size, f"the model's intermediate_size, {spec.intermediate_size}")
        if experts and experts.width % size:
            raise _refusal(size, f"the intermediate size of the model's experts, {experts.width}")
        if -(-spec.vocab_size // size) * (size - 1) >= spec.vocab_size:
            raise ValueError(f"engine.tensor_parallel {size}: {spec.vocab_size} tokens leave a rank without any")
        return replace(
            spec,
            heads=spec.heads // size,
            kv_heads=max(1, spec.kv_heads // size),
            intermediate_size=spec.intermediate_size // size if has_mlps else spec.intermediate_size,
            experts=experts and replace(experts, width=experts.width // size),
        )

    def columns(self, path: str, spec: ModelSpec) -> Cut:
        """Return which outputs or inputs of a projection's weight [out_features, in_features] the rank has. `path` ends
        with the projection's name, and that of an expert has its number before it: `experts.3.up_proj`. `spec` is the
        whole model's."""
        module = path.rpartition(".")[2]
        if module in ("k_proj", "v_proj"):
            heads = max(1, spec.kv_heads // self.size)
            start = self.rank * spec.kv_heads // self.size * spec.head_dim
            return Cut(0, start, start + heads * spec.head_dim)
        whole = spec.query_width if module in ("q_proj", "o_proj") else spec.intermediate_size
        if spec.experts and EXPERT.search(path):
            whole = spec.experts.width
        each = whole // self.size
        return Cut(0 if module in BY_ROWS else 1, self.rank * each, (self.rank + 1) * each)

    def tokens(self, spec: ModelSpec) -> Cut:
        """Return the range of tokens whose embeddings and logits the rank has (vocabulary parallelism)."""
        each = -(-spec.vocab_size // self.size)
        return Cut(0, self.rank * each, min(spec.vocab_size, (self.rank + 1) * each))

    def cut(self, name: str, spec: ModelSpec) -> Cut | None:
        """Return the range of the parameter `name` that the rank has. None means that it has all of it."""
        if self.size == 1:
            return None
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            return self.tokens(spec)
        if name.endswith("self_attn.sinks"):
            each = spec.heads // self.size
            return Cut(0, self.rank * each, (self.rank + 1) * each)
        found = PROJECTION.search(name)
        if found is None or (found["kind"] == "bias" and found["module"] not in BY_ROWS):
            return None
        return self.columns(name[: found.end("module")], spec)

    def shapes(self, spec: ModelSpec) -> dict[str, Shape]:
        """Return the shape of the rank's part of each parameter, by name, of the parameters that its pipeline stage
        has."""
        shapes = parameter_shapes(spec).items()
        return {name: _cut_shape(shape, self.cut(name, spec)) for name, shape in shapes if self.has(name)}

    def source(self, source: WeightSource, spec: ModelSpec) -> WeightSource:
        """Return a source that reads the rank's part of each parameter; biases added to sums are zeros but on rank 0.
        The source raises WeightsError if a quantised weight cannot be divided."""
        if self.size == 1:
            return source

        def read(name: str) -> Weight:
            weight, found = source(name), PROJECTION.search(name)
            if cut := self.cut(name, spec):
                return _part(name, weight, cut)
            if self.rank and found and found["kind"] == "bias" and isinstance(weight, Tensor):
                return torch.zeros_like(weight)
            return weight

        return read


WHOLE = Shard()
"""The `Shard` of an engine with one rank: the whole model."""


def _refusal(size: int, what: str) -> ValueError:
    return ValueError(f"engine.tensor_parallel {size} does not divide {what}")


def _cut_shape(shape: Shape, cut: Cut | None) -> Shape:
    if cut is None:
        return shape
    return (*shape[: cut.axis], cut.stop - cut.start, *shape[cut.axis + 1 :])


def _part(name: str, weight: Weight, cut: Cut) -> Weight:
    """Return the rank's part of a parameter, which `cut` gives, in memory of its own. Blocks of quantised weights stay
    whole."""
    if cut.axis == 0:
        return select_rows(weight, cut.start, cut.stop)
    if isinstance(weight, Tensor):
        return weight[:, cut.slice].clone()
    if isinstance(weight, Fp8Weight):
        numbers = weight.numbers.view(torch.uint8)[:, cut.slice].clone().view(weight.numbers.dtype)
        return Fp8Weight(numbers, weight.scales.clone())
    return _inputs_of(name, weight, cut)


def _inputs_of(name: str, weight: QuantizedWeight, cut: Cut) -> QuantizedWeight:
    """Return the part of a quantised weight for the inputs of `cut`. Raises WeightsError unless they are whole blocks
    in the order of inputs."""
    group, shared = weight.coding.group, max(1, weight.coding.shared)
    block = group * shared
    if weight.order is not None:
        raise WeightsError(
            f"engine.tensor_parallel: {name} has its inputs in another order (act-order) and is not divided"
        )
    if cut.start % block or cut.stop % block:
        raise WeightsError(
            f"engine.tensor_parallel: a rank would have inputs {cut.start} to {cut.stop - 1} of {name}, "
            f"whose blocks of {block} inputs cannot be divided"
        )

    def part(tensor: Tensor | None, each: int) -> Tensor | None:
        return None if tensor is None else tensor[:, cut.start // each : cut.stop // each].clone()

    return replace(
        weight,
        codes=weight.codes[:, cut.slice].clone(),
        scales=weight.scales[:, cut.start // group : cut.stop // group].clone(),
        minima=part(weight.minima, group),
        units=part(weight.units, block),
    )
