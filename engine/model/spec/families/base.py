"""What a decoder needs to know about a model, and how config.json says it in the families that are like Llama."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from engine.model.spec.rope import RopeSpec, read_rope
from lora_kernels.pointwise import BoundedSwiglu

Json = Mapping[str, Any]


class NormNames(NamedTuple):
    """Names of a layer's norms in the checkpoint, by their places. None means that there is no norm at that place."""

    before_attention: str | None
    after_attention: str | None
    before_mlp: str | None
    after_mlp: str | None


LLAMA_NORMS = NormNames("input_layernorm", None, "post_attention_layernorm", None)


class Stacks(NamedTuple):
    """How a checkpoint stores the projections of a layer's experts: gates and ups in one tensor, [experts, 2 * width,
    hidden_size], and downs in another, [experts, hidden_size, width]. Biases have the same names with `_bias`."""

    gate_up: str
    down: str
    """`gate_up` and `down`: names of the two tensors, in their layer."""
    interleaved: bool = False
    """True means that the outputs of gate and up alternate. False means that those of gate come first."""
    transposed: bool = False
    """True means that inputs come before outputs."""


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """The experts of a model: MLPs of which a router chooses some for each row (mixture of experts).

    Raises:
        ValueError: `top_k` is not 1 to `count`; kernels rely on it.
    """

    count: int
    """Number of experts of each layer that has experts."""
    top_k: int
    """Number of experts that the router chooses for a row."""
    width: int
    """Intermediate size of an expert."""
    normalised: bool
    """True means that the weights of a row's experts add up to 1. False means that they are the experts' probabilities
    among all."""
    layers: tuple[bool, ...]
    """True for each layer that has experts; the others have one MLP instead."""
    shared: bool = False
    """True means that layers with experts also have an MLP for all rows, whose output is multiplied by a gate, the
    sigmoid of a linear of the row."""
    biased: bool = False
    """True means that routers and the experts' projections have biases."""
    module: str = "mlp"
    router: str = "gate"
    """`module` and `router`: names of the module of experts, in its layer, and of the router in it, in transformers
    5."""
    stacks: Stacks | None = None
    """How checkpoints store the experts. None means that each projection of an expert is a tensor."""

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.count:
            raise ValueError(f"num_experts_per_tok must be 1 to the number of experts, {self.count}, not {self.top_k}")


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Shape, rotary embeddings and EOS tokens of a decoder, and how it differs from Llama's."""

    model_type: str
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    """Intermediate size of an MLP that computes all rows, if any layer has one."""
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rms_norm_eps: float
    ropes: tuple[RopeSpec, ...]
    """Rotary embedding of each layer."""
    max_position: int
    """Number of positions that the model was made for."""
    windows: tuple[int | None, ...]
    """Sliding attention window of each layer in tokens. None means that a row sees everything before it."""
    tied_embeddings: bool
    """True means that the head has the weights of the embedding."""
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    eos_token_ids: tuple[int, ...]
    attention_scale: float
    """Factor of the scores of attention."""
    attention_cap: float | None = None
    """Bound of these scores, see `Scores` (lora_kernels/backend.py)."""
    sinks: bool = False
    """True means that each query head has a sink, see `Scores`."""
    qk_norm: Literal["head", "projection"] | None = None
    """RMSNorm of queries and keys before the rotation: of each head, or of all heads of a projection together."""
    norms: NormNames = LLAMA_NORMS
    wide_norms: bool = False
    """True means that norms are multiplied by their weights in fp32, before they are rounded to the model's dtype."""
    norm_weight_offset: float = 0.0
    """Number that is added to the weights of norms."""
    activation: Literal["silu", "gelu"] | BoundedSwiglu = "silu"
    """Function of the MLP's gate: `gelu` is its approximation by tanh."""
    embedding_scale: float = 1.0
    """Factor of embedded rows, rounded to the model's dtype."""
    residual_scale: float = 1.0
    """Factor of what attention and MLP add to the residual stream."""
    logits_divisor: float = 1.0
    logits_cap: float | None = None
    """Bound of logits, which become cap * tanh(logit / cap). None means that they are not bounded."""
    has_head: bool = True
    """False means that the checkpoint has no head, so that the model gives vectors and generates nothing."""
    fused: bool = False
    """True means that checkpoints and adapters have the projections of `FUSED` (engine/model/spec/fused.py) as one."""
    experts: ExpertsSpec | None = None
    """The experts of the layers. None means that every layer has one MLP instead."""
    renames: tuple[tuple[str, str], ...] = ()
    """Pairs (engine's name, stored name) of whole path components, for parameters of layers that checkpoints and
    adapters of the family name differently."""
    aliases: tuple[tuple[str, str], ...] = ()
    """Pairs (name in some checkpoints, name in most) of parts of tensors' names. The engine reads the first as the
    second."""

    def served(self, max_len: int) -> ModelSpec:
        """Return the model's spec for sequences of at most `max_len` tokens, on which rotary embeddings may depend."""
        return replace(self, ropes=tuple(rope.served(max_len) for rope in self.ropes))

    def has_experts(self, layer: int) -> bool:
        return self.experts is not None and self.experts.layers[layer]

    @property
    def shares_expert(self) -> bool:
        """True means that layers with experts also have an MLP for all rows."""
        return self.experts is not None and self.experts.shared

    @property
    def chosen_experts(self) -> float:
        """Share of a layer's experts that are chosen for a row; 1 if no layer has experts."""
        return self.experts.top_k / self.experts.count if self.experts and any(self.experts.layers) else 1.0

    def has_mlp(self, layer: int) -> bool:
        """Return whether a layer has an MLP that computes all rows, alone or beside experts."""
        return self.shares_expert or not self.has_experts(layer)

    def stored_name(self, name: str) -> str:
        """Return the name by which checkpoints and adapters of the family know a parameter or module (see
        `renames`)."""
        name += "."
        for part, stored in self.renames:
            name = name.replace(f".{part}.", f".{stored}.")
        return name[:-1]

    @property
    def rotates_parts(self) -> bool:
        """True means that layers rotate only a part of each head."""
        return any(2 * len(rope.inv_freq) < self.head_dim for rope in self.ropes)

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim


def read_llama(config: Json, *, partial_rope: bool = False) -> ModelSpec:
    """Return the spec of a model that is like Llama, from its config.json. Raises ValueError, which says why, if this
    engine cannot run it.

    Args:
        partial_rope: whether the family may rotate only a part of each head.
    """
    if config.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act {config['hidden_act']!r} is not supported; supported: silu")
    heads, layers = required(config, "num_attention_heads"), required(config, "num_hidden_layers")
    hidden_size, kind = required(config, "hidden_size"), config["model_type"]
    head_dim = config.get("head_dim") or hidden_size // heads
    attention_bias = bool(config.get("attention_bias", False))
    return ModelSpec(
        model_type=kind,
        architecture=(config.get("architectures") or [kind])[0],
        vocab_size=required(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=required(config, "intermediate_size"),
        layers=layers,
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        rms_norm_eps=config.get("rms_norm_eps", 1e-6),
        ropes=(read_rope(config, head_dim, partial=partial_rope),) * layers,
        max_position=max_positions(config),
        windows=(None,) * layers,
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
        eos_token_ids=token_ids(config.get("eos_token_id")),
        attention_scale=head_dim**-0.5,
    )


def max_positions(config: Json) -> int:
    """Return the number of positions that a model was made for: `max_position_embeddings` or, with YaRN, the original
    positions times the factor, if that is more. Qwen documents YaRN as an addition to a config.json whose
    `max_position_embeddings` stays the original number."""
    positions = int(required(config, "max_position_embeddings"))
    params = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    if "yarn" not in (params.get("rope_type"), params.get("type")):
        return positions
    return max(positions, int(params["factor"] * (params.get("original_max_position_embeddings") or positions)))


def required(config: Json, key: str) -> Any:
    """Return a value of config.json. Raises ValueError if there is none."""
    if config.get(key) is None:
        raise ValueError(f"config.json has no {key}")
    return config[key]


def token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """Return the token ids that config.json gives as one id, as a list, or as None (no ids)."""
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def read_experts(config: Json, spec: ModelSpec, **others: Any) -> ExpertsSpec:
    """Return the experts' part of a model's spec, for a family whose layers all have experts as wide as its MLP, with
    weights that add up to 1. `others` are further fields. Raises ValueError for bad numbers."""
    return ExpertsSpec(
        count=required(config, "num_local_experts"),
        top_k=required(config, "num_experts_per_tok"),
        width=spec.intermediate_size,
        normalised=True,
        layers=(True,) * spec.layers,
        **others,
    )


def windows_by_type(kinds: list[str], window: int | None, layers: int) -> tuple[int | None, ...]:
    """Return the attention window of each layer: `window` tokens where `kinds`, config.json's `layer_types`, says
    sliding_attention, else None. Raises ValueError if `kinds` does not name every layer's kind of attention."""
    unknown = set(kinds) - {"full_attention", "sliding_attention"}
    if unknown or len(kinds) != layers:
        raise ValueError(f"layer_types must name {layers} layers full_attention or sliding_attention, not {kinds}")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
