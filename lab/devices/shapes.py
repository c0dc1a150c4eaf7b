"""Sizes of decoder models, by name or as a model's files say, without reading its weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.model.checkpoints.folder import quantisation_section
from engine.model.gguf.config import read_config
from engine.model.gguf.header import read_tensors
from engine.model.spec.config import ModelSpec, parse_spec
from engine.model.weights.gguf import FLOATS

CONFIG = "config.json"
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Fields of config.json that say how many experts a layer has."""
SIZES = (
    "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size", "max_position_embeddings", "num_experts", "num_local_experts", "num_experts_per_tok",
    "moe_intermediate_size", "shared_expert_intermediate_size",
)  # fmt: skip
"""Fields of config.json that are sizes, where a family has them."""
MOST = (1 << 31) - 1
MOSTS = {"num_hidden_layers": 10_000, "hidden_size": 1 << 20, "head_dim": 1 << 16}
"""Largest sizes that are accepted: `MOSTS` for the fields that it names, `MOST` for all others."""


@dataclass(frozen=True, slots=True)
class Experts:
    """The mixture of experts of a model: MLPs of which a router chooses some for each row, in `layers` of its
    layers."""

    count: int
    """Experts of such a layer."""
    top_k: int
    """Experts that are chosen for a row."""
    width: int
    """Intermediate size of an expert."""
    layers: int
    """Number of layers with experts; the others have one MLP instead."""
    is_shared: bool = False
    """True means that layers with experts also have an MLP that computes all rows, and a gate for it."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a decoder with grouped-query attention, and in every layer a gated feed-forward block or experts."""

    name: str
    layers: int
    hidden: int
    intermediate: int
    """Intermediate size of an MLP that computes all rows."""
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    is_tied: bool
    """True means that the output head is the input embedding."""
    max_position: int
    experts: Experts | None = None
    """None means that every layer has one MLP that computes all rows."""
    norms_all_heads: bool = False
    """True means that queries and keys of all heads are normalised together, so that ranks cannot share a layer."""
    rotates_parts: bool = False
    """True means that only a part of each head is rotated, so that KV cannot be in FP8."""
    windowed_layers: int = 0
    """Layers whose rows see no more than a sliding window. Their KV stays in pages nevertheless."""
    is_quantised: bool = False
    """True means that the files have weights quantised in integers, which the engine does not quantise again."""

    @property
    def inner_widths(self) -> list[int]:
        """The different intermediate sizes in the model: that of the MLP for all rows if any layer has one, and that of
        an expert if there are experts."""
        experts = self.experts
        has_mlp = experts is None or experts.is_shared or experts.layers < self.layers
        return [self.intermediate] * has_mlp + ([experts.width] if experts else [])

    @property
    def linear_weights(self) -> int:
        """Number of weights in the matrices of all layers, with experts and routers, but without embedding and output
        head."""
        return self._sum(lambda inputs, outputs: inputs * outputs)

    @property
    def expert_weights(self) -> int:
        """Number of weights in all experts of all layers."""
        return sum(inputs * outputs for inputs, outputs in self._expert()) * self._num_experts

    @property
    def router_weights(self) -> int:
        """Number of weights in the routers and in the gates of shared MLPs. Each tensor-parallel rank has all of
        them."""
        experts = self.experts
        return experts.layers * (experts.count + experts.is_shared) * self.hidden if experts else 0

    @property
    def chosen(self) -> float:
        """Share of a layer's experts that the router chooses for a row (token); 1 without experts."""
        return self.experts.top_k / self.experts.count if self.experts else 1.0

    @property
    def head_weights(self) -> int:
        return self.vocab * self.hidden

    @property
    def weights(self) -> int:
        """Number of weights in all matrices of the model. An output head that is tied to the embedding does not count
        again."""
        return self.linear_weights + self.head_weights * (1 if self.is_tied else 2)

    @property
    def lora_widths(self) -> int:
        """Sum of the inputs and outputs of all projections: the number of weights of an adapter of rank 1 on all of
        them."""
        return self._sum(lambda inputs, outputs: inputs + outputs)

    @property
    def expert_lora_widths(self) -> int:
        """Sum of the inputs and outputs of all experts' projections: the part of `lora_widths` that experts have."""
        return sum(map(sum, self._expert())) * self._num_experts

    @property
    def kinds_of_layers(self) -> dict[bool, int]:
        """Number of layers without experts (key False) and with experts (key True)."""
        with_experts = self.experts.layers if self.experts else 0
        return {False: self.layers - with_experts, True: with_experts}

    def projections(self, has_experts: bool) -> list[tuple[int, int]]:
        """Return (inputs, outputs), the sizes of the matrix, of each projection of a layer with or without experts, in
        the order in which adapters have them."""
        hidden, query, kv = self.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim
        sizes = [(hidden, query), (hidden, kv), (hidden, kv), (query, hidden)]
        experts = self.experts if has_experts else None
        if experts is None or experts.is_shared:
            sizes += _mlp(hidden, self.intermediate)
        if experts is not None:
            sizes += [(hidden, 1)] * experts.is_shared + [(hidden, experts.count)] + self._expert() * experts.count
        return sizes

    def kv_bytes(self, itemsize: int) -> int:
        """Return the bytes of a token's KV in all layers, with `itemsize` bytes for each number."""
        return 2 * self.kv_heads * self.head_dim * self.layers * itemsize

    def _sum(self, of: Callable[[int, int], int]) -> int:
        """Return the sum of `of`(inputs, outputs) over the projections of all layers."""
        kinds = self.kinds_of_layers.items()
        return sum(count * sum(of(*sizes) for sizes in self.projections(kind)) for kind, count in kinds if count)

    def _expert(self) -> list[tuple[int, int]]:
        """Return (inputs, outputs) of each projection of an expert; none if there are no experts."""
        return _mlp(self.hidden, self.experts.width) if self.experts else []

    @property
    def _num_experts(self) -> int:
        return self.experts.layers * self.experts.count if self.experts else 0


def _mlp(hidden: int, inner: int) -> list[tuple[int, int]]:
    """Return (inputs, outputs) of the gate, up and down projections of an MLP."""
    return [(hidden, inner), (hidden, inner), (inner, hidden)]


SHAPES: Mapping[str, Shape] = {
    shape.name: shape
    for shape in (
        Shape("smollm2-135m", 30, 576, 1536, 9, 3, 64, 49_152, True, 8192),
        Shape("llama-3.2-1b", 16, 2048, 8192, 32, 8, 64, 128_256, True, 131_072),
        Shape("llama-3.2-3b", 28, 3072, 8192, 24, 8, 128, 128_256, True, 131_072),
        Shape("llama-3.1-8b", 32, 4096, 14_336, 32, 8, 128, 128_256, False, 131_072),
        Shape("llama-3.1-70b", 80, 8192, 28_672, 64, 8, 128, 128_256, False, 131_072),
        Shape("mistral-7b", 32, 4096, 14_336, 32, 8, 128, 32_768, False, 32_768),
        Shape("qwen2.5-7b", 28, 3584, 18_944, 28, 4, 128, 152_064, False, 32_768),
        Shape("qwen2.5-32b", 64, 5120, 27_648, 40, 8, 128, 152_064, False, 32_768),
        Shape("qwen2.5-72b", 80, 8192, 29_568, 64, 8, 128, 152_064, False, 32_768),
        Shape("qwen3-8b", 36, 4096, 12_288, 32, 8, 128, 151_936, False, 40_960),
        Shape("mixtral-8x7b", 32, 4096, 14_336, 32, 8, 128, 32_000, False, 32_768, Experts(8, 2, 14_336, 32)),
        Shape("mixtral-8x22b", 56, 6144, 16_384, 48, 8, 128, 32_768, False, 65_536, Experts(8, 2, 16_384, 56)),
        Shape("qwen3-30b-a3b", 48, 2048, 6144, 32, 4, 128, 151_936, False, 40_960, Experts(128, 8, 768, 48)),
        Shape("olmoe-1b-7b", 16, 2048, 1024, 16, 16, 128, 50_304, False, 4096, Experts(64, 8, 1024, 16), True),
    )
}
"""Shapes by name, from the models' own config.json."""


def find_shape(model: str) -> Shape:
    """Return the shape of a model: one of `SHAPES` by name, or that of a Hugging Face folder, a config.json or a GGUF
    file. Raises ValueError if there is none or its files do not say its sizes, and OSError."""
    if model in SHAPES:
        return SHAPES[model]
    path = Path(model)
    if path.is_dir():
        path = path / CONFIG
    if not path.is_file():
        raise ValueError(
            f"no model {model!r}: name a folder with a config.json, a GGUF file, or one of {', '.join(SHAPES)}"
        )
    name = path.parent.name if path.name == CONFIG else path.stem
    try:
        return _gguf_shape(path, name) if path.suffix == ".gguf" else _config_shape(path, name)
    except KeyError as error:
        raise ValueError(f"{path} has no {error}: the sizes of this model are not known") from error


def shape_of(spec: ModelSpec, name: str) -> Shape:
    """Return the shape (sizes for plans and simulations) of a model, given the engine's description of it."""
    moe = spec.experts
    experts = Experts(moe.count, moe.top_k, moe.width, sum(moe.layers), moe.shared) if moe and any(moe.layers) else None
    sizes = spec.layers, spec.hidden_size, spec.intermediate_size, spec.heads, spec.kv_heads, spec.head_dim
    vocab = spec.vocab_size, spec.tied_embeddings, spec.max_position
    windowed = sum(window is not None and window < spec.max_position for window in spec.windows)
    return Shape(name, *sizes, *vocab, experts, spec.qk_norm == "projection", spec.rotates_parts, windowed)


def _config_shape(path: Path, name: str) -> Shape:
    """Return the shape that a config.json describes. Raises ValueError if it is not JSON, a size is missing or not a
    positive integer, or the engine refuses the model."""
    try:
        config = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} is no JSON object")
    for field in SIZES:
        if config.get(field) is not None:
            _positive(config[field], f"{path}: {field}", MOSTS.get(field, MOST))
    try:
        spec, is_quantised = parse_spec(config, {}), _has_integers(config)
    except (TypeError, AttributeError, ArithmeticError) as error:
        raise ValueError(f"{path} does not describe a model: {error}") from error
    if spec.experts is None and any(config.get(field) for field in EXPERTS):
        raise ValueError(f"{path} has experts, which models of model_type {spec.model_type!r} do not have")
    return replace(shape_of(spec, name), is_quantised=is_quantised)


def _has_integers(config: dict[str, Any]) -> bool:
    """Return whether a config.json says that the model's weights are quantised in integers (GPTQ, AWQ or
    compressed-tensors)."""
    section = quantisation_section(config)
    method, layout = section.get("quant_method"), str(section.get("format"))
    return method in ("gptq", "awq") or (method == "compressed-tensors" and "float" not in layout)


def _gguf_shape(path: Path, name: str) -> Shape:
    """Return the shape that a GGUF file describes. Raises ValueError if the file is damaged, a size is not a positive
    integer, or the engine refuses the model."""
    config = read_config(path)
    for field in filter(config.__contains__, SIZES):
        _positive(config[field], f"{path}: {field}", MOSTS.get(field, MOST))
    is_quantised = any(tensor.kind not in FLOATS for tensor in read_tensors(path).values())
    return replace(shape_of(parse_spec(config, {}), name), is_quantised=is_quantised)


def _positive(value: Any, name: str, most: int = MOST) -> int:
    if type(value) is not int or not 0 < value <= most:
        raise ValueError(f"{name} must be an integer from 1 to {most:,}, not {str(value)[:40]}")
    return value
