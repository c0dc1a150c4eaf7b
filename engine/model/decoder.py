"""A Llama-family decoder over a flat batch of rows, which mixes prefill chunks and decodes.

Every linear computes the base model's output and, in rows that have an adapter, adds that adapter's delta.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from engine.model.arena import Arena
from engine.model.batch import BatchInput
from engine.model.lora import LoraStep, ProjectionGroups, prepare_lora, projection_groups
from engine.model.parallel.layers import SharedEmbedding, SharedHead
from engine.model.parallel.ranks import ALONE, Ranks
from engine.model.parallel.shard import WHOLE, Shard
from engine.model.rope import Angles, angles
from engine.model.spec import ModelSpec
from engine.model.weights import WeightSource
from lora_kernels.backend import AttentionBatch, Backend
from lora_kernels.linear import Embedding, Linear, kept_bits, make_embedding, make_linear
from lora_kernels.pointwise import HeadNorms
from lora_kernels.quantized import Weight, dense


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one layer. `index` counts a stage's layers from 0, as its arena does. Norms are [hidden_size].
    `window` is the sliding attention window in tokens; None means full attention. `head_norms` (RMSNorm of query and
    key heads, as in Qwen3) is None if the model has none."""

    index: int
    window: int | None
    input_norm: Tensor
    qkv: Linear
    head_norms: HeadNorms | None
    o: Linear
    post_norm: Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class Step:
    """Inputs of one step that all layers share: rotary angles, attention batch, pages, backend and LoRA work."""

    angles: Angles
    attention: AttentionBatch
    arena: Arena
    backend: Backend
    lora: LoraStep


class StepOutput(NamedTuple):
    """What a step has computed, valid until the next step is computed: the logits [num_samples, vocab_size] of the
    sampled rows, and the residual stream [num_rows, hidden_size] of all rows after the last layer, before the final
    norm."""

    logits: Tensor
    residual: Tensor


@dataclass(frozen=True, slots=True)
class Decoder:
    """A model's weights and its forward pass. `embed` looks up rows of [hidden_size], `inv_freq` is fp32
    [head_dim / 2], `norm` (the final RMSNorm) [hidden_size]. With several ranks, `spec` and the layers are this rank's
    part of the model, and the ranks of a stage compute each pass together. Of several stages only the first has
    `embed`, `norm` and `head`."""

    spec: ModelSpec
    groups: ProjectionGroups
    embed: Embedding
    inv_freq: Tensor
    layers: tuple[Layer, ...]
    norm: Tensor
    head: Linear
    ranks: Ranks = ALONE

    def forward(self, batch: BatchInput, arena: Arena, backend: Backend, lora: LoraStep | None = None) -> Tensor:
        """Computes every row and writes its K and V to the arena. Returns the logits [num_samples, vocab_size] of
        `batch.sample_rows`, in the model's dtype. Call it in inference mode. The pass never waits for the device, and
        its launches depend on shapes and host data only, so that a step may be captured in a CUDA graph.

        Args:
            lora: the prepared work of the step's adapters. None means that it is prepared from `batch.segments`.
        """
        return self.run(batch, arena, backend, lora).logits

    def run(self, batch: BatchInput, arena: Arena, backend: Backend, lora: LoraStep | None = None) -> StepOutput:
        """Does what `forward` does, and also returns the residual stream of every row."""
        step = self.step(batch, arena, backend, lora or prepare_lora(backend, arena.flat, arena.table, batch.segments))
        x = self.embedded(batch)
        return StepOutput(self.compute(x, step, batch.sample_rows), x)

    def embedded(self, batch: BatchInput, out: Tensor | None = None) -> Tensor:
        """Returns the embedded rows of a step, [num_rows, hidden_size]: `out`, if it is given."""
        return self.embed(batch.token_ids, out)

    def step(self, batch: BatchInput, arena: Arena, backend: Backend, lora: LoraStep) -> Step:
        turned = angles(batch.positions, self.inv_freq, self.spec.rope.attention_factor)
        return Step(turned, batch.attention, arena, backend, lora)

    def compute(self, x: Tensor, step: Step, sample_rows: Tensor | None) -> Tensor:
        """Runs all layers over the embedded rows `x` ([num_rows, hidden_size]) and writes their K and V to the arena.
        `x` becomes the residual stream after the last layer. Returns the logits [num_samples, vocab_size] of
        `sample_rows`; None means all rows."""
        delta = self._run_layers(x, step)
        # Of all rows: the residual stream must be complete where vectors are pooled from it, and this takes one launch
        # less than selecting the sampled rows of both summands.
        rows = step.backend.pointwise.add_norm(x, delta, self.norm, self.spec.rms_norm_eps)
        if sample_rows is None:
            return self.head(rows)
        return self.head(rows[sample_rows]) if len(sample_rows) else x.new_empty(0, self.spec.vocab_size)

    def advance(self, x: Tensor, step: Step) -> None:
        """Runs a stage's layers over `x` [num_rows, hidden_size], which becomes the residual stream after them."""
        delta = self._run_layers(x, step)
        if delta is not None:
            x += delta

    def _run_layers(self, x: Tensor, step: Step) -> Tensor | None:
        """Runs all layers over `x`, and returns what is still to be added to it. None means nothing."""
        pointwise, eps, delta = step.backend.pointwise, self.spec.rms_norm_eps, None
        for layer in self.layers:
            step.arena.copies.wait(layer.index)
            delta = self._attend(layer, pointwise.add_norm(x, delta, layer.input_norm, eps), step)
            delta = self._feed_forward(layer, pointwise.add_norm(x, delta, layer.post_norm, eps), step)
        return delta

    def final_norm(self, x: Tensor, backend: Backend) -> Tensor:
        """Returns the hidden states [num_rows, hidden_size], as the head reads them, of rows of the residual stream."""
        return backend.pointwise.add_norm(x, None, self.norm, self.spec.rms_norm_eps)

    def logits(self, x: Tensor, backend: Backend) -> Tensor:
        """Returns the logits [num_rows, vocab_size], in the model's dtype, of rows of the residual stream."""
        return self.head(self.final_norm(x, backend))

    def _attend(self, layer: Layer, x: Tensor, step: Step) -> Tensor:
        qkv = step.lora.apply(layer.qkv, x, layer.index, self.groups.qkv)
        kv, coding = step.arena.kv(layer.index), step.arena.kv_coding(layer.index)
        batch, angles = step.attention, step.angles
        query = step.backend.rotate_and_write(qkv, kv, batch, angles.cos, angles.sin, layer.head_norms, coding)
        out = step.backend.attention(query, kv, batch, self.spec.head_dim**-0.5, layer.window, coding).flatten(1)
        return self.ranks.sum(step.lora.apply(layer.o, out, layer.index, self.groups.o), x.dtype)

    def _feed_forward(self, layer: Layer, x: Tensor, step: Step) -> Tensor:
        inner = step.backend.pointwise.swiglu(step.lora.apply(layer.gate_up, x, layer.index, self.groups.gate_up))
        return self.ranks.sum(step.lora.apply(layer.down, inner, layer.index, self.groups.down), x.dtype)


def build_decoder(
    spec: ModelSpec,
    source: WeightSource,
    dtype: torch.dtype,
    device: torch.device,
    on_layer: Callable[[int], None] = lambda _: None,
    ranks: Ranks = ALONE,
    shard: Shard = WHOLE,
) -> Decoder:
    """Reads each weight once, layer by layer, converts it to the layout that is fastest on `device`, and to `dtype`
    unless it stays quantised, and returns the decoder. Calls `on_layer` after each layer with the number of layers that
    are ready. `spec` and `source` are the whole model's, of which `shard`, this rank's part, is read."""
    whole, layers = spec, shard.layers(spec)
    spec, source = shard.spec(spec), shard.source(source, spec)

    def get(name: str) -> Weight:
        weight = source(name)
        if not isinstance(weight, Tensor) and kept_bits(weight.coding, device, dtype):
            return weight.to(device)
        return dense(weight).to(device=device, dtype=dtype)

    ends = _build_ends(whole, get, dtype, ranks, shard) if shard.stage == 0 else NO_ENDS
    sum_dtype, built = torch.float32 if ranks.size > 1 else dtype, []
    for index, number in enumerate(layers):
        built.append(_build_layer(spec, index, number, get, dtype, sum_dtype))
        on_layer(index + 1)
    return Decoder(
        spec=spec,
        groups=projection_groups(spec),
        embed=ends.embed,
        inv_freq=torch.tensor(spec.rope.inv_freq, dtype=torch.float32, device=device),
        layers=tuple(built),
        norm=ends.norm,
        head=ends.head,
        ranks=ranks,
    )


class _Ends(NamedTuple):
    """What comes before and after the layers."""

    embed: Embedding
    norm: Tensor
    head: Linear


def _elsewhere(_: Tensor) -> Tensor:
    raise RuntimeError("the first stage has the embedding and the head")


NO_ENDS = _Ends(lambda token_ids, out=None: _elsewhere(token_ids), torch.empty(0), _elsewhere)
"""The ends of stages other than the first."""


def _build_ends(spec: ModelSpec, get: WeightSource, dtype: torch.dtype, ranks: Ranks, shard: Shard) -> _Ends:
    """Builds the first stage's ends. `spec` is the whole model's."""
    embed = get("model.embed_tokens.weight")
    head = make_linear(embed if spec.tied_embeddings else get("lm_head.weight"), dtype=dtype)
    embedding, norm = make_embedding(embed, head, dtype, tied=spec.tied_embeddings), dense(get("model.norm.weight"))
    if ranks.size == 1:
        return _Ends(embedding, norm, head)
    shared = SharedEmbedding(embedding, shard.tokens(spec), ranks)
    return _Ends(shared, norm, SharedHead(head, spec.vocab_size, ranks))


def _build_layer(
    spec: ModelSpec, index: int, number: int, get: WeightSource, dtype: torch.dtype, sum_dtype: torch.dtype
) -> Layer:
    """Builds the layer that is `number` in the model, and `index` among the layers of `spec`. Results of o and down,
    which are summed over ranks, are in `sum_dtype` where the kernel can give it."""

    def tensor(name: str) -> Tensor:
        return dense(get(f"model.layers.{number}.{name}"))

    def fused(block: str, names: tuple[str, ...], bias: bool, out_dtype: torch.dtype = dtype) -> Linear:
        weights = [get(f"model.layers.{number}.{block}.{name}_proj.weight") for name in names]
        biases = torch.cat([tensor(f"{block}.{name}_proj.bias") for name in names]) if bias else None
        return make_linear(weights, biases, dtype, out_dtype)

    def head_norms() -> HeadNorms:
        query, key = (tensor(f"self_attn.{name}_norm.weight") for name in "qk")
        return HeadNorms(query, key, spec.rms_norm_eps)

    return Layer(
        index=index,
        window=spec.windows[index],
        input_norm=tensor("input_layernorm.weight"),
        qkv=fused("self_attn", ("q", "k", "v"), spec.qkv_bias),
        head_norms=head_norms() if spec.qk_norm else None,
        o=fused("self_attn", ("o",), spec.o_bias, sum_dtype),
        post_norm=tensor("post_attention_layernorm.weight"),
        gate_up=fused("mlp", ("gate", "up"), spec.mlp_bias),
        down=fused("mlp", ("down",), spec.mlp_bias, sum_dtype),
    )
