"""Section B: linear layers of quantised weights at the 8B shape, beside cuBLAS in bf16 and the byte limit.

The projections of K and V are timed by themselves, too: a checkpoint may code them differently, and a product with so
few outputs hardly fills a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.gpu.exact import BY_ROWS, inputs, random_fp8, random_weight
from benchmarks.gpu.journal import Journal
from benchmarks.gpu.shapes import groups_of, model_dtype, model_spec
from benchmarks.gpu.timing import memory_bandwidth, time_calls
from lora_kernels.forms import multiplies_fp8
from lora_kernels.fp8 import FP8
from lora_kernels.gpu.quantized_linear import DeviceLinear
from lora_kernels.gpu.quantized_weights import stored_bits
from lora_kernels.linear import Linear, make_linear
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
NARROW_ROWS = (1, 4, 8, 16, 32, 64)
LEAST_S = 3.0


@dataclass(frozen=True, slots=True)
class LinearWork:
    """A linear layer to time.

    Attributes:
        shape: (out_features, in_features).
        rows: numbers of rows that it is timed with.
        layers: number of layers of this shape that are timed in turn, so that no cache holds their weights.
    """

    name: str
    shape: tuple[int, int]
    rows: tuple[int, ...] = ROWS
    layers: int = 4


def linear_works(tiny: bool) -> list[LinearWork]:
    """Return the works at the 8B shape, or in toy size if `tiny`."""
    if tiny:
        return [LinearWork("o", (130, 256), (2,)), LinearWork("k or v", (32, 256), (1, 2))]
    spec = model_spec(tiny)
    narrow = LinearWork("k or v", (spec.kv_width, spec.hidden_size), NARROW_ROWS, layers=16)
    groups = groups_of(spec)
    return [*(LinearWork(group.name, (sum(group.out_features), group.in_features)) for group in groups), narrow]


def run(journal: Journal) -> None:
    device = torch.device(journal.device)
    bandwidth = memory_bandwidth(device, journal.tiny)
    for form, coding in FORMS.items():
        if (coding is FP8 and not multiplies_fp8(device, model_dtype(journal.tiny))) or (
            coding is BY_ROWS and journal.tiny
        ):
            continue
        for work in linear_works(journal.tiny):
            name = f"{form}, {work.name}"
            with journal.case(name, LEAST_S):
                time_layer(journal, name, coding, work, bandwidth)


def time_layer(journal: Journal, name: str, coding: AnyCoding | None, work: LinearWork, bandwidth: float) -> None:
    device, dtype = torch.device(journal.device), model_dtype(journal.tiny)
    linears, taken = zip(*(make_layer(coding, work.shape, dtype, device) for _ in range(work.layers)), strict=True)
    for rows in work.rows:
        x = inputs(rows, work.shape[1], dtype, device)
        timing = time_calls([partial(linear, x) for linear in linears], device)
        moved = taken[0] + rows * sum(work.shape) * dtype.itemsize
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
