"""Factors of K and V that are stored in FP8, one for each KV head of each layer.

The largest e4m3 number is 448, and some models' keys are larger: the biases of Qwen2.5's key projections make several
hundreds. Each head's numbers are therefore divided by a factor before they are stored. Unless the checkpoint has the
factors, they are measured when the model is loaded.

The rotary embedding turns pairs of a key's numbers and keeps the norms of the pairs, so the largest norm bounds the key
at every position, whichever positions were measured. e4m3 is a floating-point format: a bound that is several times too
large costs no precision, but numbers more than 2^14 below the bound.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.model.arena import Arena, page_shape
from engine.model.batch import BatchInput
from engine.model.decoder import Decoder
from engine.model.weights import read_kv_scales
from lora_kernels.backend import AttentionBatch, require_unscaled
from lora_kernels.layout import LoraTable, ProjectionGroup
from lora_kernels.pointwise import HeadNorms, TorchPointwise, rotated_heads
from lora_kernels.segments import SegmentPlan, plan_segments

log = structlog.get_logger(__name__)

LARGEST = 448.0
"""Largest number of e4m3 (OCP 8-bit Floating Point Specification, table 1)."""
MARGIN = 2.0
"""Ratio of what can be stored to what was measured, for tokens and adapters that make larger numbers."""
PROMPTS, PROMPT_TOKENS = 8, 256
SEED = 0


def find_kv_scales(
    folder: Path, load_format: str, decoder: Decoder, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Returns the factors by which stored K and V are multiplied, fp32 [layers, 2, kv_heads] on the device: those of
    the checkpoint, if it has them, otherwise measured ones. Raises ValueError if the checkpoint's factors are invalid
    or the model computes K or V that are not finite."""
    stored = None if load_format == "dummy" else read_kv_scales(folder, decoder.spec)
    scales = measure_kv_scales(decoder, dtype, device) if stored is None else stored.to(device)
    most = (scales.amax(dim=(0, 2)) * LARGEST).tolist()
    source = "measured" if stored is None else "checkpoint"
    log.info("scales of K and V in FP8", source=source, largest_key=round(most[0], 3), largest_value=round(most[1], 3))
    return scales


@torch.inference_mode()
def measure_kv_scales(decoder: Decoder, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Measures K and V on prompts that need no text: random tokens, and tokens that the model itself samples after each
    token of the prompt before. Returns, for each head, a power of two, by which scaling is exact: fp32 [layers, 2,
    kv_heads]. The same model gets the same factors. Raises ValueError if K or V is not finite."""
    spec = decoder.spec
    bounds = torch.zeros(spec.layers, 2, spec.kv_heads, device=device)
    arena = Arena(page_shape(spec, 16), 1, 1, dtype, device)
    generator = torch.Generator().manual_seed(SEED)
    tokens = min(PROMPT_TOKENS, spec.max_position)
    prompt = torch.randint(spec.vocab_size, (tokens,), generator=generator)
    for _ in range(PROMPTS):
        meter = _Meter()
        logits = decoder.forward(_chunk(prompt.to(device)), arena, meter)
        bounds = torch.maximum(bounds, torch.stack(meter.bounds))
        if not bounds.isfinite().all():
            raise ValueError("engine.kv_dtype is fp8, and the model computes K or V that are not finite")
        prompt = _samples(logits.float().cpu(), generator)
    exponents = (bounds * (MARGIN / LARGEST)).clamp(min=torch.finfo(torch.float16).tiny).log2().ceil()
    return exponents.exp2()


def _samples(logits: Tensor, generator: torch.Generator) -> Tensor:
    """Draws a token from each row of `logits` ([num_rows, vocab_size]) at temperature 1."""
    return torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]


def _chunk(prompt: Tensor) -> BatchInput:
    """Returns the input of a step with one prompt, int64 [num_tokens], all of whose rows are sampled. It has no pages:
    `_Meter` needs none."""
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
    """A `Backend` for one prompt without adapters, in torch on any device. It stores no K and V, but their bounds.

    Attributes:
        bounds: fp32 [2, kv_heads] of each layer so far: the largest norm of a pair of K that is turned together, and
            the largest number of V.
    """

    name = "meter"

    def __init__(self) -> None:
        self.pointwise = TorchPointwise()
        self.bounds: list[Tensor] = []
        self._key_value: tuple[Tensor, Tensor]

    def rotate_and_write(
        self,
        qkv: Tensor,
        kv: Tensor,
        batch: AttentionBatch,
        cos: Tensor,
        sin: Tensor,
        norms: HeadNorms | None,
        kv_scales: Tensor | None = None,
    ) -> Tensor:
        """Measures K and V and keeps them for `attention`. See `Backend.rotate_and_write`."""
        require_unscaled(kv_scales)
        query, key, value = rotated_heads(self.pointwise, qkv, kv, cos, sin, norms)
        low, high = key.float().chunk(2, dim=-1)
        self.bounds.append(torch.stack([torch.hypot(low, high).amax((0, 2)), value.float().abs().amax((0, 2))]))
        self._key_value = key, value
        return query

    def write_kv(self, kv: Tensor, key: Tensor, value: Tensor, batch: AttentionBatch) -> None:
        """Does nothing: `attention` reads the K and V that `rotate_and_write` computed."""

    def attention(
        self,
        query: Tensor,
        kv: Tensor,
        batch: AttentionBatch,
        scale: float,
        window: int | None = None,
        kv_scales: Tensor | None = None,
    ) -> Tensor:
        """Returns causal attention over the K and V of the same layer. See `Backend.attention`."""
        age = torch.arange(len(query), device=query.device)
        age = age[:, None] - age
        seen = (age >= 0) & (age < (math.inf if window is None else window))
        query, key, value = (tensor.transpose(0, 1)[None] for tensor in (query, *self._key_value))
        out = F.scaled_dot_product_attention(query, key, value, seen, scale=scale, enable_gqa=True)
        return out[0].transpose(0, 1)

    def prepare_lora(self, arena: Tensor, table: LoraTable, plan: SegmentPlan) -> None:
        """Returns None: there are no adapters."""

    def add_lora(self, out: Tensor, x: Tensor, prepared: Any, layer: int, group: ProjectionGroup) -> None:
        """Does nothing: there are no adapters."""
