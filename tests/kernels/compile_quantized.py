"""What `compile_worker` compiles of quantised weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lora_kernels.gpu.coded_rows import BLOCK, LARGEST
from lora_kernels.gpu.int8_linear import BLOCK as INT8_BLOCK
from lora_kernels.gpu.quantized_linear import BLOCK_N, LEAST_ROWS, MOST_ROWS, MOST_SPLITS, SUM_BLOCK, launch_options
from lora_kernels.gpu.quantized_weights import BLOCK_N as FEATURES
from lora_kernels.gpu.triton_coding import code_rows_kernel, scale_sums_kernel
from lora_kernels.gpu.triton_quantized import dequantise_kernel, product_kernel, split_sum_kernel

POINTERS = {
    "packed_ptr": "i16",
    "group_scales_ptr": "fp16",
    "group_offsets_ptr": "fp16",
    "bias_ptr": "bf16",
    **dict.fromkeys(("row_scales_ptr", "feature_scales_ptr"), "fp32"),
    "split_sums_ptr": "fp32",
}
FORMS = {"8 bits of 32": (8, 32, 0), "4 bits of 128": (4, 128, 1), "4 bits of 32": (4, 32, 2)}
"""Bits, group and kind of offsets; the last takes the most registers, and is the one that CI compiles."""


def cases(capability: int) -> Iterator[tuple[str, Any, dict[str, Any], dict[str, int]]]:
    for form, (bits, group, offsets) in FORMS.items():
        weight = {"BITS": bits, "GROUP": group, "OFFSETS": offsets}
        for height in (LEAST_ROWS, MOST_ROWS):
            tile = {"HAS_BIAS": True, "SPLITS": 1, "BLOCK_N": BLOCK_N, "BLOCK_M": height}
            yield f"product {form}, {height} rows", product_kernel, {**weight, **tile}, launch_options(height)
        lookup = {"HAS_IDS": True, "BLOCK_N": 1}
        yield f"dequantise {form}, ids", dequantise_kernel, {**weight, **lookup}, {"num_warps": 1}
        block = {"HAS_IDS": False, "BLOCK_N": FEATURES}
        yield f"dequantise {form}", dequantise_kernel, {**weight, **block}, {"num_warps": 4}
    for dtype, largest in LARGEST.items():
        coding = {"LARGEST": largest, "ROUNDS": not dtype.is_floating_point, "BLOCK": BLOCK}
        if capability >= 89 or coding["ROUNDS"]:
            name = "code int8" if coding["ROUNDS"] else "code fp8"
            yield name, code_rows_kernel, coding, {"num_warps": 8}
    yield "scale sums", scale_sums_kernel, {"HAS_BIAS": True, "BLOCK": INT8_BLOCK}, {"num_warps": 4}
    yield "split sum", split_sum_kernel, {"HAS_BIAS": True, "SPLITS": MOST_SPLITS, "BLOCK": SUM_BLOCK}, {"num_warps": 4}
