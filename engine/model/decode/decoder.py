"""The decoder of all families of models, over a flat batch of rows, which mixes prefill chunks and decodes.

Every linear computes the base model's output and, in rows that have an adapter, adds that adapter's delta.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from engine.model.batch.rows import BatchInput, Longs
from engine.model.decode.head import Head
from engine.model.layers.feed_forward import Experts, FeedForward
from engine.model.layers.lora import LoraStep, ProjectionGroups, prepare_lora
from engine.model.memory.arena import Arena
from engine.model.ranks.collectives import ALONE, Ranks
from engine.model.spec.config import ModelSpec
from engine.model.spec.rope import Angles, angles
from lora_kernels.backend import AttentionBatch, Backend, Scores
from lora_kernels.linear import Embedding, Linear
from lora_kernels.pointwise import Pointwise, QkNorms
from lora_kernels.tokens import TrainedTokens, prepare_tokens


class Norms(NamedTuple):
    """Weights of a layer's norms, [hidden_size]. None means that there is no norm at that place."""

    before_attention: Tensor | None
    after_attention: Tensor | None
    before_mlp: Tensor | None
    after_mlp: Tensor | None


class Rope(NamedTuple):
    """A rotary embedding: frequencies, fp32 [rotary_dim / 2], and the factor of cos and sin."""

    inv_freq: Tensor
    attention_factor: float


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one layer."""

    index: int
    """Number of the layer in its stage, from 0, as in the stage's arena."""
    window: int | None
    """Sliding attention window in tokens. None means full attention."""
    scores: Scores
    """Scale, bound and sinks of the scores of attention."""
    rope: int
    """Index of its rotary embedding in `Decoder.ropes`."""
    norms: Norms
    qkv: Linear
    qk_norms: QkNorms | None
    """RMSNorms of queries and keys. None means that there are none."""
    o: Linear
    feed_forward: FeedForward


@dataclass(frozen=True, slots=True)
class Step:
    """Inputs of one step that all layers share: angles of each rotary embedding, attention batch, pages, backend, LoRA
    work, and the trained tokens of its adapters (None means that they have none)."""

    angles: tuple[Angles, ...]
    attention: AttentionBatch
    arena: Arena
    backend: Backend
    lora: LoraStep
    tokens: TrainedTokens | None = None


class StepOutput(NamedTuple):
    """What a step has computed, valid until the next: logits [num_samples, vocab_size], and the residual stream
    [num_rows, hidden_size] after the last layer. `tokens` are the trained tokens, on which further logits depend."""

    logits: Tensor
    residual: Tensor
    tokens: TrainedTokens | None = None


@dataclass(frozen=True, slots=True)
class Decoder:
    """A model's weights and its forward pass: `run` computes a step. What captures, records or splits a step calls
    `step` and `embedded`, and then `outputs` or, in a pipeline stage, `advance`; `head` reads the residual stream."""

    spec: ModelSpec
    groups: ProjectionGroups
    embed: Embedding
    """Looks up rows of [hidden_size]. Of several stages only the first has it."""
    ropes: tuple[Rope, ...]
    """The different rotary embeddings of the layers."""
    layers: tuple[Layer, ...]
    """`spec` and `layers`: with several ranks, this rank's part of the model. The ranks of a stage compute each pass
    together."""
    head: Head
    ranks: Ranks = ALONE

    @property
    def waits_for_routing(self) -> bool:
        """Return whether the host waits for the routing of experts, so that no step can be captured."""
        return any(
            isinstance(layer.feed_forward, Experts) and layer.feed_forward.waits_for_routing for layer in self.layers
        )

    def run(self, batch: BatchInput, arena: Arena, backend: Backend, lora: LoraStep | None = None) -> StepOutput:
        """Compute every row, write its K and V to the arena, and return logits and residual stream. Call it in
        inference mode. `lora` is the step's prepared work, by default that of `batch.segments`."""
        # The pass never waits for the device, and its launches depend on shapes and host data only, so that a step may
        # be captured in a CUDA graph.
        if lora is None:
            lora = prepare_lora(backend, arena.flat, arena.table, batch.segments, len(batch.token_ids))
        step = self.step(batch, arena, backend, lora)
        x = self.embedded(batch, step)
        outputs = self.outputs(x, step, batch.sample_rows, batch.host_sample_rows)
        return StepOutput(self.head.finish(outputs), x, step.tokens)

    def step(self, batch: BatchInput, arena: Arena, backend: Backend, lora: LoraStep) -> Step:
        """Prepare the inputs of a step that all layers share."""
        turned = tuple(angles(batch.positions, *rope) for rope in self.ropes)
        tokens = prepare_tokens(arena.flat, arena.table, batch.segments)
        return Step(turned, batch.attention, arena, backend, lora, tokens)

    def embedded(self, batch: BatchInput, step: Step, out: Tensor | None = None) -> Tensor:
        """Return the embedded rows of a step, [num_rows, hidden_size], written to `out` if it is given. A token that
        the row's adapter has trained gets the adapter's embedding."""
        x = self.embed(batch.token_ids, out)
        if step.tokens is not None:
            step.arena.copies.wait(0)
            step.tokens.embed(x, batch.token_ids, self.spec.embedding_scale)
        return x

    def outputs(
        self, x: Tensor, step: Step, sample_rows: Tensor | None, host_sample_rows: Longs | None = None
    ) -> Tensor:
        """Run all layers over the embedded rows `x` ([num_rows, hidden_size]), which becomes the residual stream, and
        return the head's outputs [num_samples, vocab_size] of `sample_rows`, None for all. `Head.finish` makes logits
        of them."""
        delta = self._run_layers(x, step)
        # Of all rows: the residual stream must be complete where vectors are pooled from it, and this takes one launch
        # less than selecting the sampled rows of both summands.
        rows = self._entering(x, delta, self.head.norm, step.backend.pointwise)
        if sample_rows is None:
            return self.head.outputs(rows, step.tokens, None)
        if not len(sample_rows):
            return x.new_empty(0, self.spec.vocab_size)
        return self.head.outputs(rows[sample_rows], step.tokens, host_sample_rows)

    def advance(self, x: Tensor, step: Step) -> None:
        """Run a pipeline stage's layers over `x` [num_rows, hidden_size], which becomes the residual stream after
        them: the input of the next stage."""
        self._entering(x, self._run_layers(x, step), None, step.backend.pointwise)

    def _run_layers(self, x: Tensor, step: Step) -> Tensor | None:
        """Run all layers over `x`, and return what is still to be added to it. None means nothing."""
        pointwise, delta = step.backend.pointwise, None
        for layer in self.layers:
            step.arena.copies.wait(layer.index)
            delta = self._attend(layer, self._entering(x, delta, layer.norms.before_attention, pointwise), step)
            delta = self._leaving(delta, layer.norms.after_attention, pointwise)
            inner = self._entering(x, delta, layer.norms.before_mlp, pointwise)
            delta = self.ranks.sum(layer.feed_forward.compute(inner, layer.index, step.backend, step.lora), x.dtype)
            delta = self._leaving(delta, layer.norms.after_mlp, pointwise)
        return delta

    def _entering(self, x: Tensor, delta: Tensor | None, norm: Tensor | None, pointwise: Pointwise) -> Tensor:
        """Add `delta`, if given, times `ModelSpec.residual_scale` to the residual stream `x` in place. Return the input
        of the next attention, MLP or head: `x` normalised by `norm`, or `x` itself if `norm` is None."""
        return pointwise.add_norm(x, delta, norm, self.spec.rms_norm_eps, self.spec.residual_scale)

    def _leaving(self, delta: Tensor, norm: Tensor | None, pointwise: Pointwise) -> Tensor:
        """Return the output `delta` of attention or MLP as it is added to the residual stream, before
        `ModelSpec.residual_scale`: normalised by `norm`, unless that is None."""
        return delta if norm is None else pointwise.add_norm(delta, None, norm, self.spec.rms_norm_eps)

    def _attend(self, layer: Layer, x: Tensor, step: Step) -> Tensor:
        qkv = step.lora.apply(layer.qkv, x, layer.index, self.groups.qkv)
        kv, coding = step.arena.kv(layer.index), step.arena.kv_coding(layer.index)
        batch, angles = step.attention, step.angles[layer.rope]
        query = step.backend.rotate_and_write(qkv, kv, batch, angles.cos, angles.sin, layer.qk_norms, coding)
        out = step.backend.attention(query, kv, batch, layer.scores, layer.window, coding).flatten(1)
        return self.ranks.sum(step.lora.apply(layer.o, out, layer.index, self.groups.o), x.dtype)
