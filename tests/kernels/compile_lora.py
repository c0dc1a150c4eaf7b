"""The LoRA kernels as they are shipped, to be compiled by compile_worker.py."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from lora_kernels.gpu.triton_lora import LAYOUT, expand_kernel, shrink_kernel
from lora_kernels.gpu.triton_lora_tuning import PART_UNIT, SHIPPED, LoraTuning
from lora_kernels.gpu.triton_tuned import LEAST_EARLY
from lora_kernels.layout import FP8_SCALES

GROUPS = {
    "qkv": ((0, 1, 2), 4096, (4096, 1024, 1024)),
    "down": ((6,), 1536, (576,)),
}


def cases(capability: int) -> Iterator[tuple[str, Any, dict[str, Any], dict[str, int]]]:
    """Name, kernel, constants, launch options."""
    early = LoraTuning(early=int(capability >= LEAST_EARLY)).early_options()
    for (name, (group, width, outs)), long, fp8 in itertools.product(GROUPS.items(), (False, True), (False, True)):
        if fp8 and name != "qkv":
            continue
        case = f"{name}{' long' if long else ''}{' fp8' if fp8 else ''}"
        common = {"LAYERS": 32, "TARGETS": 7, "GROUP": group, "FP8": fp8, **LAYOUT, **early}
        splits = SHIPPED.num_splits(width)
        constants = {"IN_FEATURES": width, "SPLITS": splits, "PART_UNIT": PART_UNIT}
        yield f"shrink {case}", shrink_kernel, *_split({**common, **constants, **SHIPPED.shrink_options(long, fp8)})
        constants = {"OUT_FEATURES": outs, "FP8_SCALES": FP8_SCALES}
        yield (
            f"expand {case}",
            expand_kernel,
            *_split({**common, **constants, **SHIPPED.expand_options(long, splits, fp8)}),
        )


def _split(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, int]]:
    """Constants, and launch options."""
    launch = {name: options.pop(name) for name in ("num_warps", "num_stages", "launch_pdl") if name in options}
    return options, launch
