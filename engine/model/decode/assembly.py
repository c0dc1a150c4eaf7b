"""Builds a decoder, or the part of it that a rank has, from a model's weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from engine.model.decode.decoder import Decoder, Layer, Norms, Rope
from engine.model.decode.head import Head
from engine.model.layers.feed_forward import Experts, FeedForward, Mlp, SharedMlp
from engine.model.layers.lora import ProjectionGroups, projection_groups
from engine.model.ranks.collectives import ALONE, Ranks
from engine.model.ranks.shard import WHOLE, Cut, Shard
from engine.model.spec.config import ModelSpec
from engine.model.spec.rope import RopeSpec
from engine.model.weights.reader import WeightSource, mlp_path
from lora_kernels.backend import Scores
from lora_kernels.grouped import GroupedLinear, make_grouped
from lora_kernels.linear import Embedding, Linear, kept_bits, make_embedding, make_linear
from lora_kernels.pointwise import QkNorms
from lora_kernels.quantized import Weight, dense


class _Reader(NamedTuple):
    """The functions and dtypes with which `build_decoder` reads weights and makes linears."""

    weight: WeightSource
    """Returns a parameter on the decoder's device, in `dtype` unless it stays quantised or, on a CPU, is in bf16."""
    norm: Callable[[str], Tensor]
    """Returns the weight of a norm, in the dtype in which the decoder multiplies by it."""
    dtype: torch.dtype
    sum_dtype: torch.dtype
    """Dtype of the outputs of linears that ranks add up (o and down), where the kernel can give it."""

    def bias(self, *paths: str) -> Tensor:
        """Return the biases of the projections at `paths`, concatenated to one vector."""
        return torch.cat([dense(self.weight(f"{path}.bias"), self.dtype) for path in paths])

    def fused(
        self, block: str, names: tuple[str, ...], bias: bool = False, out_dtype: torch.dtype | None = None
    ) -> Linear:
        """Return the projections `names` (`q` for `q_proj`) of the module at path `block` as one linear, whose outputs
        are theirs, one after the other."""
        paths = [f"{block}.{name}_proj" for name in names]
        biases = self.bias(*paths) if bias else None
        return make_linear([self.weight(f"{path}.weight") for path in paths], biases, self.dtype, out_dtype)


def build_decoder(
    spec: ModelSpec,
    source: WeightSource,
    dtype: torch.dtype,
    device: torch.device,
    on_layer: Callable[[int], None] = lambda _: None,
    ranks: Ranks = ALONE,
    shard: Shard = WHOLE,
) -> Decoder:
    """Read each weight of `shard`, layer by layer, convert it to the fastest layout on `device` and, unless it stays
    quantised, to `dtype`, and return the decoder. Calls `on_layer` with the number of layers that are ready."""
    whole, layers = spec, shard.layers(spec)
    spec, source = shard.spec(spec), shard.source(source, spec)

    def get(name: str) -> Weight:
        weight = source(name)
        if not isinstance(weight, Tensor) and kept_bits(weight.coding, device, dtype):
            return weight.to(device)
        weight = dense(weight)
        if device.type == "cpu" and weight.dtype == torch.bfloat16:
            return weight  # linears may pack it as it is, and convert it otherwise
        return weight.to(device=device, dtype=dtype)

    def norm(name: str) -> Tensor:
        weight = dense(source(name)).to(device=device, dtype=torch.float32 if spec.wide_norms else dtype)
        return weight + spec.norm_weight_offset if spec.norm_weight_offset else weight

    reader = _Reader(get, norm, dtype, torch.float32 if ranks.size > 1 else dtype)
    ends = _build_ends(whole, reader, ranks, shard) if shard.stage == 0 else NO_ENDS
    ropes, built, groups = tuple(dict.fromkeys(spec.ropes)), [], projection_groups(spec)
    for index, number in enumerate(layers):
        built.append(_build_layer(spec, groups, index, number, ropes.index(spec.ropes[index]), reader))
        on_layer(index + 1)
    return Decoder(
        spec=spec,
        groups=groups,
        embed=ends.embed,
        ropes=tuple(_make_rope(rope, device) for rope in ropes),
        layers=tuple(built),
        head=Head(spec, ends.norm, ends.head),
        ranks=ranks,
    )


def _make_rope(rope: RopeSpec, device: torch.device) -> Rope:
    return Rope(torch.tensor(rope.inv_freq, dtype=torch.float32, device=device), rope.attention_factor)


class _Ends(NamedTuple):
    """The embedding, which comes before the layers, and the final norm and the head, which come after them."""

    embed: Embedding
    norm: Tensor
    head: Linear


def _elsewhere(token_ids: Tensor, out: Tensor | None = None) -> Tensor:
    raise RuntimeError("the first stage has the embedding and the head")


NO_ENDS = _Ends(_elsewhere, torch.empty(0), _elsewhere)
"""Placeholder on pipeline stages other than the first: they have no embedding, final norm or head."""


def _build_ends(spec: ModelSpec, reader: _Reader, ranks: Ranks, shard: Shard) -> _Ends:
    """Build the embedding, the final norm and the head, which only the first pipeline stage has. `spec` is the whole
    model's, and `shard` this rank's part of it."""
    dtype, embed = reader.dtype, reader.weight("model.embed_tokens.weight")
    head = make_linear(embed if spec.tied_embeddings else reader.weight("lm_head.weight"), dtype=dtype)
    embedding = make_embedding(embed, head, dtype, tied=spec.tied_embeddings)
    if ranks.size > 1:
        embedding = SharedEmbedding(embedding, shard.tokens(spec), ranks)
        head = SharedHead(head, spec.vocab_size, ranks)
    if spec.embedding_scale != 1.0:
        embedding = ScaledEmbedding(embedding, torch.tensor(spec.embedding_scale, dtype=dtype).item())
    return _Ends(embedding, reader.norm("model.norm.weight"), head)


def _build_layer(
    spec: ModelSpec, groups: ProjectionGroups, index: int, number: int, rope: int, reader: _Reader
) -> Layer:
    """Build one decoder layer. `number` counts among the layers of the whole model, and names the weights; `index`
    counts among this rank's layers, which `spec` describes. `rope` is its index in `Decoder.ropes`."""
    prefix = f"model.layers.{number}"

    def qk_norms() -> QkNorms:
        query, key = (reader.norm(f"{prefix}.self_attn.{name}_norm.weight") for name in "qk")
        return QkNorms(query, key, spec.rms_norm_eps)

    sinks = dense(reader.weight(f"{prefix}.self_attn.sinks")).float() if spec.sinks else None
    return Layer(
        index=index,
        window=spec.windows[index],
        scores=Scores(spec.attention_scale, spec.attention_cap, sinks),
        rope=rope,
        norms=Norms(*(reader.norm(f"{prefix}.{name}.weight") if name else None for name in spec.norms)),
        qkv=reader.fused(f"{prefix}.self_attn", ("q", "k", "v"), spec.qkv_bias),
        qk_norms=qk_norms() if spec.qk_norm else None,
        o=reader.fused(f"{prefix}.self_attn", ("o",), spec.o_bias, reader.sum_dtype),
        feed_forward=_build_feed_forward(spec, groups, index, prefix, reader),
    )


def _build_feed_forward(
    spec: ModelSpec, groups: ProjectionGroups, index: int, prefix: str, reader: _Reader
) -> FeedForward:
    def mlp() -> Mlp:
        path, bias = f"{prefix}.{mlp_path(spec, index)}", spec.mlp_bias
        gate_up = reader.fused(path, ("gate", "up"), bias)
        down = reader.fused(path, ("down",), bias, reader.sum_dtype)
        return Mlp(gate_up, down, (groups.gate_up, groups.down), spec.activation)

    if spec.experts is None or groups.experts is None or not spec.has_experts(index):
        return mlp()
    experts, path = spec.experts, f"{prefix}.mlp"

    def grouped(names: tuple[str, ...], out_dtype: torch.dtype) -> GroupedLinear:
        paths = [[f"{path}.experts.{one}.{name}_proj" for name in names] for one in range(experts.count)]
        weights = ([reader.weight(f"{module}.weight") for module in modules] for modules in paths)
        biases = None
        if experts.biased:
            biases = torch.stack([reader.bias(*modules) for modules in paths])
        return make_grouped(weights, experts.count, reader.dtype, out_dtype, biases)

    router_bias = reader.bias(f"{path}.gate") if experts.biased else None
    return Experts(
        router=make_linear(reader.weight(f"{path}.gate.weight"), router_bias, reader.dtype),
        gate_up=grouped(("gate", "up"), reader.dtype),
        down=grouped(("down",), reader.sum_dtype),
        top_k=experts.top_k,
        normalised=experts.normalised,
        groups=groups.experts,
        activation=spec.activation,
        shared=SharedMlp(mlp(), make_linear(reader.weight(f"{path}.shared_expert_gate.weight"), dtype=reader.dtype))
        if experts.shared
        else None,
    )


@dataclass(frozen=True, slots=True)
class ScaledEmbedding:
    """An embedding whose rows are multiplied by `scale`."""

    part: Embedding
    scale: float

    def __call__(self, token_ids: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the scaled embeddings of the tokens, [num_rows, hidden_size], in `out` if it is given."""
        return self.part(token_ids, out).mul_(self.scale)


@dataclass(frozen=True, slots=True)
class SharedEmbedding:
    """A vocabulary-parallel embedding: this rank has the rows of `tokens` in `part`, and ranks add up their results."""

    part: Embedding
    tokens: Cut
    ranks: Ranks

    def __call__(self, token_ids: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the embeddings of the tokens, [num_rows, hidden_size], in `out` if it is given. The sum over ranks is
        exact, because all ranks but one add zeros for a token."""
        ids = token_ids - self.tokens.start
        others = (ids < 0) | (ids >= self.tokens.stop - self.tokens.start)
        rows = self.part(ids.masked_fill(others, 0)).masked_fill_(others[:, None], 0)
        total = self.ranks.sum(rows, rows.dtype)
        return total if out is None else out.copy_(total)


@dataclass(frozen=True, slots=True)
class SharedHead:
    """A vocabulary-parallel head: `part` computes the logits of this rank's part of the tokens."""

    part: Linear
    vocab_size: int
    ranks: Ranks

    @torch.inference_mode()
    def __call__(self, x: Tensor) -> Tensor:
        """Return the logits of all tokens, [num_rows, vocab_size], on every rank."""
        return self.ranks.join_columns(self.part(x), self.vocab_size)
