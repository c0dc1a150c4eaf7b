"""How K and V are stored in FP8 (e4m3): less a constant of each key's head, which softmax ignores, and divided by
scales of each layer and KV head, from the checkpoint or measured when the model is loaded."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import torch
from torch import Tensor

from engine.model.batch.rows import BatchInput
from engine.model.decode.decoder import Decoder
from engine.model.memory.arena import Arena, page_shape
from engine.model.weights.reader import read_kv_scales
from lora_kernels.backend import AttentionBatch, KvCoding, Scores, require_plain
from lora_kernels.layout import LoraTable, ProjectionGroup
from lora_kernels.pointwise import QkNorms, TorchPointwise, rotate_heads
from lora_kernels.reference import attend, find_seen
from lora_kernels.routing import TorchExperts
from lora_kernels.segments import SegmentPlan, plan_segments

log = structlog.get_logger(__name__)

# Some models' keys are larger than e4m3's 448: biases of Qwen2.5 make several hundreds, beside which the rest of a key
# would be rounded away. The constant is the mean key over positions, which keeps what the rotary embedding turns
# slowly. A bound several times too large costs no precision. Where scores are bounded or heads have sinks, nothing is
# subtracted, because weights would change.

LARGEST = 448.0
"""Largest number of e4m3 (OCP 8-bit Floating Point Specification, table 1)."""
MARGIN = 2.0
"""Factor by which the largest number that can be stored exceeds the largest that was measured, as a reserve for tokens
and adapters that make larger numbers."""
PROMPTS, PROMPT_TOKENS = 8, 256
POSITIONS = 512
SEED = 0


def find_kv_codings(
    folder: Path, load_format: str, decoder: Decoder, dtype: torch.dtype, max_model_len: int
) -> tuple[KvCoding, ...]:
    """Return the FP8 coding of each layer's K and V for `max_model_len` positions: the checkpoint's scales, if it has
    any, else measured ones. Raises ValueError if scales are invalid or K or V are not finite."""
    spec, device = decoder.spec, decoder.ropes[0].inv_freq.device
    scales = None if load_format == "dummy" else read_kv_scales(folder, spec)
    if scales is None:
        codings = measure_kv_codings(decoder, dtype, max_model_len)
    else:
        shift = torch.zeros(spec.kv_heads, spec.head_dim, device=device)
        codings = tuple(KvCoding(of_layer, shift) for of_layer in scales.to(device))
    largest = max((coding.scales[0].max() * LARGEST).item() for coding in codings)
    log.info("K and V in FP8", scales="measured" if scales is None else "checkpoint", largest_key=round(largest, 1))
    return codings


@torch.inference_mode()
def measure_kv_codings(decoder: Decoder, dtype: torch.dtype, max_model_len: int) -> tuple[KvCoding, ...]:
    """Measure K and V on random prompts and the tokens that the model samples from them, and return each layer's FP8
    coding, the same each time, with scales of powers of two. Raises ValueError if they are not finite."""
    spec, device = decoder.spec, decoder.ropes[0].inv_freq.device
    arena = Arena(page_shape(spec, 16), 1, 1, dtype, device)
    generator = torch.Generator().manual_seed(SEED)
    prompt = torch.randint(spec.vocab_size, (min(PROMPT_TOKENS, spec.max_position),), generator=generator)
    meters = []
    for _ in range(PROMPTS):
        meters.append(_Meter())
        logits = decoder.run(_chunk(prompt.to(device)), arena, meters[-1]).logits
        if not all(torch.isfinite(tensor).all() for tensor in (*meters[-1].keys, *meters[-1].values)):
            raise ValueError("engine.kv_dtype is fp8, and the model computes K or V that are not finite")
        prompt = _samples(logits.float().cpu(), generator)
    turned = [_turned(rope.inv_freq.cpu(), max_model_len) for rope in decoder.ropes]
    codings = []
    for layer in range(spec.layers):
        keys = torch.cat([meter.keys[layer] for meter in meters])
        values = torch.stack([meter.values[layer] for meter in meters]).amax(0)
        here = decoder.layers[layer]
        codings.append(_coding(keys, values, turned[here.rope], device, is_shifted=here.scores.are_relative))
    return tuple(codings)


def _turned(inv_freq: Tensor, max_model_len: int) -> Tensor:
    """Return the factors by which the rotary embedding turns each pair of a key at POSITIONS positions below
    `max_model_len`, evenly spaced on a logarithmic scale: complex [POSITIONS, head_dim / 2]."""
    positions = torch.logspace(0, math.log10(max(max_model_len, 2)), POSITIONS) - 1
    angles = positions[:, None] * inv_freq
    return torch.polar(torch.ones_like(angles), angles)


def _coding(keys: Tensor, values: Tensor, turned: Tensor, device: torch.device, *, is_shifted: bool = True) -> KvCoding:
    """Return the FP8 coding of one layer's K and V, with keys shifted if `is_shifted`.

    Args:
        keys: complex [num_tokens, kv_heads, head_dim / 2], pairs before they are turned.
        values: fp32 [kv_heads], the largest numbers of V.
        turned: from `_turned`.
    """
    mean, average = keys.mean(0) if is_shifted else torch.zeros_like(keys[0]), turned.mean(0)
    shift = mean * average
    farthest = (keys - mean).abs().amax(0) + mean.abs() * (turned - average).abs().amax(0)
    bounds = torch.stack([farthest.amax(-1), values])
    exponents = (bounds * (MARGIN / LARGEST)).clamp(min=torch.finfo(torch.float16).tiny).log2().ceil()
    return KvCoding(exponents.exp2().to(device), torch.cat([shift.real, shift.imag], -1).to(device))


def _samples(logits: Tensor, generator: torch.Generator) -> Tensor:
    """Draw a token from each row of `logits` ([num_rows, vocab_size]) at temperature 1."""
    return torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]


def _chunk(prompt: Tensor) -> BatchInput:
    """Return the input of a step that computes one calibration prompt, int64 [num_tokens], from whose K and V the
    scales of FP8 KV are found. All rows are sampled. No KV is stored, because `_Meter` only records K and V."""
    count, device = len(prompt), prompt.device
    attention = AttentionBatch(
        query_starts=torch.tensor([0, count], dtype=torch.int32, device=device),
        context_lens=torch.tensor([count], dtype=torch.int32, device=device),
        block_tables=torch.zeros(1, count, dtype=torch.int32, device=device),
        kv_slots=torch.full((count,), -1, dtype=torch.int64, device=device),
        num_decodes=0,
        max_query=count,
        max_context=count,
        host_query_starts=(0, count),
        host_context_lens=(count,),
    )
    segments = plan_segments(np.full(count, -1, dtype=np.int32))
    return BatchInput(prompt, torch.arange(count, device=device), attention, segments, None, ())


class _Meter:
    """A `Backend` for measuring the scales of FP8 KV: records K and V of one prompt without adapters, in torch on any
    device. It stores no pages."""

    name = "meter"

    def __init__(self) -> None:
        self.pointwise = TorchPointwise()
        self.experts = TorchExperts(self.prepare_lora)
        self.keys: list[Tensor] = []
        """The pairs of K of each layer so far, before they were turned, on the host: complex [num_tokens, kv_heads,
        head_dim / 2]. Where the embedding multiplies by a factor (YaRN), they are multiplied, too."""
        self.values: list[Tensor] = []
        """The largest numbers of V of each layer so far, on the host: fp32 [kv_heads]."""
        self._key_value: tuple[Tensor, Tensor]

    def rotate_and_write(
        self,
        qkv: Tensor,
        kv: Tensor,
        batch: AttentionBatch,
        cos: Tensor,
        sin: Tensor,
        norms: QkNorms | None,
        kv_coding: KvCoding | None = None,
    ) -> Tensor:
        """Record K and V of a layer in `keys` and `values`, from which FP8 scales are found, and keep them for
        `attention`. See `Backend.rotate_and_write`."""
        require_plain(kv_coding)
        query, key, value = rotate_heads(self.pointwise, qkv, kv, cos, sin, norms)
        low, high = key.float().chunk(2, dim=-1)
        half = low.shape[-1]
        turns = torch.complex(cos[..., :half], sin[..., half:])
        self.keys.append((torch.complex(low, high) / (turns / turns.abs())).cpu())
        self.values.append(value.float().abs().amax((0, 2)).cpu())
        self._key_value = key, value
        return query

    def write_kv(self, kv: Tensor, key: Tensor, value: Tensor, batch: AttentionBatch) -> None:
        """Do nothing: `attention` reads the K and V that `rotate_and_write` computed."""

    def attention(
        self,
        query: Tensor,
        kv: Tensor,
        batch: AttentionBatch,
        scores: Scores,
        window: int | None = None,
        kv_coding: KvCoding | None = None,
    ) -> Tensor:
        """Return causal attention over the K and V that `rotate_and_write` has just computed for the same layer. See
        `Backend.attention`."""
        rows = torch.arange(len(query), device=query.device)
        return attend(query, *self._key_value, find_seen(rows, rows, window), scores).to(query.dtype)

    def prepare_lora(self, arena: Tensor, table: LoraTable, plan: SegmentPlan) -> None:
        """Return None, because K and V are measured without adapters."""

    def add_lora(self, out: Tensor, x: Tensor, prepared: Any, layer: int, group: ProjectionGroup) -> None:
        """Do nothing, because K and V are measured without adapters."""
