"""Section B: linear layers of quantised weights at the 8B shape, beside cuBLAS in bf16 and the byte limit."""

from __future__ import annotations

from functools import partial

import torch

from benchmarks.gpu.correct_quantized import BY_ROWS, inputs, random_fp8, random_weight
from benchmarks.gpu.journal import Journal
from benchmarks.gpu.shapes import groups_of, model_dtype, model_spec
from benchmarks.gpu.timing import memory_bandwidth, time_calls
from lora_kernels.fp8 import FP8
from lora_kernels.gpu.quantized_linear import DeviceLinear
from lora_kernels.gpu.quantized_weights import stored_bits
from lora_kernels.linear import Linear, make_linear, multiplies_fp8
from lora_kernels.quantized import INT4, INT8, AnyCoding, Coding

FORMS = {
    "bf16": None,
    "4 bits of 128": Coding(4, 128, 8),
    "int4": INT4,
    "int8": INT8,
    "int8 by rows": BY_ROWS,
    "fp8": FP8,
}
ROWS = (1, 16, 64, 256, 2048)
LAYERS = 4
"""Layers that are timed, so that no cache holds their weights."""
LEAST_S = 3.0


def run(journal: Journal) -> None:
    device = torch.device(journal.device)
    bandwidth, spec = memory_bandwidth(device, journal.tiny), model_spec(journal.tiny)
    shapes = {group.name: (sum(group.out_features), group.in_features) for group in groups_of(spec)}
    for form, coding in FORMS.items():
        if (coding is FP8 and not multiplies_fp8(device, model_dtype(journal.tiny))) or (
            coding is BY_ROWS and journal.tiny
        ):
            continue
        for name, shape in {"o": (130, 256)}.items() if journal.tiny else shapes.items():
            with journal.case(f"{form}, {name}", LEAST_S):
                time_layer(journal, f"{form}, {name}", coding, shape, bandwidth)


def time_layer(journal: Journal, name: str, coding: AnyCoding | None, shape: tuple[int, int], bandwidth: float) -> None:
    device, dtype = torch.device(journal.device), model_dtype(journal.tiny)
    linears, taken = zip(*(make_layer(coding, shape, dtype, device) for _ in range(LAYERS)), strict=True)
    for rows in (2,) if journal.tiny else ROWS:
        x = inputs(rows, shape[1], dtype, device)
        timing = time_calls([partial(linear, x) for linear in linears], device)
        moved = taken[0] + rows * sum(shape) * dtype.itemsize
        limit = moved / bandwidth / (timing.us * 1e-6)
        journal.row("linear layers", f"{name}, {rows} rows", **{"us": timing.us, "MB": moved / 1e6, "of limit": limit})


def make_layer(
    coding: AnyCoding | None, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> tuple[Linear, int]:
    """Return a layer and the bytes of its weight."""
    if coding is None:
        weight = torch.empty(shape, dtype=dtype, device=device).normal_()
        return make_linear(weight), weight.nbytes
    if not isinstance(coding, Coding):
        return DeviceLinear([random_fp8(shape, device)], None, dtype), shape[0] * shape[1]
    bits = stored_bits(coding)
    linear = DeviceLinear([random_weight(coding, shape, device)], None, dtype)
    return linear, round(shape[0] * shape[1] * (bits or 16) / 8)
