"""Builds the Triton backend for one device, where every kernel has the best known configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

import torch
import triton

from lora_kernels.gpu.triton_attention import (
    PagedAttention,
    Processor,
    decode_tuning,
    find_processor,
    prefill_tuning,
)
from lora_kernels.gpu.triton_backend import TritonBackend
from lora_kernels.gpu.triton_decode import DecodeTuning
from lora_kernels.gpu.triton_lora_tuning import LoraTuning
from lora_kernels.gpu.triton_prefill_plan import PrefillTuning
from lora_kernels.tuning import Config, DeviceKey, Tunings, load_tunings

LORA_SHORT, LORA_LONG, DECODE, PREFILL = "lora short", "lora long", "decode attention", "prefill attention"
_LORA = asdict(LoraTuning())
_SHORT = ("narrow_rows", "narrow_k", "tile_rows", "tile_k", "shrink_warps", "shrink_stages")
_EXPAND = ("expand_block", "expand_warps", "expand_stages", "expand_ranks")
DEFAULTS: Mapping[str, Config] = {
    LORA_SHORT: {name: _LORA[name] for name in (*_SHORT, *_EXPAND)},
    LORA_LONG: {name: value for name, value in _LORA.items() if name.startswith("long_") and name != "long_from"},
    DECODE: asdict(DecodeTuning()),
    PREFILL: asdict(PrefillTuning()),
}
"""Every kernel that can be configured, with its parameters and their defaults. For attention, only the names count,
because the defaults follow from the device."""
LEAST_EARLY = 90
"""Lowest compute capability, times ten, of devices on which a kernel may begin before the previous one has ended
(programmatic dependent launch)."""


def device_key(device: torch.device) -> DeviceKey:
    """Return the key of a CUDA device's stored measurements: its name, compute capability and the Triton version."""
    major, minor = torch.cuda.get_device_capability(device)
    return DeviceKey(torch.cuda.get_device_name(device), 10 * major + minor, triton.__version__)


def lora_shape(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def attention_shape(head_dim: int, kv_dtype: torch.dtype) -> str:
    """Return the key of measurements of attention over K and V stored in `kv_dtype`, on which sizes of blocks depend: K
    and V take nearly all of the bytes and of the shared memory."""
    return f"{head_dim} {lora_shape(kv_dtype)}"


def load_backend(
    device: torch.device, dtype: torch.dtype, head_dim: int, data_dir: Path | None, fp8_kv: bool = False
) -> TritonBackend:
    """Return the backend of a CUDA device for a model's dtype and head dimension, KV perhaps in FP8, in the best known
    configuration: measured in `data_dir`, if given, or shipped. Raises TuningError if a file cannot be used."""
    tunings = load_tunings(device_key(device), DEFAULTS, data_dir)
    return tuned_backend(tunings, device, dtype, head_dim, torch.float8_e4m3fn if fp8_kv else dtype)


def tuned_backend(
    tunings: Tunings, device: torch.device, dtype: torch.dtype, head_dim: int, kv_dtype: torch.dtype
) -> TritonBackend:
    """Return the backend for a model of this dtype and head dimension whose K and V are stored in `kv_dtype`, with the
    configurations in `tunings`, and with the device's defaults where there are none."""
    processor, shape = find_processor(device), attention_shape(head_dim, kv_dtype)
    decode = tunings.apply(DECODE, shape, decode_tuning(head_dim, kv_dtype, processor))
    prefill = tunings.apply(PREFILL, shape, prefill_tuning(head_dim, kv_dtype, processor))
    return TritonBackend(lora_tuning(tunings, dtype, processor), PagedAttention(decode, prefill))


def lora_tuning(tunings: Tunings, dtype: torch.dtype, processor: Processor) -> LoraTuning:
    """Return the LoRA tuning for a model of `dtype`, merged from configurations of short and of long segments."""
    parts = [tunings.find(kernel, lora_shape(dtype), DEFAULTS[kernel]) for kernel in (LORA_SHORT, LORA_LONG)]
    return replace(LoraTuning(early=int(processor.capability >= LEAST_EARLY)), **parts[0], **parts[1])
