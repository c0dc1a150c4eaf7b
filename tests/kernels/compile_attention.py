"""The attention kernels as they are shipped, to be compiled for a GPU that need not be there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from lora_kernels.backend import Scores
from lora_kernels.gpu.triton_attention import Processor, decode_tuning, prefill_tuning
from lora_kernels.gpu.triton_context import FP8, AttentionCall, block_width
from lora_kernels.gpu.triton_decode import decode_constants, decode_kernel
from lora_kernels.gpu.triton_kv import write_kernel
from lora_kernels.gpu.triton_partials import MERGE_SPLITS, MERGE_WARPS, merge_kernel
from lora_kernels.gpu.triton_prefill import prefill_constants, prefill_kernel
from lora_kernels.gpu.triton_prefill_plan import plan_constants, plan_kernel

PROCESSORS = {
    80: Processor(108, 164 << 10, 80),
    90: Processor(132, 228 << 10, 90),
    100: Processor(148, 228 << 10, 100),
}
"""A100, H100 and B200 (CUDA programming guide, technical specifications by compute capability)."""
KV_HEADS, MAX_SEQS = 8, 256


@dataclass(frozen=True)
class Layer:
    """A kind of layer that kernels are compiled for."""

    head_dim: int = 128
    group: int = 4
    window: int | None = None
    kv_dtype: torch.dtype = torch.bfloat16
    scaled: bool = False
    cap: float | None = None
    sinks: bool = False

    @property
    def name(self) -> str:
        kinds = {FP8: "fp8", torch.float32: "fp32"}
        marks = (f"of {self.group}", "window" * bool(self.window), "cap" * bool(self.cap), "sinks" * self.sinks)
        marks += (kinds.get(self.kv_dtype, ""),)
        return " ".join((str(self.head_dim), *filter(None, marks)))

    @property
    def call(self) -> AttentionCall:
        query = torch.empty(1, KV_HEADS * self.group, self.head_dim, dtype=torch.bfloat16)
        kv = torch.empty(1, 2, 16, KV_HEADS, self.head_dim, dtype=self.kv_dtype)
        scores = Scores(1.0, self.cap, torch.ones(query.shape[1]) if self.sinks else None)
        return AttentionCall(query, query, kv, scores, self.window, torch.ones(2, KV_HEADS) if self.scaled else None)


LAYERS = (
    Layer(64),
    Layer(64, group=8, window=128, sinks=True),
    Layer(80),
    Layer(112, group=7),
    Layer(128),
    Layer(128, window=4096),
    Layer(256, group=2, window=4096, cap=50.0),
)
FP8_LAYERS = (Layer(128, kv_dtype=FP8, scaled=True), Layer(256, kv_dtype=FP8, scaled=True))
"""8-bit floats begin with compute capability 8.9."""
FULL_LAYERS = (Layer(256, kv_dtype=torch.float32),)
"""Wide heads in fp32 take the most shared memory. Threads add up their products, and the sums lie on the stack."""


def layers(capability: int) -> tuple[Layer, ...]:
    return (*LAYERS, *(FP8_LAYERS if capability >= 89 else ()))


def cases(capability: int) -> Iterator[tuple[str, Any, dict[str, Any], dict[str, int]]]:
    """Name, kernel, constants, launch options."""
    for layer in (*layers(capability), *FULL_LAYERS):
        decode = decode_tuning(layer.head_dim, layer.kv_dtype, PROCESSORS[capability])
        constants = decode_constants(MAX_SEQS, layer.group, decode) | layer.call.constants
        yield f"decode {layer.name}", decode_kernel, constants, launch(decode)
        prefill = prefill_tuning(layer.head_dim, layer.kv_dtype, PROCESSORS[capability])
        constants = prefill_constants(layer.group, prefill) | layer.call.constants
        yield f"prefill {layer.name}", prefill_kernel, constants, launch(prefill)
        constants = plan_constants(MAX_SEQS, layer.call, prefill)
        yield f"plan {layer.name}", plan_kernel, constants, {"num_warps": 1, "num_stages": 1}
        if layer in FULL_LAYERS:
            continue
        constants = {
            "HAS_SINKS": layer.sinks,
            "HEADS": 32,
            "HEAD_DIM": layer.head_dim,
            "BLOCK_D": block_width(layer.head_dim),
        }
        constants |= {"MAX_SPLITS": decode.max_splits, "SPLITS": MERGE_SPLITS}
        yield f"merge {layer.name}", merge_kernel, constants, {"num_warps": MERGE_WARPS, "num_stages": 1}
        yield write_case(layer)


def launch(tuning: Any) -> dict[str, int]:
    return {"num_warps": tuning.num_warps, "num_stages": tuning.num_stages}


def write_case(layer: Layer) -> tuple[str, Any, dict[str, Any], dict[str, int]]:
    width = KV_HEADS * layer.head_dim
    constants = {"FP8": layer.kv_dtype == FP8, "HAS_SCALES": layer.scaled, "BLOCK_SIZE": 16, "KV_HEADS": KV_HEADS}
    constants |= {"WIDTH": width, "BLOCK": 1 << (width - 1).bit_length()}
    return f"write {layer.name}", write_kernel, constants, {"num_warps": 4, "num_stages": 1}


def programs_side_by_side(capability: int) -> dict[str, int]:
    """Decode kernel -> how many of its programs are to run on one multiprocessor at a time."""
    processor = PROCESSORS[capability]
    tunings = {layer.name: decode_tuning(layer.head_dim, layer.kv_dtype, processor) for layer in layers(capability)}
    return {f"decode {name}": tuning.programs // processor.count for name, tuning in tunings.items()}
